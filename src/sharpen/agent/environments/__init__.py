"""Environments of others as they are: each gives the tasks of a run, attempts them and scores the attempts.

- `environment`: what an environment is, what it is opened with, and how its package is had
- `opening`: opens the environment of a run, or several with their weights; its tasks, workflow and judge
- `reasoning_gym`: the generators of the package reasoning-gym
- `games`: what they have in common: conversations, seeds, rewards, arguments
- `gymnasium`: environments of Gymnasium
- `textarena`: games of TextArena, for one player or two
- `verifiers`: environments of the package verifiers
- `verifiers_chat`: how an agent of theirs talks in this process
- `openenv`: servers of OpenEnv
- `harbor`: task folders of Harbor: an agent in a container, then the tests
- `harbor_tasks`: reads these folders
"""
