"""What can be said of a run and proven from its records: the certificate, causes of a flat reward, rewards
by another judge, a judge against its owner's marks.

In: run directories, batches before they train. Out: checks, findings, verdicts that were computed again. It must not
use the code that it checks, nor know how its findings are shown.

- `certificate/`: was it trained as recorded, and does the verdict follow?
- `diagnose/`: why a reward or a loss is flat
- `rescore/`: another judge over stored rollouts
- `judges/`: is the judge right? its owner's marks, compared with what it says
- `ended`: what ended a run early
"""
