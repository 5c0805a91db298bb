"""Several runs in one file: `stages`, of which each replaces some sections of the file.

In: the content of a file. Out: the names of its stages; the content of a file with a single stage, as one run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft, shown
from sharpen.compat.trinity.yaml.rules import nearest
from sharpen.errors import ConfigError

_SECTIONS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
_MODES = (None, "both", "train", "colocate")


def stage_names(content: Mapping[str, Any], file: str) -> list[str]:
    """The names of a file's stages, in their order; none for a file without. Raises `ConfigError` for stages that are
    no sections, that share a name, or of which one does not train in this process."""
    stages = content.get("stages")
    if not stages:
        return []
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise ConfigError(f"{file}: 'stages' must be a list of sections, got {shown(stages)}")
    names = [str(stage.get("stage_name") or f"stage-{number}") for number, stage in enumerate(stages, 1)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{file}: two stages are named {twice[0]!r}: each has a run directory of its name")
    for name, stage in zip(names, stages, strict=True):
        mode = stage.get("mode", content.get("mode"))
        if len(stages) > 1 and mode not in _MODES:
            raise ConfigError(
                f"{file}: stage {name!r} has mode {mode!r}, but stages train one after the other, each on the model of "
                "the one before: give it mode both or train, or a file of its own"
            )
    return names


def one_stage(draft: Draft, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with the sections of its only stage in place of the file's, as in Trinity-RFT."""
    names = stage_names(content, draft.file)
    if not names:
        return {key: value for key, value in content.items() if key != "stages"}
    assert len(names) == 1, "load_stages takes several apart"
    stage = {key: value for key, value in content["stages"][0].items() if key != "stage_name"}
    for key in stage:
        if key not in _SECTIONS:
            raise ConfigError(f"{draft.file}: 'stages[0].{key}' is no section of a stage{nearest(str(key), _SECTIONS)}")
    merged = {**content, **{key: value for key, value in stage.items() if value is not None}}
    del merged["stages"]
    if content["stages"][0].get("stage_name"):
        merged["name"] = f"{content['name']}-{names[0]}" if content.get("name") else names[0]
        draft.say(f"stages: this stage is the run named {merged['name']}")
    return merged
