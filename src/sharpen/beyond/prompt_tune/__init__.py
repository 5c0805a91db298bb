"""Tunes the system prompt of an agent.

In: a workflow that takes a system prompt, a judge, tasks. Out: the best prompt that was found, with figures. The names
are those of AgentScope's `tuner.prompt_tune`. DSPy and GEPA (the extra `prompts`) are imported when tuning starts.
"""

from sharpen.beyond.prompt_tune.settings import PromptTuneConfig
from sharpen.beyond.prompt_tune.tuning import tune_prompt

__all__ = ["PromptTuneConfig", "tune_prompt"]
