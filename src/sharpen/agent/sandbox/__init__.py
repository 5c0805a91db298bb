"""Commands that are agents: each runs in a folder and an environment of its own, and ends with its rollout."""
