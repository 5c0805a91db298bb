"""The settings of prompt tuning: the fields and defaults of AgentScope's tuner, then our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sharpen.config.public import Strict

Level = Literal["light", "medium", "heavy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of prompts to propose, and the largest number of validation tasks."""

    num_candidates: int
    num_validation: int


SIZES: dict[Level, Size] = {
    "light": Size(num_candidates=6, num_validation=100),
    "medium": Size(num_candidates=12, num_validation=300),
    "heavy": Size(num_candidates=18, num_validation=1000),
}
"""The same sizes as DSPy's."""


class PromptTuneConfig(Strict):
    """Settings of `tune_prompt()`."""

    lm_model_name: Any = "dashscope/qwen-plus"
    """The model that proposes: a name as DSPy takes it (`provider/model`), or a `dspy.LM` object."""
    optimization_level: Level | None = "light"
    """Prompts to propose, and validation tasks to try them on, at most: 6 and 100 (`light`), 12 and 300 (`medium`), 18
    and 1000 (`heavy`); None leaves it to `num_candidates`, with all validation tasks."""
    eval_display_progress: bool = True
    """Show what the optimizer prints, and how far evaluations are."""
    eval_display_table: int = Field(default=5, ge=0)
    """Evaluation tasks to show with their rewards before and after."""
    eval_num_threads: int = Field(default=16, ge=1)
    """Workflows that run at the same time."""
    compare_performance: bool = True
    """Evaluate the initial prompt, too."""
    optimizer: Literal["miprov2", "gepa"] = "miprov2"
    """`miprov2` proposes prompts from the tasks and searches among them; `gepa` lets the model reflect on what a prompt
    got wrong, and goes on from the better ones."""
    num_candidates: int | None = Field(default=None, ge=2)
    """Prompts to propose, where `optimization_level` is None."""
    seed: int = Field(default=0, ge=0)
    """Seed of the split and of the search."""

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if self.optimization_level is None and self.num_candidates is None:
            raise ValueError(
                "optimization_level is None, which leaves the number of prompts to num_candidates: set it (`light` "
                f"proposes {SIZES['light'].num_candidates})"
            )
        if self.optimization_level is not None and self.num_candidates is not None:
            raise ValueError(
                f"num_candidates is {self.num_candidates}, but optimization_level {self.optimization_level!r} decides "
                "that: set it to None, or leave num_candidates out"
            )
        return self

    @property
    def size(self) -> Size:
        """The size of the search."""
        if self.optimization_level is not None:
            return SIZES[self.optimization_level]
        assert self.num_candidates is not None
        return Size(num_candidates=self.num_candidates, num_validation=1_000_000)
