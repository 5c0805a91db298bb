"""The teacher: a frozen model that says of every state the policy came to how it would have gone on.

In: `Pack`s of the policy's own tokens. Out: the teacher's logprobs of the sampled tokens, or itself for the policy to
be compared with over the vocabulary, both at each token's sampling temperature.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from sharpen.algorithm.distill import Distill
from sharpen.errors import CheckpointError, TrainingError
from sharpen.trainer.model import DType, TrainedModel
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import OtherModel
from sharpen.trainer.sharding import whole

_SAMPLED_VALUES = 64


class Teacher:
    """Owns the teacher's weights, which never change."""

    def __init__(self, model: TrainedModel) -> None:
        """Take over `model`."""
        model.freeze()
        self.model = model
        self._num_ids = int(model.module.get_input_embeddings().weight.shape[0])

    @classmethod
    def load(cls, source: str | Path, *, dtype: DType, device: torch.device) -> Teacher:
        """Read a Hugging Face model. Raises `ModelError` as the policy does."""
        return cls(TrainedModel.load(source, dtype=dtype, device=device))

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Logprobs of the entries' tokens, shape E. Raises `TrainingError` as `check_ids`."""
        self.check_ids(pack)
        with torch.no_grad():
            return self.model.score(pack).logprobs_E

    def compared(self, pack: Pack, distill: Distill) -> OtherModel:
        """What the policy is to be compared with. Raises `TrainingError` as `check_ids`."""
        self.check_ids(pack)
        with torch.no_grad():
            return self.model.compare(pack, distill.divergences)

    def fingerprint(self) -> str:
        """A short text that is the same for the same weights, wherever they lie: of a few values of each."""
        found = hashlib.blake2b(digest_size=16)
        for name, parameter in sorted(self.model.module.named_parameters()):
            values = whole(parameter.detach()).flatten()
            some = values[:: max(1, len(values) // _SAMPLED_VALUES)]
            found.update(f"{name} {tuple(parameter.shape)}".encode() + some.float().cpu().numpy().tobytes())
        return found.hexdigest()

    def check_same(self, recorded: str | None, directory: Path) -> None:
        """Raise `CheckpointError` if the run that wrote the checkpoint in `directory` had another teacher."""
        if recorded != self.fingerprint():
            raise CheckpointError(
                f"{directory} was written by a run with {'another' if recorded else 'no'} teacher: continue with its "
                "distill.teacher_path, or start another run"
            )

    def check_ids(self, pack: Pack) -> None:
        """Raise `TrainingError` for an id that the teacher does not have. Vocabularies are the same, but embeddings may
        have more rows, and a model may sample one of those."""
        for ids in (pack.ids_N, pack.targets_E):
            unknown = np.flatnonzero(ids >= self._num_ids)
            if len(unknown):
                raise TrainingError(
                    f"the policy sampled id {int(ids[unknown[0]])}, which is beyond its vocabulary and beyond the "
                    f"{self._num_ids} embeddings of the teacher; nothing was updated"
                )
