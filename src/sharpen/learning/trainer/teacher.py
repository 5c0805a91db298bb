"""The teacher: a frozen model that scores the policy's own tokens, for on-policy distillation.

In: `Pack`s of the policy's tokens. Out: the teacher's logprobs of the sampled tokens, or its hidden states, to compare
the policy with over the whole vocabulary; both at each token's sampling temperature.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.trainer.model import DType, TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import OtherModel
from sharpen.learning.trainer.sharding import whole

_SAMPLED_VALUES = 64


class Teacher:
    """Owns the weights of the teacher, which never change."""

    def __init__(self, model: TrainedModel) -> None:
        """Take over `model` and freeze it."""
        self.model = model
        self._fingerprint = self._hash()  # of the weights as they were loaded
        model.freeze()
        self._num_ids = int(model.module.get_input_embeddings().weight.shape[0])

    @classmethod
    def load(cls, source: str | Path, *, dtype: DType, device: torch.device) -> Teacher:
        """Load a Hugging Face model. Raises `ModelError` for unsupported architectures."""
        return cls(TrainedModel.load(source, dtype=dtype, device=device))

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Return the logprobs of the entries' tokens, shape E. Raises `TrainingError` like `check_ids`."""
        self.check_ids(pack)
        with torch.no_grad():
            return self.model.score(pack).logprobs_E

    def compared(self, pack: Pack, distill: Distill) -> OtherModel:
        """Return the teacher's side of the policy's `score(compared=...)`. Raises `TrainingError` like `check_ids`."""
        self.check_ids(pack)
        with torch.no_grad():
            return self.model.compare(pack, distill.divergences)

    def fingerprint(self) -> str:
        """Return a hash over a few values of each weight: equal for equal weights, wherever they are stored."""
        return self._fingerprint

    def _hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in sorted(self.model.module.named_parameters()):
            values = whole(parameter.detach()).flatten()
            sample = values[:: max(1, len(values) // _SAMPLED_VALUES)]
            digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def check_same(self, recorded: str | None, directory: Path) -> None:
        """Raise `CheckpointError` if the run that wrote the checkpoint in `directory` had another teacher."""
        if recorded != self.fingerprint():
            raise CheckpointError(
                f"{directory} was written by a run with {'another' if recorded else 'no'} teacher: continue with its "
                "distill.teacher_path, or start a new run"
            )

    def check_ids(self, pack: Pack) -> None:
        """Raise `TrainingError` for an id beyond the teacher's embeddings. The vocabularies are equal, but the policy's
        embeddings may have extra rows, and it may sample one of them."""
        for ids in (pack.ids_N, pack.targets_E):
            unknown = np.flatnonzero(ids >= self._num_ids)
            if len(unknown):
                raise TrainingError(
                    f"the policy sampled id {int(ids[unknown[0]])}, which is outside its vocabulary and outside the "
                    f"{self._num_ids} embeddings of the teacher; nothing was updated"
                )
