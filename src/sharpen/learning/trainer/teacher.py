"""Teachers: models that score the policy's own tokens, for on-policy distillation.

In: `Pack`s of the policy's tokens, each with the name of its teacher. Out: the teacher's logprobs of the sampled
tokens, or its hidden states, to compare the policy with over the whole vocabulary; both at each token's sampling
temperature.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.trainer.model import DType, TrainedModel
from sharpen.learning.trainer.output import OutputLayer
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import OtherModel
from sharpen.learning.trainer.sharding import whole
from sharpen.learning.trainer.team import IDLE

Scored = TypeVar("Scored")
_SAMPLED_VALUES = 64


class Teacher:
    """Owns the weights of the teacher, which never change."""

    reads_anew = False
    """Whether it has other tokens than the policy, and packs of its own: see `trainer.reread`."""

    def __init__(self, model: TrainedModel, *, reads_anew: bool = False) -> None:
        """Take over `model` and freeze it."""
        self.model, self.reads_anew = model, reads_anew
        self._fingerprint = self._hash()  # of the weights as they were loaded
        model.freeze()
        self._num_ids = int(model.module.get_input_embeddings().weight.shape[0])

    @classmethod
    def load(cls, source: str | Path, *, dtype: DType, device: torch.device, reads_anew: bool = False) -> Teacher:
        """Load a Hugging Face model. Raises `ModelError` for unsupported architectures."""
        return cls(TrainedModel.load(source, dtype=dtype, device=device), reads_anew=reads_anew)

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Return the logprobs of the entries' tokens, shape E. Raises `TrainingError` like `check_ids`."""
        self.check_ids(pack)
        with torch.no_grad():
            return self.model.score(pack.told or pack).logprobs_E

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

    def check_ids(self, pack: Pack) -> None:
        """Raise `TrainingError` for an id beyond the teacher's embeddings. The vocabularies are equal, but the policy's
        embeddings may have extra rows, and it may sample one of them."""
        for ids in ((pack.told or pack).ids_N, pack.targets_E):
            unknown = np.flatnonzero(ids >= self._num_ids)
            if len(unknown):
                raise TrainingError(
                    f"the policy sampled id {int(ids[unknown[0]])}, which is outside its vocabulary and outside the "
                    f"{self._num_ids} embeddings of the teacher; nothing was updated"
                )


class OwnTeacher(Teacher):
    """The policy, with the weights that train or their moving average (of adapters: of each factor by itself). It
    teaches from what only the teacher is told. `averages` are empty without a decay."""

    def __init__(self, policy: TrainedModel, decay: float | None = None) -> None:
        """Use `policy`; with `decay`, the average begins as its weights are now."""
        self.model = policy
        self._fingerprint = "the policy"
        self._num_ids = int(policy.module.get_input_embeddings().weight.shape[0])
        self._decay = decay
        self.averages = {} if decay is None else {name: one.detach().clone() for name, one in policy.parameters()}

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """See `Teacher.logprobs`."""
        with self._averaged():
            return super().logprobs(pack)

    def compared(self, pack: Pack, distill: Distill) -> OtherModel:
        """See `Teacher.compared`."""
        with self._averaged():
            other = super().compared(pack, distill)
            return other if self._decay is None else replace(other, head=_kept(other.head))

    def follow(self) -> None:
        """After an update, move the average: decay * average + (1 - decay) * weights (SDFT, arXiv 2601.19897)."""
        if self._decay is not None:
            for name, one in self.model.parameters():
                self.averages[name].lerp_(one.detach(), 1.0 - self._decay)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Compute with the average inside this block."""
        moved = [(one, one.data, self.averages[name]) for name, one in self.model.parameters() if name in self.averages]
        try:
            for one, _, average in moved:
                one.data = average
            yield
        finally:
            for one, own, _ in moved:
                one.data = own


class RecordedTeacher(Teacher):
    """A teacher behind an endpoint, whose logprobs came with the tokens: no weights are here."""

    def __init__(self, name: str) -> None:
        """`name` is that of the teacher at its endpoint."""
        self._fingerprint = f"endpoint: {name}"

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Return what came with the entries, shape E."""
        if pack is IDLE:
            return torch.zeros(len(pack.targets_E))
        assert pack.taught_E is not None, "rollouts without a score do not train"
        return torch.from_numpy(pack.taught_E)

    def check_ids(self, pack: Pack) -> None:
        """The endpoint has scored each of them."""


class Teachers:
    """The teachers of a run by name; one for all tasks has the name "". All of them stay in memory."""

    def __init__(self, teachers: Mapping[str, Teacher], *, num_ranks: int = 1) -> None:
        """`num_ranks` is the number of processes over which each is sharded: then all of them make each pass of every
        teacher together, since their packs at the time may be those of different ones."""
        self.by_name = teachers
        self._together = num_ranks > 1 and len(teachers) > 1

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Return what the pack's teacher says of the entries' tokens; see `Teacher.logprobs`."""
        return self._of(pack, lambda teacher, some: teacher.logprobs(some))

    def compared(self, pack: Pack, distill: Distill) -> OtherModel:
        """Return the side of the pack's teacher; see `Teacher.compared`."""
        return self._of(pack, lambda teacher, some: teacher.compared(some, distill))

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        """The moving averages of the policy's weights, not copied, if they teach."""
        own = self.by_name.get("")
        return own.averages if isinstance(own, OwnTeacher) else {}

    def follow(self) -> None:
        """See `OwnTeacher.follow`."""
        own = self.by_name.get("")
        if isinstance(own, OwnTeacher):
            own.follow()

    def check_ids(self, pack: Pack) -> None:
        """See `Teacher.check_ids`."""
        self.by_name[pack.teacher].check_ids(pack)

    def read_anew(self, name: str) -> bool:
        """See `Teacher.reads_anew`."""
        return self.by_name[name].reads_anew

    def fingerprint(self) -> str:
        """Return that of the only teacher, or a hash over the names and fingerprints of several."""
        if self.by_name.keys() == {""}:
            return self.by_name[""].fingerprint()
        named = sorted((name, one.fingerprint()) for name, one in self.by_name.items())
        return hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()

    def check_same(self, recorded: str | None, directory: Path) -> None:
        """Raise `CheckpointError` if the run that wrote the checkpoint in `directory` had another teacher."""
        if recorded != self.fingerprint():
            setting = "distill.teachers" if len(self.by_name) > 1 else "distill.teacher_path"
            if isinstance(self.by_name.get(""), RecordedTeacher):
                setting = "distill.teacher_model"
            raise CheckpointError(
                f"{directory} was written by a run with {'another' if recorded else 'no'} teacher: continue with its "
                f"{setting}, or start a new run"
            )

    def _of(self, pack: Pack, score: Callable[[Teacher, Pack], Scored]) -> Scored:
        """Return the score of a pack by its own teacher. The pack of a rank without work has none: any will do."""
        if not self._together:
            return score(self.by_name.get(pack.teacher) or next(iter(self.by_name.values())), pack)
        found = {name: score(one, pack if name == pack.teacher else IDLE) for name, one in self.by_name.items()}
        return found[pack.teacher if pack.teacher in found else next(iter(found))]


def _kept(head: OutputLayer) -> OutputLayer:
    """Return an output layer with the tensors that it has now, not copied, whatever its parameters become."""
    memo: dict[int, Any] = {
        id(one): torch.nn.Parameter(one.data, requires_grad=False) for one in head.embeddings.parameters()
    }
    return replace(head, embeddings=copy.deepcopy(head.embeddings, memo))
