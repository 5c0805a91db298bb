"""The expert loss of algorithms that learn from rollouts and from an expert's rows in the same update.

In: the number of the step, logprobs of the expert's tokens. Out: the weight of the expert loss, and a loss for each of
its tokens. The loss of an update is `(1 - mu) policy loss + mu expert loss`; each of the two is normalized over its own
tokens of the whole update.

Shape suffixes: E the expert's tokens that carry loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import cos, pi
from typing import TYPE_CHECKING

from sharpen.config.run import ExpertConfig
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """The weights of the expert loss and of its tokens.

    `mu` is the weight of the expert loss, or the peak of its schedule: it rises linearly over `mu_warmup_steps` steps,
    then falls to `mu_valley` along a cosine over `mu_decay_steps` (None: it stays). With `phi`, the loss of a token is
    weighted by p (1 - p), without gradient.
    """

    mu: float = 0.1
    mu_valley: float | None = None
    mu_warmup_steps: int = 0
    mu_decay_steps: int | None = None
    phi: bool = False

    def weight(self, step: int) -> float:
        """Return the weight of the expert loss in a step; steps count from 1.

        Source: the global coefficient μ of CHORD, arXiv 2508.11408; the schedule is that of its implementation in
        Trinity-RFT 0.6.0.
        """
        if step < self.mu_warmup_steps:
            return self.mu * step / self.mu_warmup_steps
        if self.mu_decay_steps is None or self.mu_valley is None:
            return self.mu
        decayed = step - self.mu_warmup_steps
        if decayed >= self.mu_decay_steps:
            return self.mu_valley
        return self.mu_valley + (self.mu - self.mu_valley) * 0.5 * (1.0 + cos(pi * decayed / self.mu_decay_steps))

    def token_losses(self, logprobs_E: torch.Tensor) -> torch.Tensor:
        """Return `-log π` or, with `phi`, `-p (1 - p) log π`, where p is π without gradient: this reduces the weight of
        tokens with a probability near 1 or near 0. Source: φ of CHORD, arXiv 2508.11408.
        """
        if not self.phi:
            return -logprobs_E
        p_E = logprobs_E.detach().exp()
        return -p_E * (1.0 - p_E) * logprobs_E

    @property
    def formula(self) -> str:
        """The formula of the loss, for display."""
        token = "p (1 - p) log π, p = π without gradient" if self.phi else "log π"
        return f"(1 - mu) policy loss + mu expert loss; of each expert's token: -{token}"


def configured(preset: Expert | None, settings: ExpertConfig, name: str) -> Expert | None:
    """Apply a run's settings to the expert loss of a preset.

    Raises `ConfigError` for settings that the algorithm does not use, and for one that needs rows but has no dataset.
    """
    if preset is None:
        if settings != ExpertConfig():
            raise ConfigError(
                f"the settings of expert have no effect: {name!r} learns from rollouts alone (mix and mix_chord learn "
                "from an expert's rows too)"
            )
        return None
    if settings.dataset is None:
        raise ConfigError(f"{name!r} learns from an expert's rows too: set expert.dataset (its rows are those of sft)")
    return replace(preset, **settings.model_dump(exclude_none=True, exclude={"dataset", "batch_size"}))
