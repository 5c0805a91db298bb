"""Reads Trinity-RFT's configuration files.

In: the content of such a YAML file. Out: a `ConfigFile` with our settings, the key that each came from, and what to
tell the user. Every key is applied, told, named as without effect, or refused; an unknown one is an error with the
nearest known name. `table` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from sharpen.compat.trinity.yaml import (
    algorithm,
    cluster,
    expert,
    operators,
    rows,
    run,
    synchronizer,
    tasks,
)
from sharpen.compat.trinity.yaml.draft import OFF, Draft, shown
from sharpen.compat.trinity.yaml.former import read_former
from sharpen.compat.trinity.yaml.functions import SUPERVISED
from sharpen.compat.trinity.yaml.interpolation import interpolate
from sharpen.compat.trinity.yaml.keys import adapter, external_model, tinker
from sharpen.compat.trinity.yaml.stages import one_stage
from sharpen.compat.trinity.yaml.table import RULES
from sharpen.config.explain import InvalidConfigError, section_class
from sharpen.config.load import ConfigFile, value_problems
from sharpen.config.run import RunConfig

_NULLABLE = ("tool_call_parser", "reasoning_parser")
_TASKSET = "buffer.explorer_input.taskset"
HOMES = {
    "train_dataset": _TASKSET,
    "train_dataset.path": f"{_TASKSET}.path",
    "model": "model",
    "model.model_path": "model.model_path",
    "model.max_model_len": "model.max_model_len",
    "workflow": f"{_TASKSET}.default_workflow_type",
}
"""Where Trinity-RFT's files say what we need."""
HOMES_OF_ROWS = {
    "train_dataset": rows.BUFFER,
    "train_dataset.path": f"{rows.BUFFER}.path",
}
"""The same of files that train on rows."""
_SECTIONS = {key[: dot.start()] for key in RULES for dot in re.finditer(r"\.", key)}
_LISTS = {section.removesuffix("[]") for section in _SECTIONS if section.endswith("[]")}


def own_keys(content: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Keys within sections that both layouts have (`algorithm`, `cluster`, `model`, `trainer`), which only
    Trinity-RFT's layout has, and which only ours has.
    """
    theirs: list[str] = []
    ours: list[str] = []
    for section, inner in content.items():
        for name in inner if isinstance(inner, Mapping) else ():
            key = f"{section}.{name}"
            known = key in RULES or key in _SECTIONS or key in _LISTS
            if known != _is_ours(key):
                (theirs if known else ours).append(key)
    return theirs, ours


def _is_ours(key: str) -> bool:
    section, _, name = key.partition(".")
    field = RunConfig.model_fields.get(section)
    model = section_class(field.annotation) if field is not None else None
    return model is not None and name in model.model_fields


def convert(
    content: Mapping[str, Any],
    file: str,
    *,
    environment: Mapping[str, str],
    now: datetime | None = None,
    has_ray: bool = True,
) -> ConfigFile:
    """Translate a file's content into our settings. `file` is its name, for messages.

    `now` names a run anew whose directory exists (`continue_from_checkpoint: false`). Without Ray (`has_ray`) a file
    for a cluster runs on one machine. Raises `ConfigError` with every problem at once.
    """
    resolved, without_value = interpolate(content, environment)
    draft = Draft(file, environment, without_value)
    _gather(draft, read_former(draft, one_stage(draft, resolved)), "")
    rules = RULES
    if draft.trains_by(SUPERVISED):
        rows.leave_rollouts_out(draft)
        rules = RULES | rows.RULES_OF_ROWS
    for key, value in [(key, draft.given[key]) for key in draft.unanswered()]:
        rules[_pattern(key)](draft, key, value)
    _decide(draft, now or datetime.now(), has_ray)
    homes = HOMES | HOMES_OF_ROWS if draft.trains_by(SUPERVISED) else HOMES
    converted = ConfigFile(
        settings=draft.tree,
        name=file,
        defaults=draft.defaults,
        origins=draft.origins,
        homes={place: f"{file}: {key}" for place, key in homes.items()},
        notices=draft.notices(),
        evaluate_only=draft.evaluate_only,
        endpoint=draft.endpoint,
    )
    if draft.problems:
        named = {".".join(problem.place) for problem in draft.problems}
        values = [problem for key, problem in value_problems(converted) if key not in named]
        raise InvalidConfigError.of(f"{file} (Trinity-RFT's layout)", [*draft.problems, *values])
    assert not draft.unanswered(), draft.unanswered()
    return converted


def _decide(draft: Draft, now: datetime, has_ray: bool) -> None:
    """Answer for the keys that rules have left for later."""
    cluster.ray(draft, installed=has_ray)
    run.mode(draft)
    run.run_name(draft, now)
    run.latest_checkpoint(draft)
    algorithm.algorithm(draft)
    algorithm.optimizer(draft)
    adapter(draft)
    tinker(draft)
    external_model(draft)
    if draft.trains_by(SUPERVISED):
        rows.rows(draft)
        expert.experts(draft)
        run.total_steps(draft, 1)
    else:
        run.sizes(draft)
        run.lengths(draft)
        tasks.tasksets(draft)
        tasks.auxiliary_models(draft)
        synchronizer.synchronizer(draft)
    operators.on_tasks(draft)
    run.trainer_config(draft)
    cluster.gpus(draft)


def _gather(draft: Draft, value: Any, key: str) -> None:
    """Every known key with its value into `draft.given`; unknown ones are problems. Null means not given."""
    pattern = _pattern(key)
    if pattern in RULES:
        if value is not None or key.endswith(_NULLABLE):
            draft.given[key] = value
    elif pattern in _LISTS:
        if isinstance(value, list):
            draft.lengths[key] = len(value)
            for index, inner in enumerate(value):
                _gather(draft, inner, f"{key}[{index}]")
        elif value not in OFF:
            draft.wrong(key, f"must be a list of sections, got {shown(value)}")
    elif key and pattern not in _SECTIONS:
        draft.wrong(key, f"is not a key of Trinity-RFT{_nearest(key)}")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _gather(draft, inner, f"{key}.{name}" if key else str(name))
    elif value is not None:
        draft.wrong(key, f"must be a section of settings, got {shown(value)}")


def _pattern(key: str) -> str:
    return re.sub(r"\[\d+\]", "[]", key)


def _nearest(key: str) -> str:
    """The likely key: of that section, else of that name elsewhere, else what the section has."""
    if _is_ours(key):
        return ", but a setting of our own layout: one file is in one of them"
    section, _, name = _pattern(key).rpartition(".")
    within = f"{section}." if section else ""
    siblings = sorted(
        {known.removeprefix(within).split(".")[0].removesuffix("[]") for known in RULES if known.startswith(within)}
    )
    near = get_close_matches(name, siblings, n=1)
    if near:
        return f"; did you mean '{key.rpartition('.')[0]}.{near[0]}'?" if section else f"; did you mean '{near[0]}'?"
    lasts: dict[str, list[str]] = {}
    for known in RULES:
        lasts.setdefault(known.rpartition(".")[2], []).append(known)
    found = lasts.get(name) or lasts.get(next(iter(get_close_matches(name, lasts, n=1)), ""), [])
    if found:
        return f"; did you mean {' or '.join(repr(home) for home in found[:3])}?"
    return f"; there are {', '.join(siblings)}"
