"""Finds the teacher's files and checks that its vocabulary is that of the trained model, before weights are loaded.

In: where the teacher is, the model. Out: the teacher's folder, or a `ConfigError` that names the first token that
differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpen.config.public import TunerModelConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.models.files import model_folder
from sharpen.models.pieces import text_config

_SPECIAL = ("bos_token", "eos_token")
"""Special tokens at the beginning and end of the text that a model sees. Padding is never passed to a model here."""


def teacher_folder(path: str | None, algorithm: Algorithm) -> Path | None:
    """Return the folder of `distill.teacher_path`, which is `path`; None if the algorithm has no teacher.

    Raises `ConfigError` if the algorithm needs a teacher and none is set, `ModelError` if there is no such model.
    """
    if not algorithm.needs_teacher:
        return None
    if path is None:
        raise ConfigError(
            f"{algorithm.name!r} learns from a teacher: set distill.teacher_path to a Hugging Face "
            "model with the same vocabulary"
        )
    return model_folder(path, setting="distill.teacher_path")


def check_teacher(path: str | None, model: TunerModelConfig, folder: Path, teacher_folder: Path) -> None:
    """Raise `ConfigError` if the teacher cannot score the tokens of the model in `folder`, or has a shorter context.

    The tokenizers must map every id to the same text, and have the same tokens at the beginning and end of text. The
    number of embeddings beyond the tokenizer's ids (padding) may differ.
    """
    from transformers import AutoTokenizer

    from sharpen.models.configuration import read_config

    own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    teacher = AutoTokenizer.from_pretrained(teacher_folder, trust_remote_code=False)
    if (difference := _first_difference(own, teacher)) is not None:
        raise ConfigError(
            f"the teacher in distill.teacher_path ({path}) has another vocabulary than the "
            f"model ({model.model_path}): {difference}; choose a teacher with the same tokenizer"
        )
    longest = getattr(
        text_config(read_config(teacher_folder)),
        "max_position_embeddings",
        None,
    )
    if longest is not None and longest < model.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but the teacher in distill.teacher_path reads at "
            f"most {longest} tokens: lower it, or choose another teacher"
        )


def _first_difference(own: Any, teacher: Any) -> str | None:
    """Describe the first id, else the first special token, that differs; None if there is none."""
    own_tokens, its_tokens = ({id_: token for token, id_ in one.get_vocab().items()} for one in (own, teacher))
    for id_ in sorted(own_tokens.keys() | its_tokens.keys()):
        mine, its = own_tokens.get(id_), its_tokens.get(id_)
        if mine != its:
            return f"id {id_} is {_quote(mine)} in the model and {_quote(its)} in the teacher"
    for name in _SPECIAL:
        mine, its = getattr(own, name, None), getattr(teacher, name, None)
        if mine != its:
            return f"the {name} is {_quote(mine)} in the model and {_quote(its)} in the teacher"
    return None


def _quote(token: str | None) -> str:
    return "no token" if token is None else repr(token)
