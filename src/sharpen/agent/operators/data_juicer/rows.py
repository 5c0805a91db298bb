"""Data-Juicer's operators, on tasks and on rollouts.

In: its operators with their arguments, or a recipe file that lists them. Out: the tasks that its filters keep, with the
fields that its mappers changed and the statistics that it computed; rollouts with the statistics as metrics, and those
dropped that its filters drop. The package (py-data-juicer) is imported when one of its operators is asked for.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from sharpen.agent.operators.rollouts import drop, with_reward
from sharpen.errors import ConfigError, OperatorError
from sharpen.types import Group, Rollout, Task

log = logging.getLogger("sharpen.operators")

# Which of Data-Juicer's operators to apply, and whether this machine has what they need.
#
# In: operators with their arguments, or a recipe file. Out: `Loaded` operators, or a `ConfigError` with everything that
# is missing.

_KEYS = ("OPENAI_API_KEY", "DASHSCOPE_API_KEY")
"""The variables in which Data-Juicer looks for the key of an API."""
_MODELS = ("api_or_hf_model", "api_model")
_LOCAL = ("is_hf_model", "enable_vllm")
_ANNOTATION = "_annotation_mapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Data-Juicer's operators, made; `names` for messages."""

    names: str
    operators: tuple[Any, ...]

    def process(self, columns: Mapping[str, Sequence[Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows as Data-Juicer sees them, and what its operators leave of them."""
        import datasets
        from data_juicer.core.data import NestedDataset

        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            dataset = datasets.Dataset.from_dict(dict(columns))
            after = NestedDataset(dataset).process(list(self.operators), open_monitor=False)
            return dataset.to_list(), after.to_list()
        finally:
            if shown:
                datasets.enable_progress_bars()


def load(
    operators: Sequence[Mapping[str, Any]] | None, config_path: str | None, text_key: str, num_process: int
) -> Loaded:
    """Make the operators; the same ones are made once. Raises `ConfigError` for what is not an operator, and for a
    package, a key or a service that is missing."""
    if (operators is None) == (config_path is None):
        raise ConfigError("operator data_juicer needs operators or config_path (a recipe file): give one of them")
    if config_path is not None:
        operators, text_key = _recipe(Path(config_path), text_key)
    process = [_item(item) for item in operators or ()]
    if not process:
        raise ConfigError("operator data_juicer has no operators of Data-Juicer's: name at least one")
    usual: dict[str, Any] = {"text_key": text_key, "auto_op_parallelism": False}
    usual["num_proc"] = num_process if num_process > 1 else None  # None is this process
    return _load(json.dumps([[name, usual | arguments] for name, arguments in process]))


def _recipe(path: Path, text_key: str) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The operators of a recipe file, and the field that they read."""
    if not path.is_file():
        raise ConfigError(f"operator data_juicer: there is no recipe {path} (config_path), seen from {Path.cwd()}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    process = content.get("process") if isinstance(content, Mapping) else None
    if not isinstance(process, list):
        raise ConfigError(f"{path} is no recipe of Data-Juicer's: it has no list 'process'")
    if without := sorted(content.keys() - {"process", "text_keys"}):
        log.info("%s: only process and text_keys have an effect here, not %s", path, ", ".join(without))
    keys = content.get("text_keys") or text_key
    return process, keys if isinstance(keys, str) else keys[0]


def _item(item: object) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of an entry, `{name: arguments}`."""
    if isinstance(item, Mapping) and len(item) == 1:
        name, arguments = next(iter(item.items()))
        if isinstance(arguments or {}, Mapping):
            return str(name), dict(arguments or {})
    raise ConfigError(f"an operator of Data-Juicer's is written as {{name: arguments}}, but {item!r} came")


@lru_cache(maxsize=8)
def _load(process: str) -> Loaded:
    items: list[tuple[str, dict[str, Any]]] = [(name, arguments) for name, arguments in json.loads(process)]
    names = ", ".join(name for name, _ in items)
    problems = [problem for name, arguments in items for problem in _missing(name, arguments)]
    made: list[Any] = []
    if find_spec("data_juicer") is None:
        problems.insert(0, f"{names}: Data-Juicer's package is not installed (pip install py-data-juicer)")
    elif not problems:
        known, load_ops = _package()
        for name, arguments in items:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                problems.append(f"Data-Juicer has no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
                continue
            try:
                made += load_ops([{name: arguments}])
            except Exception as error:  # whatever its constructors raise, such as for a server that does not answer
                problems.append(f"{name} cannot be made: {type(error).__name__}: {error}")
    if problems:
        raise ConfigError(f"operator data_juicer: {'; '.join(problems)}")
    return Loaded(names=names, operators=tuple(made))


def _package() -> tuple[Mapping[str, Any], Any]:
    """Its operators by name, and what makes them. It prints its progress with loguru: only warnings stay. And it
    installs packages of its own accord, into whatever environment it runs in: that is refused."""
    is_first = "data_juicer" not in sys.modules
    from data_juicer.utils.lazy_loader import LazyLoader

    LazyLoader._install_package = classmethod(_refuse_to_install)
    from data_juicer.ops import OPERATORS, load_ops

    if is_first:
        from loguru import logger

        logger.remove()
        logger.add(sys.stderr, level="WARNING")
    return OPERATORS.modules, load_ops


def _refuse_to_install(_: type, package: str, *__: Any) -> None:
    raise ImportError(f"Data-Juicer needs the package {package} for it, which is not installed: pip install {package}")


def _missing(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """What an operator needs from outside and does not find: one line each."""
    problems = []
    model = next((arguments[key] for key in _MODELS if key in arguments), None)
    asks = (model is not None or name.startswith("llm_")) and not any(arguments.get(key) for key in _LOCAL)
    has_key = any(os.environ.get(key) for key in _KEYS) or "api_key" in (arguments.get("model_params") or {})
    if asks and not has_key:
        problems.append(
            f"{name} asks {model or 'a model'} through an API, but {' and '.join(_KEYS)} are not set (export "
            f"{_KEYS[0]}=..., with OPENAI_BASE_URL for a server of your own)"
        )
    if name.endswith(_ANNOTATION) and find_spec("label_studio_sdk") is None:
        problems.append(
            f"{name} needs Label Studio, whose package is not installed (pip install label-studio label-studio-sdk, "
            "then label-studio start)"
        )
    return problems


STATS = "__dj__stats__"
"""The column in which Data-Juicer keeps the statistics of a row."""
_PLACE = "sharpen_place"
_ITS_OWN = "__dj__"


def on_tasks(
    tasks: Sequence[Task],
    operators: Sequence[Mapping[str, Any]] | None = None,
    config_path: str | None = None,
    text_key: str | None = None,
    num_process: int = 1,
) -> list[Task]:
    """Apply Data-Juicer's `operators` (`[{name: arguments}]`), or those of the recipe file `config_path`, to the rows
    of the tasks. `text_key` is the field that an operator reads unless its arguments or the recipe name one. Statistics
    become fields of the row. Raises `ConfigError` for what is missing, `OperatorError` for rows that are no task's."""
    loaded = load(operators, config_path, text_key or "text", num_process)
    return [_changed_task(tasks[place], changes) for place, changes in _processed([task.row for task in tasks], loaded)]


def on_rollouts(
    groups: Sequence[Group],
    operators: Sequence[Mapping[str, Any]] | None = None,
    config_path: str | None = None,
    text_key: str | None = None,
    num_process: int = 1,
) -> list[Group]:
    """Apply Data-Juicer's operators, as `on_tasks`, to the rollouts that take part: one row each, with `prompt_text`,
    `response_text` (the text that operators read unless told otherwise), `reward` and the rollout's metrics. Numbers
    that it computes become metrics under their names; rollouts whose rows it drops are dropped."""
    loaded = load(operators, config_path, text_key or "response_text", num_process)
    scored = [rollout for group in groups for rollout in group.scored]
    after = dict(_processed([_row(rollout) for rollout in scored], loaded))
    changed = {
        rollout.id: _changed_rollout(rollout, after[place]) if place in after else drop(rollout, loaded.names)
        for place, rollout in enumerate(scored)
    }
    return [replace(group, rollouts=tuple(changed.get(one.id, one) for one in group.rollouts)) for group in groups]


def _processed(rows: Sequence[Mapping[str, Any]], loaded: Loaded) -> list[tuple[int, dict[str, Any]]]:
    """The rows that are left: the place of each in `rows`, and the fields that are new or have another value."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    before, after = loaded.process({**columns, _PLACE: list(range(len(rows)))})
    places = [row.get(_PLACE) for row in after]
    if len(set(places)) < len(places) or not all(isinstance(place, int) for place in places):
        raise OperatorError(
            f"Data-Juicer's operators {loaded.names} made rows of their own: use operators that filter, change or "
            "reorder rows"
        )
    return [
        (row[_PLACE], {name: value for name, value in row.items() if name not in old or old[name] != value})
        for row in after
        for old in (before[row[_PLACE]],)
    ]


def _changed_task(task: Task, changes: Mapping[str, Any]) -> Task:
    stats = changes.get(STATS) or {}
    fields = {name: value for name, value in changes.items() if not name.startswith(_ITS_OWN)}
    return replace(task, row={**stats, **task.row, **fields})


def _changed_rollout(rollout: Rollout, changes: Mapping[str, Any]) -> Rollout:
    if other := sorted(changes.keys() & _row(rollout).keys() - {"reward"}):
        raise OperatorError(
            f"Data-Juicer changed {other[0]} of rollout {rollout.id!r}: what happened in a rollout cannot be changed, "
            "only filters, statistics and another reward have an effect"
        )
    stats = {name: float(value) for name, value in (changes.get(STATS) or {}).items() if _is_number(value)}
    rewarded = with_reward(rollout, changes["reward"]) if _is_number(changes.get("reward")) else rollout
    return replace(rewarded, metrics={**rewarded.metrics, **stats})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _row(rollout: Rollout) -> dict[str, Any]:
    """What Data-Juicer sees of a rollout: the messages before its first answer, and its answers."""
    answers = rollout.answers
    prompt = answers[0].messages if answers else ()
    return {
        **rollout.metrics,
        "prompt_text": "\n\n".join(_text(message) for message in prompt),
        "response_text": "\n\n".join(_text(call.response) for call in answers),
        "reward": rollout.reward,
    }


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
