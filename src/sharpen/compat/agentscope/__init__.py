"""The names of AgentScope's tuner.

- `tuner/`: every name of `agentscope.tuner`
"""
