"""The expert's rows of a Trinity-RFT file of `mix` and `mix_chord`: an auxiliary buffer beside the rollouts.

In: a draft with every key that the file gives. Out: the draft, with the sample strategy, its arguments and the
auxiliary buffers answered for.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from sharpen.compat.trinity.algorithms import SAMPLE_STRATEGY
from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.functions import MIXED
from sharpen.compat.trinity.yaml.rows import dataset_rules, fields_of_rows, row_format
from sharpen.compat.trinity.yaml.rules import Rule, answer_section, expanded, idle, number, word

BUFFERS = "buffer.trainer_input.auxiliary_buffers"
_STRATEGY = "algorithm.sample_strategy"
_ARGUMENTS = f"{_STRATEGY}_args"
_RATIO = f"{_ARGUMENTS}.expert_data_ratio"
_BUFFER_RULES: dict[str, Rule] = {
    **dataset_rules("expert.dataset"),
    "format": fields_of_rows,
    **expanded(
        {
            "schema_type index batch_size tokenizer_path total_epochs total_steps ray_namespace replay_buffer": idle(
                "an expert's rows come again for as long as the run goes on"
            ),
            "algorithm_type": idle("an expert's rows are learnt as sft"),
            "data_selector": idle("an expert's rows come in a random order, the same for the same seed"),
        }
    ),
}


def sample_strategy(draft: Draft, key: str, value: Any) -> None:
    """What a batch is made of."""
    mixed = draft.given.get("algorithm.algorithm_type") in MIXED
    if mixed and value != "mix":
        draft.refuse(key, "an algorithm with an expert's rows mixes: leave it out")
    elif value == "mix" and not mixed:
        draft.refuse(key, "an expert's rows are mixed in by algorithm_type mix or mix_chord: set that")
    elif value in SAMPLE_STRATEGY:
        draft.refuse(key, SAMPLE_STRATEGY.refusal(value))
    elif draft.get(key) not in ("default", "warmup", "mix", "staleness_control"):
        draft.refuse(key, "use default, mix or staleness_control")


def strategy_arguments(draft: Draft, rules: Mapping[str, Rule]) -> None:
    """The strategy's arguments, each with a key of its own."""
    answer_section(draft, _ARGUMENTS, rules, "is not an argument of the sample strategy", swallows=True)


def experts(draft: Draft) -> int:
    """The expert's dataset; how many of its rows are in each update, 0 without."""
    buffers = draft.get(BUFFERS) or {}
    if not draft.trains_by(MIXED):
        if buffers:
            draft.refuse(BUFFERS, "other data beside the rollouts is trained by algorithm_type mix and mix_chord only")
        return 0
    strategy_arguments(draft, {"expert_data_ratio": number, "sft_dataset_name": word})
    name = draft.given.get(f"{_ARGUMENTS}.sft_dataset_name", "sft_dataset")
    if not isinstance(buffers.get(name), Mapping):
        draft.wrong(BUFFERS, f"must have a section {name!r} (sft_dataset_name) with the expert's rows")
        return 0
    for other in buffers:
        if other != name:
            draft.wrong(f"{BUFFERS}.{other}", f"is trained by nothing: sft_dataset_name is {name!r}")
    buffer = f"{BUFFERS}.{name}"
    draft.given[buffer] = buffers[name]
    answer_section(draft, buffer, _BUFFER_RULES, "is not a key of Trinity-RFT")
    if f"{buffer}.path" not in draft.given:
        draft.wrong(f"{buffer}.path", "is missing")
    row_format(draft, "sft", buffer)
    return _per_update(draft)


def _per_update(draft: Draft) -> int:
    """Trinity-RFT's `train_batch_size` counts rollouts and rows together."""
    ratio = draft.get(_RATIO)
    batch, repeat = draft.given.get("buffer.batch_size"), draft.given.get("algorithm.repeat_times")
    total = draft.given.get("buffer.train_batch_size") or (batch * repeat if batch and repeat else None)
    if total is None:
        draft.wrong(_RATIO, "is a share of buffer.train_batch_size: set that too")
        return 0
    rows: int = ceil((0.5 if ratio is None else ratio) * total)
    if not 0 < rows < total:
        draft.wrong(_RATIO, f"must leave rows and rollouts in a batch of {total}, got {ratio}")
        return 0
    draft.set("expert.batch_size", rows, _RATIO)
    return rows
