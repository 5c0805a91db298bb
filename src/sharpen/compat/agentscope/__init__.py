"""AgentScope beside us: its model objects around ours, agents that do not print, and the names of its tuner."""
