"""Tunes the system prompt of an agent.

In: a workflow that takes a system prompt, a judge, tasks. Out: the best prompt that was found, with figures. The names
are those of AgentScope's `tuner.prompt_tune`. DSPy and GEPA (the extra `prompts`) are imported when tuning starts.

- `settings`: `PromptTuneConfig`
- `tuning`: `tune_prompt()`: proposals, trials, the comparison at the end
- `comparison`: tries prompts, and compares the best with the first
- `mipro`: proposals by DSPy's MIPROv2
- `reflection`: proposals by GEPA
"""

from sharpen.beyond.prompt_tune.settings import PromptTuneConfig
from sharpen.beyond.prompt_tune.tuning import tune_prompt

__all__ = ["PromptTuneConfig", "tune_prompt"]
