"""What AgentScope's agents need: its model objects around ours, and silence."""
