"""Tune the system prompt of an agent: propose others, try them on tasks, keep the best.

In: a workflow that takes a system prompt, a judge, tasks. Out: a prompt, with the evidence. The names are those of
AgentScope's `tuner.prompt_tune`. DSPy and GEPA propose (the extra `prompts`); they are loaded once a search begins.
"""

from sharpen.prompt_tune.settings import PromptTuneConfig
from sharpen.prompt_tune.tuning import tune_prompt

__all__ = ["PromptTuneConfig", "tune_prompt"]
