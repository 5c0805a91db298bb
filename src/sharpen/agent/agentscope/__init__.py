"""What AgentScope's agents need: its model objects around ours, and silence.

- `model`: our model as the chat model of whichever AgentScope is imported
- `console`: keeps its agents from printing what they say
"""
