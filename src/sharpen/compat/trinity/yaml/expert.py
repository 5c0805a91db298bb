"""The expert's rows of a Trinity-RFT file of `mix` and `mix_chord`: an auxiliary buffer beside the rollouts.

In: a draft with every key that the file gives. Out: the draft, with the sample strategy, its arguments and the
auxiliary buffers answered for.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import ceil
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rows import FORMAT_KEYS, ROWS_KEYS, dataset, row_format

MIXED = ("mix", "mix_chord")
"""Algorithms that learn from an expert's rows too."""
BUFFERS = "buffer.trainer_input.auxiliary_buffers"
_STRATEGY = "algorithm.sample_strategy"
_ARGUMENTS = f"{_STRATEGY}_args"
_FILLED = ("schema_type", "index", "batch_size", "tokenizer_path", "total_epochs", "total_steps", "ray_namespace")
"""Keys of a buffer that Trinity-RFT fills in."""


def applies(draft: Draft) -> bool:
    """Whether the file trains on an expert's rows beside rollouts."""
    return draft.given.get("algorithm.algorithm_type") in MIXED and not draft.evaluate_only


def sample_strategy(draft: Draft, key: str, value: object) -> None:
    """What a batch is made of."""
    mixed = draft.given.get("algorithm.algorithm_type") in MIXED
    if mixed and value != "mix":
        draft.refuse(key, "an algorithm with an expert's rows mixes: leave it out")
    elif value == "mix" and not mixed:
        draft.refuse(key, "an expert's rows are mixed in by algorithm_type mix or mix_chord: set that")
    elif value in ("default", "warmup", "mix", "staleness_control"):
        draft.same(key)
    else:
        draft.refuse(key, "use default, mix or staleness_control")


def strategy_arguments(draft: Draft, known: tuple[str, ...]) -> dict[str, Any]:
    """The strategy's arguments, each with a key of its own; unknown ones are problems."""
    value = draft.given.get(_ARGUMENTS) or {}
    draft.same(_ARGUMENTS)
    if not isinstance(value, Mapping):
        draft.wrong(_ARGUMENTS, f"must be a section of settings, but {shown(value)} came")
        return {}
    given = {str(name): inner for name, inner in value.items() if inner is not None}
    for name, inner in given.items():
        own = f"{_ARGUMENTS}.{name}"
        draft.given[own] = inner
        draft.same(own)
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            draft.wrong(own, f"is not an argument of the sample strategy; {hint}")
    return given


def experts(draft: Draft) -> int:
    """The expert's dataset; how many of its rows are in each update, 0 without."""
    if not applies(draft):
        _no_buffers(draft)
        return 0
    given = strategy_arguments(draft, ("expert_data_ratio", "sft_dataset_name"))
    name = str(given.get("sft_dataset_name", "sft_dataset"))
    buffers = draft.given.get(BUFFERS)
    draft.same(BUFFERS)
    if not isinstance(buffers, Mapping) or not isinstance(buffers.get(name), Mapping):
        draft.wrong(BUFFERS, f"must have a section {name!r} (sft_dataset_name) with the expert's rows")
        return 0
    for other in buffers:
        if other != name:
            draft.wrong(f"{BUFFERS}.{other}", f"is trained by nothing: sft_dataset_name is {name!r}")
    _rows(draft, f"{BUFFERS}.{name}", buffers[name])
    return _per_update(draft)


def _no_buffers(draft: Draft) -> None:
    if not is_one_of(draft.given.get(BUFFERS), OFF):
        draft.refuse(BUFFERS, "other data beside the rollouts is trained by algorithm_type mix and mix_chord only")
    draft.same(BUFFERS)


def _rows(draft: Draft, prefix: str, section: Mapping[str, Any]) -> None:
    known = (*ROWS_KEYS, *_FILLED, "data_selector", "format", "replay_buffer")
    for key, value in section.items():
        own = f"{prefix}.{key}"
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            draft.wrong(own, f"is not a key of Trinity-RFT{f'; did you mean {near[0]!r}?' if near else ''}")
        elif value is not None:
            draft.given[own] = value
            draft.same(own)
    fields = section.get("format") or {}
    for key, value in fields.items() if isinstance(fields, Mapping) else ():
        if key in FORMAT_KEYS and value is not None:
            draft.given[f"{prefix}.format.{key}"] = value
        elif key not in FORMAT_KEYS:
            draft.wrong(f"{prefix}.format.{key}", f"is not a key of Trinity-RFT; there are {', '.join(FORMAT_KEYS)}")
    for key in (*_FILLED, "replay_buffer"):
        if f"{prefix}.{key}" in draft.given:
            draft.idle(f"{prefix}.{key}", "an expert's rows come again for as long as the run goes on")
    if f"{prefix}.data_selector" in draft.given:
        draft.idle(f"{prefix}.data_selector", "an expert's rows come in a random order, the same for the same seed")
    if f"{prefix}.path" not in draft.given:
        draft.wrong(f"{prefix}.path", "is missing")
    dataset(draft, prefix, "expert.dataset")
    row_format(draft, "sft", prefix)


def _per_update(draft: Draft) -> int:
    """Trinity-RFT's `train_batch_size` counts rollouts and rows together."""
    key = f"{_ARGUMENTS}.expert_data_ratio"
    ratio = draft.number(key)
    batch, repeat, train = (
        draft.whole(name) for name in ("buffer.batch_size", "algorithm.repeat_times", "buffer.train_batch_size")
    )
    total = train or (batch * repeat if batch and repeat else None)
    if total is None:
        draft.wrong(key, "is a share of buffer.train_batch_size: set that too")
        return 0
    rows = ceil((0.5 if ratio is None else ratio) * total)
    if not 0 < rows < total:
        draft.wrong(key, f"must leave rows and rollouts in a batch of {total}, but {shown(ratio)} came")
        return 0
    draft.set("expert.batch_size", rows, key)
    return rows
