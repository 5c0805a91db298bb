"""What a teacher adds to the loss or to the advantages of tokens, computed a second time to repeat an update.

In: logprobs of the policy and of the teacher. Out: the teacher's part. Written out from arXiv 2306.13649 (equation 1)
and `docs/reference/algorithms.md`; nothing is shared with `algorithm.distill`.

Shape suffixes: S tokens of a sequence with loss, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sharpen.config.run import RunConfig
from sharpen.models.files import model_folder

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The divergence from the teacher, by its name in the settings, with its coefficient. `beta` is the teacher's part
    of the mixture of `js`."""

    divergence: str
    coef: float = 1.0
    beta: float = 0.5

    @classmethod
    def of(cls, config: RunConfig) -> Teaching | None:
        """Return what a run's settings define, None without a teacher."""
        usual = TEACHINGS.get(config.algorithm.algorithm_type)
        given = {name: getattr(config.distill, name) for name in ("divergence", "coef", "beta")}
        return (
            None if usual is None else replace(usual, **{name: one for name, one in given.items() if one is not None})
        )

    @property
    def by_sample(self) -> bool:
        """Whether the sampled tokens alone are compared, which gives them an advantage."""
        return self.divergence == "reverse_sampled"

    def advantages(
        self, teacher_S: Tensor, recorded_S: Tensor, stretches: Sequence[tuple[slice, slice]] | None = None
    ) -> Tensor:
        """Return what is added to the advantages of sampled tokens: a single sample of -KL(policy || teacher). A
        teacher with other tokens has those of its own, and each stretch of text is one sample for all its tokens."""
        recorded_S = recorded_S.to(teacher_S)
        if stretches is None:
            return self.coef * (teacher_S - recorded_S)
        added_S = torch.full_like(recorded_S, torch.nan)
        for own, its in stretches:
            added_S[own] = self.coef * (teacher_S[its].sum() - recorded_S[own].sum())
        return added_S

    def losses(self, policy_SV: Tensor, teacher_SV: Tensor) -> Tensor:
        """Return what is added to the loss of each token (S), over the ids that both models have."""
        both = min(policy_SV.shape[1], teacher_SV.shape[1])
        policy_SV, teacher_SV = (torch.log_softmax(one_SV[:, :both], -1) for one_SV in (policy_SV, teacher_SV))
        if self.divergence == "forward":
            return self.coef * _relative_entropy(teacher_SV, policy_SV)
        if self.divergence == "reverse":
            return self.coef * _relative_entropy(policy_SV, teacher_SV)
        parts = torch.stack([teacher_SV + math.log(self.beta), policy_SV + math.log(1.0 - self.beta)])
        mixed_SV = torch.logsumexp(parts, 0)
        of_teacher_S = self.beta * _relative_entropy(teacher_SV, mixed_SV)
        return self.coef * (of_teacher_S + (1.0 - self.beta) * _relative_entropy(policy_SV, mixed_SV))


def teacher_folders(config: RunConfig) -> dict[str, Path]:
    """Return the folders of the models that teach, by what the tasks call them; a single one has the name "". Raises
    `ModelError` if one is not there."""
    given = {f"distill.teachers.{name}": (name, path) for name, path in config.distill.teachers.items()}
    if config.distill.teacher_path is not None:
        given["distill.teacher_path"] = ("", config.distill.teacher_path)
    return {name: model_folder(path, setting=setting) for setting, (name, path) in given.items()}


def num_ids_of(folders: Iterable[Path]) -> float:
    """Return how many ids all the models in these folders know; infinity without one."""
    from transformers import AutoConfig

    read = (AutoConfig.from_pretrained(folder, trust_remote_code=False) for folder in folders)
    return min((int(one.get_text_config().vocab_size) for one in read), default=math.inf)


def teacher_of_row(config: RunConfig, row: Mapping[str, Any]) -> str:
    """Return what a task calls its teacher."""
    key = config.distill.teacher_key
    return "" if key is None else str(row[key])


def _relative_entropy(first_SV: Tensor, second_SV: Tensor) -> Tensor:
    """KL(first || second) of each row."""
    return (torch.exp(first_SV) * (first_SV - second_SV)).sum(-1)


TEACHINGS: Mapping[str, Teaching] = {
    "on_policy_distill": Teaching(divergence="reverse_sampled"),
    "jsd": Teaching(divergence="js"),
}
"""The algorithms with a teacher."""
