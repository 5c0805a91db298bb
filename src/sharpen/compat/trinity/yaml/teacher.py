"""Distillation in a Trinity-RFT file: `on_policy_distill` and `jsd`, whose teacher is the first auxiliary model.

In: a draft with every key that the file gives. Out: the draft, with the teacher and how far from it is measured
answered for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft

DISTILL = {"on_policy_distill": "ppo", "jsd": None}
"""The algorithms with a teacher, and the policy loss of those that have one."""
_DIVERGENCES = {"on_policy_distill": "reverse_sampled", "jsd": "js"}
_MODEL = "explorer.auxiliary_models"


def applies(draft: Draft) -> bool:
    """Whether the file trains on what a teacher says."""
    name = draft.given.get("algorithm.algorithm_type")
    return isinstance(name, str) and name in DISTILL and not draft.evaluate_only


def divergence(draft: Draft, function: str, given: Mapping[str, Any], key: str) -> None:
    """The advantage function `function`, whose arguments `given` are answered for but for these."""
    algorithm = draft.given.get("algorithm.algorithm_type")
    if function != algorithm:
        draft.set("distill.divergence", _DIVERGENCES[function], key)
    own = f"{key}_args.lambda_coef"
    weight = draft.number(own) if "lambda_coef" in given else None
    if weight in (0.0, 1.0):
        draft.set("distill.divergence", "reverse" if weight == 0.0 else "forward", own)
    elif weight is not None:
        draft.set("distill.beta", weight, own)
    if function == "jsd":
        draft.lines.append(
            f"{draft.file}: jsd is the divergence over the whole vocabulary, with its own gradient (Trinity-RFT: the "
            "sampled token's term, as an advantage)"
        )
    if "chunk_size" in given:
        draft.idle(f"{key}_args.chunk_size", "the vocabulary is always compared in chunks")


def teacher(draft: Draft) -> bool:
    """The first auxiliary model, which the trainer loads; whether the file has a teacher at all."""
    if not applies(draft):
        return False
    prefix = f"{_MODEL}[0]"
    if not draft.lengths.get(_MODEL):
        draft.wrong(_MODEL, "is missing: its first model is the teacher")
        return False
    external = draft.given.get(f"{prefix}.engine_type") == "external"
    if external or draft.flag(f"{prefix}.external_model_config.enable"):
        draft.wrong(prefix, "is behind an endpoint, but the trainer needs the teacher's weights: name its folder")
    elif f"{prefix}.model_path" not in draft.given:
        draft.wrong(f"{prefix}.model_path", "is missing")
    else:
        draft.set("distill.teacher_path", draft.given[f"{prefix}.model_path"], f"{prefix}.model_path")
    for key in [key for key in draft.unanswered() if key.startswith(f"{prefix}.") and key != f"{prefix}.model_path"]:
        draft.idle(key, "a teacher samples nothing, it is compared with")
    return True
