"""Finds the teachers' files and compares their vocabulary with that of the trained model, before weights are loaded.

In: where the teachers are, the model. Out: their folders, and which of them have other tokens; or a `ConfigError` that
names the first token that differs, where such a teacher cannot be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpen.config.distill import DistillConfig, setting_of_teacher
from sharpen.config.public import TunerModelConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.models.files import model_folder
from sharpen.models.pieces import text_config

_SPECIAL = ("bos_token", "eos_token")
"""Special tokens at the beginning and end of the text that a model sees. Padding is never passed to a model here."""


def teacher_folders(config: DistillConfig, algorithm: Algorithm, own: Path) -> dict[str, Path]:
    """Return the folders of the teachers by name; none if the algorithm has no teacher, or if the model teaches itself
    with the weights that train, or if the teacher is behind an endpoint. `own` is the folder of the model.

    Raises `ConfigError` if the algorithm needs a teacher and none is set, `ModelError` if there is no such model.
    """
    if not algorithm.needs_teacher or config.own_weights == "current" or config.teacher_url is not None:
        return {}
    if config.own_weights == "start":
        return {"": own}
    if not config.models:
        raise ConfigError(
            f"{algorithm.name!r} learns from a teacher: set distill.teacher_path to a Hugging Face "
            "model (or own_weights and context: the model teaches itself)"
        )
    return {name: model_folder(path, setting=setting_of_teacher(name)) for name, path in config.models.items()}


def check_teachers(
    config: DistillConfig, algorithm: Algorithm, model: TunerModelConfig, folder: Path, folders: Mapping[str, Path]
) -> dict[str, str]:
    """Return the teachers that have other tokens than the model in `folder`, with the first difference. Raise
    `ConfigError` if a teacher cannot score its tokens: see `compare_teacher`."""
    found = {}
    for name, own in folders.items() if config.own_weights is None else ():
        setting, path = setting_of_teacher(name), config.models[name]
        difference = compare_teacher(setting, model, folder, own)
        if difference is None:
            continue
        found[name] = difference
        other = f"the teacher in {setting} ({path}) has another vocabulary than the model ({model.model_path})"
        if algorithm.distill is not None and algorithm.distill.of_vocabulary:
            raise ConfigError(
                f"{other}: {difference}; {algorithm.distill.divergence} compares whole distributions: set "
                "distill.divergence to reverse_sampled, or choose a teacher with the same tokenizer"
            )
        if config.context is not None:
            raise ConfigError(
                f"{other}: {difference}; distill.context is a text in the model's own prompt: leave it out, or choose "
                "a teacher with the same tokenizer"
            )
    return found


def compare_teacher(setting: str, model: TunerModelConfig, folder: Path, teacher_folder: Path) -> str | None:
    """Return the first difference between the tokens of the teacher of a setting and those of the model in `folder`;
    None if there is none. Raise `ConfigError` if it has a shorter context.

    Equal tokenizers map every id to the same text, and have the same tokens at the beginning and end of text. The
    number of embeddings beyond the tokenizer's ids (padding) may differ.
    """
    from transformers import AutoTokenizer

    from sharpen.models.configuration import read_config

    own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    teacher = AutoTokenizer.from_pretrained(teacher_folder, trust_remote_code=False)
    longest = getattr(
        text_config(read_config(teacher_folder)),
        "max_position_embeddings",
        None,
    )
    if longest is not None and longest < model.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but the teacher in {setting} reads at "
            f"most {longest} tokens: lower it, or choose another teacher"
        )
    return _first_difference(own, teacher)


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
