"""Everything that runs the user's code: datasets become tasks, a workflow attempts them, a judge scores the attempts.

In: settings, the user's functions, a model to talk to. Out: groups of rollouts with rewards, failures by cause. It must
not know which engine answers, how calls are recorded, or what is trained.

- `tasks/`: the datasets of a run, and the order in which their tasks are drawn
- `rollout/`: attempts at tasks: the user's workflow and judge, retries, failures by cause
- `environments/`: tasks, workflow and judge of the field's environments
- `operators/`: functions that choose tasks before a run, or change a step's rollouts before they train
- `judges/`: judges that ask a model: rubrics, comparisons, several together
- `sandbox/`: agents that are commands, each in a folder and with processes of its own
- `agentscope/`: what agents written with AgentScope need
- `transcript`: a rollout in a few lines, for lists
"""
