"""Trinity-RFT files of `sft`, `cpt` and `dpo`: mode train on a file of rows, without workflow and engine.

In: a draft with every key that the file gives. Out: the draft, with those answered for that such a run has, and those
that belong to rollouts named as without effect.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.functions import SUPERVISED
from sharpen.compat.trinity.yaml.rules import (
    Rule,
    answer_section,
    expanded,
    flag,
    follow,
    idle,
    later,
    refused,
    to,
)
from sharpen.compat.trinity.yaml.selection import of_selector, selector_type, usual_order

BUFFER = "buffer.trainer_input.experience_buffer"
TEMPLATE = "chat templates are the tokenizer's: put it into the model's folder (chat_template.jinja)"
_OF_ROLLOUTS = (
    *("explorer.", "synchronizer.", "buffer.explorer_input.", "algorithm.advantage_fn", "algorithm.add_strategy"),
    *("algorithm.kl_penalty_fn", "algorithm.repeat_times", "algorithm.bypass_old_logprobs"),
    *("algorithm.sample_strategy_args", "model.temperature", "model.top_p", "model.top_k"),
    "model.critic_model_path",
    *("trainer.critic_warmup", f"{BUFFER}.replay_buffer", f"{BUFFER}.use_priority_queue"),
    *(f"{BUFFER}.reuse_cooldown_time", "data_processor.experience_pipeline."),
)
"""Keys, by how they begin, that mean something with rollouts only."""
_FIELDS: dict[tuple[str, str], dict[str, str]] = {
    ("sft", "messages"): {"messages_key": "messages_key", "tools_key": "tools_key"},
    ("dpo", "messages"): {"messages_key": "prompt_key", "chosen_key": "chosen_key", "rejected_key": "rejected_key"},
    ("sft", "plaintext"): {
        **{name: name for name in ("prompt_key", "response_key", "system_prompt", "tools_key")},
        "image_key": "images_key",
    },
    ("cpt", "plaintext"): {"prompt_key": "text_key"},
    ("dpo", "plaintext"): {name: name for name in ("prompt_key", "system_prompt", "chosen_key", "rejected_key")},
}
"""By algorithm and type of rows, what the keys of a format become in `supervised`."""
FORMAT_KEYS = (
    *("prompt_type", "prompt_key", "response_key", "system_prompt", "system_prompt_key", "messages_key", "tools_key"),
    *("image_key", "video_key", "reply_prefix", "workflow_key", "reward_fn_key", "chosen_key", "rejected_key"),
    *("enable_concatenated_multi_turn", "chat_template", "enable_thinking"),
)
"""Keys of a buffer's format."""
_FORMAT_RULES: dict[str, Rule] = {
    "system_prompt_key": refused("write the system message into the rows (prompt_type: messages)"),
    "video_key": refused("videos are not read here"),
    "chat_template": refused(TEMPLATE),
}


def dataset_rules(place: str) -> dict[str, Rule]:
    """The keys of a buffer that say where rows are and how they are read, for a dataset at `place` of our settings."""
    rows = "rows are read from files or the Hugging Face hub: export them to JSONL and use file"
    return expanded(
        {
            "name capacity max_read_timeout max_retry_times max_retry_interval enable_progress_bar": idle(
                "a dataset of rows is read as it is"
            ),
            "path": to(f"{place}.path"),
            "split": to(f"{place}.split"),
            "subset_name": to(f"{place}.name"),
            "storage_type": refused(rows, unless=("file",)),
        }
    )


RULES_OF_ROWS: dict[str, Rule] = {
    f"{BUFFER}.{key}": rule
    for key, rule in {
        **dataset_rules("train_dataset"),
        "data_selector.selector_type": selector_type,
        "data_selector.seed": idle("the run has one seed: seed"),
        "data_selector.feature_keys": of_selector,
        "data_selector.kwargs": of_selector,
        **{f"format.{key}": later for key in FORMAT_KEYS},
    }.items()
}
"""The keys of the experience buffer in a file that trains on rows."""


def leave_rollouts_out(draft: Draft) -> None:
    """Name the keys that belong to rollouts, and forget them."""
    name = draft.given["algorithm.algorithm_type"]
    for key in [key for key in draft.given if key.startswith(_OF_ROLLOUTS)]:
        draft.idle(f"{name} learns from rows, without rollouts", key)
        del draft.given[key]


def rows(draft: Draft) -> None:
    """Batch, lengths and what rows hold."""
    batch = "buffer.train_batch_size" if draft.get("buffer.train_batch_size") else "buffer.batch_size"
    if draft.get("buffer.batch_size") and batch == "buffer.train_batch_size":
        draft.idle("a step has train_batch_size rows", "buffer.batch_size")
    if draft.given.get(batch):
        draft.move(batch, "algorithm.batch_size")
    _lengths(draft)
    row_format(draft, draft.given["algorithm.algorithm_type"], BUFFER)
    usual_order(draft, BUFFER)


def _lengths(draft: Draft) -> None:
    """A row is as long as the model's context at most."""
    prompt, answer = "model.max_prompt_tokens", "model.max_response_tokens"
    before, after = draft.given.get(prompt), draft.given.get(answer)
    if draft.get("model.max_model_len") is None and before is not None and after is not None:
        draft.set("model.max_model_len", before + after, prompt)
        draft.say(f"model.max_model_len is {before + after}", prompt, answer)
    else:
        draft.move("model.max_model_len", "model.max_model_len")
        draft.idle("nothing is sampled; rows are as long as max_model_len at most", prompt, answer)


def fields_of_rows(draft: Draft, key: str, value: Any) -> None:
    """A buffer's format, whose keys `row_format` decides."""
    answer_section(draft, key, dict.fromkeys(FORMAT_KEYS, later), "is not a key of Trinity-RFT")


def row_format(draft: Draft, name: str, buffer: str) -> None:
    """Which fields of a row of the buffer hold what; `name` is the algorithm that learns from them."""
    prefix = f"{buffer}.format"
    key = f"{prefix}.prompt_type"
    kind = str(draft.get(key) or "messages").lower()
    fields = _FIELDS.get((name, kind), {})
    if kind not in ("messages", "plaintext"):
        draft.refuse(key, "use messages or plaintext")
    elif not fields:
        draft.wrong(key, f"is {kind}, but {name} reads plain texts: use plaintext")
    elif name == "sft" and kind == "plaintext":
        draft.say("a row that has a field 'messages' is read from it instead", key)
    for field, place in fields.items():
        draft.move(f"{prefix}.{field}", f"supervised.{place}")
        if field == "messages_key":
            draft.set_default(f"supervised.{place}", "message", f"{prefix}.{field}")
    _turns(draft, name, kind, f"{prefix}.enable_concatenated_multi_turn")
    _thinking(draft, f"{prefix}.enable_thinking")
    unread = idle(f"it is not read for {name} with rows of prompt_type {kind}")
    for full in draft.unanswered():
        if full.startswith(f"{prefix}."):
            follow(draft, full, _FORMAT_RULES.get(full.rpartition(".")[2], unread))


def _turns(draft: Draft, name: str, kind: str, key: str) -> None:
    follow(draft, key, flag)
    if name == "sft" and kind == "messages" and not draft.given.get(key):
        draft.set_default("supervised.turns", "last", key)
    elif name != "sft" and draft.given.get(key):
        draft.idle("it belongs to sft", key)


def _thinking(draft: Draft, key: str) -> None:
    """Whether the model thinks: in a file with rollouts these and the rows have it the same."""
    own, value = "model.enable_thinking", draft.get(key)
    rollouts = draft.given.get("explorer.rollout_model.enable_thinking", draft.given.get(own))
    if draft.trains_by(SUPERVISED):
        draft.move(own, own)
        if value is not None:
            draft.move(key, own)
            draft.idle(f"{key} comes first", own)
    elif value is not None and rollouts != value:
        draft.refuse(key, "rows and rollouts have it the same: set model.enable_thinking")
