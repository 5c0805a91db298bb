"""The operators of a Trinity-RFT file: its section `data_processor`.

In: a draft. Out: the draft, with `sampling.operators` and `sampling.task_operators`, or the settings that do an
operator's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from sharpen.agent.operators.pipeline import ON_ROLLOUTS, ON_TASKS
from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rules import function_place

_TASKS = "data_processor.task_pipeline"
_PIPELINE = (
    "operators",
    "config_path",
    "num_process",
    "inputs",
    "output",
    "target_fields",
    "priority_weights",
    "top_k",
)
_TRUNCATED = "mask_response_truncated"
_NEEDLESS = {"pass_rate_calculator": "the mean reward of each task is always kept, and difficulty_based goes by it"}
"""Operators whose work is done here anyway."""
_OF_R3L: dict[str, tuple[str, dict[str, Any], str]] = {
    "OPMD_filter": ("invalid_reward_filter", {}, "it drops rollouts without a reward"),
    "RAFT_filter": ("reward_filter", {"threshold": 0.3}, "it drops rewards below 0.3, as its last version did"),
}
"""Operators of R3L, which is built on Trinity-RFT: what does the same here, with its arguments."""
_OWN = (
    "one of your own is a function over the groups of a step, named 'file.py:function' or 'package.module.function' "
    "(docs/use/operators.md)"
)


def on_experiences(draft: Draft, key: str, value: Any) -> None:
    """Operators on a step's experiences: those on rollouts here."""
    operators: list[dict[str, Any]] = []
    for place, name, arguments in _items(draft, key):
        if name in _NEEDLESS:
            draft.idle(_NEEDLESS[name], key)
        elif name == _TRUNCATED:
            draft.set("sampling.overlong_filter", True, key)
            draft.say(
                f"{_TRUNCATED} is sampling.overlong_filter: cut rollouts do not train (there, they still count in "
                "their group's mean and deviation)"
            )
        elif name in _OF_R3L and not arguments:
            same, usual, what = _OF_R3L[name]
            draft.say(f"{name}, an operator of R3L's, is {same}: {what}")
            operators.append({"name": same, "args": usual})
        elif name == "data_juicer":
            if "np" in arguments:
                draft.idle("rollouts are processed in this process", key)
            operators.append({"name": name, "args": {one: arguments[one] for one in arguments if one != "np"}})
        elif name in ON_ROLLOUTS or ":" in name or "." in name:
            operators.append({"name": function_place(name), "args": arguments})
        else:
            near = get_close_matches(name, [*ON_ROLLOUTS, _TRUNCATED], n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join([*ON_ROLLOUTS, _TRUNCATED])};"
            draft.wrong(place, f"is '{name}', which is no operator here{hint} {_OWN}")
    if operators:
        draft.set("sampling.operators", operators, key)


def on_tasks(draft: Draft) -> None:
    """The pipeline of the tasks, or of the rows: Data-Juicer's operators one after the other, then the order by what
    they measured. The tasks are read from `inputs`: what Trinity-RFT would write and read again is kept in memory."""
    if draft.evaluate_only or not any(key.startswith(f"{_TASKS}.") for key in draft.given):
        draft.idle("an evaluation runs all tasks as they are", *(f"{_TASKS}.{name}" for name in _PIPELINE))
        return
    draft.idle("processed tasks are kept in memory, not written", f"{_TASKS}.output")
    found = _processing(draft)
    if found or f"{_TASKS}.priority_weights" in draft.given or f"{_TASKS}.top_k" in draft.given:
        found.append({"name": "priority_order", "args": _priority(draft)})
    given = next((f"{_TASKS}.{name}" for name in ("config_path", "operators") if f"{_TASKS}.{name}" in draft.given), "")
    if found:
        draft.set("sampling.task_operators", found, given or f"{_TASKS}.top_k")
    _inputs(draft)


def _processing(draft: Draft) -> list[dict[str, Any]]:
    """Operators of our own as they are, and those of Data-Juicer's between them, together."""
    recipe, usual = draft.get(f"{_TASKS}.config_path"), _usual(draft)
    if recipe:
        draft.idle("config_path comes first, as there", f"{_TASKS}.operators", f"{_TASKS}.num_process")
        return [{"name": "data_juicer", "args": {"config_path": recipe, **usual}}]
    found: list[dict[str, Any]] = []
    processes = draft.get(f"{_TASKS}.num_process")
    if processes is not None and processes > 1:
        usual["num_process"] = processes
    for _, name, arguments in _items(draft, f"{_TASKS}.operators"):
        if name in ON_TASKS or ":" in name or "." in name:
            found.append({"name": function_place(name), "args": arguments})
        elif found and found[-1]["name"] == "data_juicer":
            found[-1]["args"]["operators"].append({name: arguments})
        else:
            found.append({"name": "data_juicer", "args": {"operators": [{name: arguments}], **usual}})
    return found


def _usual(draft: Draft) -> dict[str, Any]:
    """The field that operators read unless they name one: the first of `target_fields`."""
    key = f"{_TASKS}.target_fields"
    fields = draft.get(key)
    if is_one_of(fields, OFF):
        return {}
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        draft.wrong(key, f"must be a list of fields, but {shown(fields)} came")
        return {}
    return {"text_key": fields[0]}


def _priority(draft: Draft) -> dict[str, Any]:
    """The arguments of the order by priority."""
    key, arguments = f"{_TASKS}.priority_weights", dict[str, Any]()
    weights = draft.get(key) or {}
    if unmeasured := sorted(weights.keys() & {"diversity", "usage_frequency"}):
        draft.say(f"{' and '.join(unmeasured)} are measured by no operator, there and here: without effect", key)
    if weights:
        arguments["weights"] = {name: weights[name] for name in weights if name not in unmeasured} or {"quality": 0.0}
    most = draft.get(f"{_TASKS}.top_k")
    return arguments | ({"top_k": most} if most is not None and most > 0 else {})


def _inputs(draft: Draft) -> None:
    """Where the tasks are that are processed."""
    key = f"{_TASKS}.inputs"
    paths = draft.get(key) or []
    if not isinstance(paths, list) or len(paths) > 1 or not all(isinstance(path, str) for path in paths):
        draft.wrong(key, f"is {shown(paths)}: tasks are processed from one file; join the files")
    elif paths:
        draft.say("the tasks are read from here, and processed before the run (sampling.task_operators)", key)
        draft.set("train_dataset.path", paths[0], key)


def _items(draft: Draft, key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The key, the name and the arguments of each operator of a list; what is none is a problem."""
    value = draft.get(key)
    if is_one_of(value, OFF):
        return
    if not isinstance(value, list):
        draft.wrong(key, f"must be a list of operators, each with name and args, got {shown(value)}")
        return
    for index, item in enumerate(value):
        name = item.get("name") if isinstance(item, Mapping) else None
        arguments = (item.get("args") if isinstance(item, Mapping) else None) or {}
        known = isinstance(name, str) and isinstance(arguments, Mapping) and not item.keys() - {"name", "args"}
        if known:
            yield f"{key}[{index}].name", str(name), {str(one): inner for one, inner in arguments.items()}
        else:
            draft.wrong(f"{key}[{index}]", f"must have a name and args, got {shown(item)}")
