"""The model before training, from which a KL term or a loss of pairs measures.

In: the policy, the folder that it was loaded from. Out: a `Reference`: the policy without its adapters, or a frozen
copy. A large copy on a CPU is in memory only while a step is scored, and read again for the next one: gradients and
moments then have its place, and reading takes seconds of a step of minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel, read_frozen_module, round_frozen
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import PackScores
from sharpen.learning.trainer.team import Team

LARGE_COPY = 100_000_000
"""From so many weights on a copy on a CPU leaves memory after each step."""


class Reference(Protocol):
    """The model before training."""

    def score(self, pack: Pack) -> PackScores:
        """Return logprobs and entropies of the pack's entries, without gradient."""


def load_reference(
    policy: TrainedModel, source: str | Path, config: TrainerConfig, device: torch.device, team: Team | None = None
) -> Reference:
    """Return the policy without its adapters, or a frozen copy, which the ranks of `team` share out. Raises
    `ModelError` if the copy cannot be read."""
    if isinstance(policy, AdaptedModel):
        return WithoutAdapters(policy)
    copy = FrozenCopy(source, policy.compute_dtype, device)
    if team is not None:
        copy.divide(team, cpu_offload=config.cpu_offload)
    return copy


class WithoutAdapters:
    """A policy without its adapters, which needs no second copy of the weights."""

    def __init__(self, policy: AdaptedModel) -> None:
        self._policy = policy

    def score(self, pack: Pack) -> PackScores:
        """See `Reference.score`."""
        with torch.no_grad(), self._policy.switched_off():
            return self._policy.score(pack)


class FrozenCopy:
    """A frozen model of its own. On a CPU its weights, if they are `large_copy` or more, leave memory when it rests."""

    def __init__(
        self, source: str | Path, dtype: torch.dtype, device: torch.device, large_copy: int = LARGE_COPY
    ) -> None:
        """Load it, to compute in `dtype`. Raises `ModelError` for unsupported architectures."""
        self._source, self._dtype, self._device = source, dtype, device
        self.model = TrainedModel(read_frozen_module(source, dtype, device), compute_dtype=dtype)
        self.model.freeze()
        count = sum(one.numel() for one in self.model.module.parameters())
        self._rests = device.type == "cpu" and count >= large_copy
        self._is_resting = False
        self._files = _files_of(source)

    def divide(self, team: Team, *, cpu_offload: bool) -> None:
        """Share the weights out over several ranks, which keep them."""
        team.divide(self.model, cpu_offload=cpu_offload)
        self._rests = self._rests and team.size == 1 and not cpu_offload

    def score(self, pack: Pack) -> PackScores:
        """See `Reference.score`. Raises `ModelError` if the weights cannot be read again, or are others by now."""
        if self._is_resting:
            self._read_again()
        with torch.no_grad():
            return self.model.score(pack)

    def rest(self) -> None:
        """Let go of the weights until the next step is scored, if they are many."""
        if self._rests:
            for one in self.model.module.parameters():
                one.data = one.data.new_empty(0)
            self._is_resting = True

    def _read_again(self) -> None:
        if _files_of(self._source) != self._files:
            raise ModelError(
                f"the files of {self._source} have changed since the run began: its reference would be another model. "
                "Put the files back, and go on from the last checkpoint"
            )
        module = read_frozen_module(self._source, self._dtype, self._device)
        if self._dtype == torch.bfloat16:
            round_frozen(module.requires_grad_(False), self._dtype)
        read = dict(module.named_parameters())
        for name, one in self.model.module.named_parameters():
            one.data = read[name].data
        self._is_resting = False


def _files_of(source: str | Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of a model's files of weights."""
    found = [file for file in Path(source).glob("*") if file.suffix in (".safetensors", ".bin")]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in found}
