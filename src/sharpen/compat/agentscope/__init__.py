"""The names of AgentScope's tuner."""
