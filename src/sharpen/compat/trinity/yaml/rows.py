"""Trinity-RFT files of `sft`, `cpt` and `dpo`: mode train on a file of rows, without workflow and engine.

In: a draft with every key that the file gives. Out: the draft, with those answered for that such a run has, and those
that belong to rollouts named as without effect.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharpen.compat.trinity.yaml.draft import OFF, Draft, Rule, is_one_of
from sharpen.compat.trinity.yaml.functions import SUPERVISED
from sharpen.compat.trinity.yaml.selection import of_selector, selector_type

BUFFER = "buffer.trainer_input.experience_buffer"
_OF_ROLLOUTS = (
    *("explorer.", "synchronizer.", "buffer.explorer_input.", "algorithm.advantage_fn", "algorithm.add_strategy"),
    *("algorithm.kl_penalty_fn", "algorithm.repeat_times", "algorithm.bypass_old_logprobs"),
    *("algorithm.sample_strategy_args", "model.temperature", "model.top_p", "model.critic_model_path"),
    *("trainer.critic_warmup", f"{BUFFER}.replay_buffer", f"{BUFFER}.use_priority_queue"),
    f"{BUFFER}.reuse_cooldown_time",
)
"""Keys, by how they begin, that mean something with rollouts only."""
_MESSAGES = {
    "sft": {"messages_key": "supervised.messages_key", "tools_key": "supervised.tools_key"},
    "dpo": {"messages_key": "supervised.prompt_key"},
}
_PLAIN = {
    "sft": {
        "prompt_key": "supervised.prompt_key",
        "response_key": "supervised.response_key",
        "system_prompt": "supervised.system_prompt",
        "tools_key": "supervised.tools_key",
    },
    "cpt": {"prompt_key": "supervised.text_key"},
    "dpo": {"prompt_key": "supervised.prompt_key", "system_prompt": "supervised.system_prompt"},
}
"""By algorithm, what the keys of a format become, for rows of messages and of plain texts."""
_DEFAULTS = {"messages_key": "message"}
"""Trinity-RFT's default keys that are not ours."""
_PAIR = {name: f"supervised.{name}" for name in ("chosen_key", "rejected_key")}
ROWS_KEYS = (
    *("name", "storage_type", "path", "split", "subset_name", "capacity", "max_read_timeout", "max_retry_times"),
    *("max_retry_interval", "enable_progress_bar"),
)
"""Keys of a buffer that say where rows are and how they are read."""
FORMAT_KEYS = (
    *("prompt_type", "prompt_key", "response_key", "system_prompt", "system_prompt_key", "messages_key", "tools_key"),
    *("image_key", "video_key", "reply_prefix", "workflow_key", "reward_fn_key", "chosen_key", "rejected_key"),
    *("enable_concatenated_multi_turn", "chat_template", "enable_thinking"),
)
"""Keys of its format."""


def applies(draft: Draft) -> bool:
    """Whether the file trains on rows. (Mode bench evaluates whatever the algorithm is.)"""
    name = draft.given.get("algorithm.algorithm_type")
    return isinstance(name, str) and name in SUPERVISED and draft.given.get("mode") != "bench"


def leave_rollouts_out(draft: Draft) -> None:
    """Name the keys that belong to rollouts, and forget them."""
    name = draft.given["algorithm.algorithm_type"]
    for key in [key for key in draft.given if key.startswith(_OF_ROLLOUTS)]:
        draft.idle(key, f"{name} learns from rows, without rollouts")
        del draft.given[key]


def or_of_rows(rule: Rule) -> Rule:
    """`rule`, but in a file that trains on rows the key is decided by `rows`."""

    def chosen(draft: Draft, key: str, value: object) -> None:
        if not applies(draft):
            rule(draft, key, value)

    return chosen


def rules(rule: Rule) -> dict[str, Rule]:
    """The keys of the experience buffer that describe a file of rows; `rule` is theirs in a file with rollouts."""
    selector = ("selector_type", "seed", "feature_keys", "kwargs")
    return {
        **dict.fromkeys(ROWS_KEYS, or_of_rows(rule)),
        **{f"data_selector.{key}": or_of_rows(rule) for key in selector},
        **{f"format.{key}": or_of_rows(rule) for key in FORMAT_KEYS},
    }


def rows(draft: Draft) -> None:
    """Dataset, batch, lengths and what rows hold."""
    name = str(draft.given["algorithm.algorithm_type"])
    dataset(draft, BUFFER, "train_dataset")
    _order(draft)
    _batch(draft)
    _lengths(draft)
    row_format(draft, name, BUFFER)


def dataset(draft: Draft, prefix: str, place: str) -> None:
    """The dataset of the buffer `prefix`, at `place` of our settings."""
    for key in ("name", "capacity", "max_read_timeout", "max_retry_times", "max_retry_interval", "enable_progress_bar"):
        if f"{prefix}.{key}" in draft.given:
            draft.idle(f"{prefix}.{key}", "a dataset of rows is read as it is")
    for key, field in (("path", "path"), ("split", "split"), ("subset_name", "name")):
        if f"{prefix}.{key}" in draft.given:
            draft.set(f"{place}.{field}", draft.given[f"{prefix}.{key}"], f"{prefix}.{key}")
    storage = f"{prefix}.storage_type"
    if str(draft.given.get(storage, "file")).lower() != "file":
        draft.refuse(storage, "rows are read from files or the Hugging Face hub: export them to JSONL and use file")
    draft.same(storage)


def _order(draft: Draft) -> None:
    selector = f"{BUFFER}.data_selector"
    if f"{selector}.selector_type" in draft.given:
        selector_type(draft, f"{selector}.selector_type", draft.given[f"{selector}.selector_type"])
    for name in ("feature_keys", "kwargs"):
        if f"{selector}.{name}" in draft.given:
            of_selector(draft, f"{selector}.{name}", draft.given[f"{selector}.{name}"])
    if f"{selector}.seed" in draft.given:
        draft.idle(f"{selector}.seed", "the run has one seed: seed")


def _batch(draft: Draft) -> None:
    train, batch = "buffer.train_batch_size", "buffer.batch_size"
    if draft.whole(train):
        draft.set("algorithm.batch_size", draft.given[train], train)
        if batch in draft.given:
            draft.idle(batch, "a step has train_batch_size rows")
    elif draft.whole(batch):
        draft.set("algorithm.batch_size", draft.given[batch], batch)
    draft.same(train, batch)


def _lengths(draft: Draft) -> None:
    """A row is as long as the model's context at most."""
    total, prompt, answer = (f"model.{name}" for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens"))
    length, before, after = (draft.whole(key) for key in (total, prompt, answer))
    if length is not None:
        draft.set("model.max_model_len", draft.given[total], total)
    elif before is not None and after is not None:
        draft.set("model.max_model_len", before + after, prompt)
        draft.say(f"model.max_model_len is {before + after}", prompt, answer)
        return
    for key in (prompt, answer):
        if key in draft.given:
            draft.idle(key, "nothing is sampled; rows are as long as max_model_len at most")


def row_format(draft: Draft, name: str, buffer: str) -> None:
    """Which fields of a row of the buffer hold what; `name` is the algorithm that learns from them."""
    prefix = f"{buffer}.format"
    kind = str(draft.given.get(f"{prefix}.prompt_type", "messages")).lower()
    table = {"messages": _MESSAGES, "plaintext": _PLAIN}.get(kind)
    if table is None:
        draft.refuse(f"{prefix}.prompt_type", "use messages or plaintext")
    elif name not in table:
        draft.wrong(f"{prefix}.prompt_type", f"is {kind}, but {name} reads plain texts: use plaintext")
    elif name == "sft" and kind == "plaintext":
        draft.say("a row that has a field 'messages' is read from it instead", f"{prefix}.prompt_type")
    draft.same(f"{prefix}.prompt_type")
    moves = (table or {}).get(name, {}) | (_PAIR if name == "dpo" else {})
    for key in FORMAT_KEYS:
        full = f"{prefix}.{key}"
        if key in moves and draft.given.get(full) is not None:
            draft.set(moves[key], draft.given[full], full)
        elif key in moves and key in _DEFAULTS:
            draft.set_default(moves[key], _DEFAULTS[key], full)
    _other_format(draft, name, kind, moves, prefix)


def _other_format(draft: Draft, name: str, kind: str, moves: Mapping[str, str], prefix: str) -> None:
    """What is no name of a field, or has no field here."""
    whole, thinking = f"{prefix}.enable_concatenated_multi_turn", f"{prefix}.enable_thinking"
    many = draft.flag(whole)
    draft.same(whole)
    if name == "sft" and kind == "messages" and not many:
        draft.set_default("supervised.turns", "last", whole)
    elif name != "sft" and many:
        draft.idle(whole, "it belongs to sft")
    _thinking(draft, thinking)
    refused = {
        "system_prompt_key": "write the system message into the rows (prompt_type: messages)",
        "image_key": "models of text only",
        "video_key": "models of text only",
        "chat_template": "chat templates are the tokenizer's: put it into the model's folder (chat_template.jinja)",
    }
    for key in FORMAT_KEYS:
        full = f"{prefix}.{key}"
        if full not in draft.given or key in moves or full in (whole, thinking, f"{prefix}.prompt_type"):
            continue
        if key in refused and not is_one_of(draft.given[full], OFF):
            draft.refuse(full, refused[key])
        else:
            draft.idle(full, f"it is not read for {name} with rows of prompt_type {kind}")


def _thinking(draft: Draft, key: str) -> None:
    """Whether the model thinks: in a file with rollouts these and the rows have it the same."""
    own = "model.enable_thinking"
    rollouts = next((name for name in ("explorer.rollout_model.enable_thinking", own) if name in draft.given), None)
    if not applies(draft):
        if key in draft.given and (rollouts is None or draft.given[rollouts] != draft.given[key]):
            draft.refuse(key, "rows and rollouts have it the same: set model.enable_thinking")
        draft.same(key)
    elif key in draft.given:
        draft.set(own, draft.given[key], key)
        if own in draft.given:
            draft.idle(own, f"{key} comes first")
    elif own in draft.given:
        draft.set(own, draft.given[own], own)
