"""The names and objects of other tuners: AgentScope's and Trinity-RFT's.

In: their settings, workflows and functions. Out: ours. It must not know where a run lives, nor what is done with its
results.

- `agentscope/`: `agentscope.tuner`
- `trinity/`: workflows, rewards and configuration files of Trinity-RFT
- `files`: reads configuration files, ours or Trinity-RFT's
"""
