"""Everything that runs the user's code: datasets become tasks, a workflow attempts them, a judge scores the attempts.

In: settings, the user's functions, a model to talk to. Out: groups of rollouts with rewards, failures by cause. It must
not know which engine answers, how calls are recorded, or what is trained.
"""
