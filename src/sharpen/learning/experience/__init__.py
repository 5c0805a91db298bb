"""Turns scored groups into batches of merged sequences with loss mask, logprobs, advantages and weights.

- `merge`: the calls of a rollout as sequences to train on
- `draw`: the batches of a step: sequences with advantages and weights
- `told`: what a teacher is told beside what the policy read
- `reread`: calls as a teacher with other tokens reads them
- `alignment`: where two tokenizations of a text meet
- `token_bytes`: the bytes that each token stands for
- `replay`: trained groups that train again
- `journal`: the journal of a run, `run.db`, written by one thread
- `records`: its tables, and how groups and steps are written into them
- `opening`: opens it to be read, whoever made it, also while it is written
- `reading`: reads it back as records
- `entropies`: its entropies and ratios of tokens
- `images`: its images, files beside it
- `evidence`: what the certificate reads of it
- `recorded`: what a recording adds to it: sessions that grow, rewards that come later
- `expansion`: refuses records that would not fit in memory
"""
