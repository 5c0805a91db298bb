"""Distillation in a Trinity-RFT file: `on_policy_distill` and `jsd`, whose teacher is the first auxiliary model.

In: a draft with every key that the file gives. Out: the draft, with the teacher answered for.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft

_MODEL = "explorer.auxiliary_models"


def teacher(draft: Draft) -> None:
    """The first auxiliary model, which the trainer loads."""
    prefix = f"{_MODEL}[0]"
    external = draft.given.get(f"{prefix}.engine_type") == "external"
    if not draft.lengths.get(_MODEL):
        draft.wrong(_MODEL, "is missing: its first model is the teacher")
    elif external or draft.given.get(f"{prefix}.external_model_config.enable"):
        draft.wrong(prefix, "is behind an endpoint, but the trainer needs the teacher's weights: name its folder")
    elif f"{prefix}.model_path" not in draft.given:
        draft.wrong(f"{prefix}.model_path", "is missing")
    draft.move(f"{prefix}.model_path", "distill.teacher_path")
    for key in [key for key in draft.unanswered() if key.startswith(f"{prefix}.")]:
        draft.idle("a teacher samples nothing, it is compared with", key)
