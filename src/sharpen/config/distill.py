"""The settings of distillation: who teaches, what the teacher is told, and the divergence from it.

In: YAML or keyword arguments. Out: `DistillConfig`, a section of `RunConfig`.
"""

from __future__ import annotations

import string
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from sharpen.config.public import Strict
from sharpen.config.secrets import hide_in_value

DistillDivergence = Literal["reverse_sampled", "forward", "reverse", "js"]

METRICS = "metrics."
"""Stands before the name of a metric in `DistillConfig.context`."""


def context_fields(context: str) -> tuple[str, ...]:
    """Return the names in braces of a `DistillConfig.context`, in order. Raises `ValueError` for other braces."""
    try:
        parts = [part for part in string.Formatter().parse(context) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"context: {error} (a brace of the text itself is written twice)") from error
    for _, name, form, conversion in parts:
        if not name or form or conversion:
            raise ValueError(f"context has {{{name}}} in a form that is no name in braces (a brace of the text: {{{{)")
    return tuple(dict.fromkeys(str(name) for _, name, _, _ in parts))


def setting_of_teacher(name: str) -> str:
    """Return the setting that says where a teacher of `DistillConfig.models` is."""
    return f"distill.teachers.{name}" if name else "distill.teacher_path"


class DistillConfig(Strict):
    """The teacher of `on_policy_distill` and `jsd`, and the divergence from it. None takes the algorithm's value."""

    teacher_path: str | None = None
    """Folder with a Hugging Face model, or a model name on the hub. With other tokens than the trained model's it
    teaches by `reverse_sampled` alone."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """Several teachers: such a model for each value of the field `teacher_key`."""
    teacher_key: str | None = None
    """Field of the row that says which of `teachers` a task has (`environment`: one for each part of a mixture)."""
    teacher_url: str | None = None
    """URL of an OpenAI-compatible endpoint with the teacher, such as `http://host:8000/v1`, in place of a model that is
    loaded: for `reverse_sampled`. It must give logprobs of a prompt (vLLM, `sharpen serve`)."""
    teacher_model: str | None = None
    """The name of the teacher at `teacher_url`."""
    teacher_api_key_env: str | None = None
    """Environment variable that holds the key of `teacher_url`."""
    own_weights: Literal["start", "current"] | None = None
    """The model teaches itself: with its weights before the run, or with those that train. Needs `context`."""
    own_decay: float | None = Field(default=None, gt=0, lt=1)
    """With `own_weights: current`, their moving average teaches, of which each update keeps this part: 0.95 is TRL's.
    None: the weights as they are."""
    context: str | None = None
    """What the teacher reads in place of the last user message: a text with `{prompt}`, which is that message, fields
    of the row (`{solution}`) and metrics of the rollout (`{metrics.NAME}`). None: it reads what the model read."""
    divergence: DistillDivergence | None = None
    """`forward` KL(teacher || policy), `reverse` KL(policy || teacher) and `js` are over the whole vocabulary;
    `reverse_sampled` estimates `reverse` from the sampled tokens, by policy gradient."""
    beta: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Weight of the teacher in the mixture of `js` (default 0.5): near 0 like `forward`, near 1 like `reverse`."""
    coef: float | None = Field(default=None, gt=0.0)
    """Weight of the divergence (default 1)."""

    @property
    def metrics_told(self) -> tuple[str, ...]:
        """The metrics of a rollout that the teacher is told."""
        names = () if self.context is None else context_fields(self.context)
        return tuple(name.removeprefix(METRICS) for name in names if name.startswith(METRICS))

    @property
    def models(self) -> dict[str, str]:
        """The teachers' folders or names by name; a single one has the name ""."""
        return self.teachers or ({} if self.teacher_path is None else {"": self.teacher_path})

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.teachers and self.teacher_path is not None:
            raise ValueError("teacher_path is one teacher for all tasks, and teachers are several: give one of them")
        if bool(self.teachers) != (self.teacher_key is not None):
            raise ValueError("teachers and teacher_key go together: give both, or neither")
        if "" in self.teachers:
            raise ValueError("teachers has an empty name: name each by what the field teacher_key of its tasks says")
        if (self.teacher_url is None) != (self.teacher_model is None):
            raise ValueError("teacher_url and teacher_model go together: give both, or neither")
        if self.teacher_api_key_env is not None and self.teacher_url is None:
            raise ValueError("teacher_api_key_env belongs to an endpoint, but there is no teacher_url")
        if self.teacher_url is not None:
            self._check_endpoint(self.teacher_url)
        if self.own_decay is not None and self.own_weights != "current":
            raise ValueError("own_decay makes an average of the weights that train: set own_weights to current as well")
        if self.own_weights is not None and self.models:
            raise ValueError("own_weights lets the model teach itself, and another teacher is given: give one of them")
        if self.own_weights is not None and self.context is None:
            raise ValueError("own_weights needs context: who reads the same text as the model teaches it nothing")
        if self.context is not None:
            names = context_fields(self.context)
            if "prompt" not in names or len(names) < 2:
                raise ValueError(
                    f"context has {', '.join(f'{{{name}}}' for name in names) or 'no field'}: it needs {{prompt}}, and "
                    "what the teacher knows beside it, such as {solution}"
                )
        return self

    def _check_endpoint(self, url: str) -> None:
        for setting in ("teacher_path", "teachers", "own_weights", "context"):
            if getattr(self, setting):
                raise ValueError(f"teacher_url is a teacher behind an endpoint, and {setting} is set: give one of them")
        if self.divergence not in (None, "reverse_sampled"):
            raise ValueError(
                f"divergence is {self.divergence!r}, which needs the teacher's whole distribution: an endpoint "
                "(teacher_url) gives only the logprobs of the sampled tokens; set reverse_sampled, or take teacher_path"
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"teacher_url is {hide_in_value(url)!r}: it must be an address like https://host/v1")
