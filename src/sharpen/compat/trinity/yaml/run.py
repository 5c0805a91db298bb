"""What several keys of a Trinity-RFT file decide together: the mode, the run's name, sizes, lengths.

In: a draft with every key that the file gives. Out: the draft, with those keys answered for.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.yaml import expert, synchronizer
from sharpen.compat.trinity.yaml.correction import rollout_correction
from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.functions import SUPERVISED
from sharpen.compat.trinity.yaml.rules import answer_section
from sharpen.config.run import DEFAULT_PROJECT

_SERVE = "run `sharpen serve --config FILE`: it answers applications, and the trainer (mode train) learns from them"
_VERL = {
    "actor_rollout_ref.actor.ppo_epochs": "trainer.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.grad_clip": "trainer.max_grad_norm",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""Settings of verl's that have a counterpart."""
_SECTIONS_OF_VERL = (
    *("actor_rollout_ref", "critic", "data", "trainer", "algorithm", "reward", "reward_model"),
    *("custom_reward_function", "global_profiler", "synchronizer", "enable_preview"),
)


def mode(draft: Draft) -> None:
    """Which work the file asks for."""
    value = draft.get("mode")
    if draft.trains_by(SUPERVISED):
        if value not in (None, "train"):
            name = draft.given["algorithm.algorithm_type"]
            draft.refuse("mode", f"{name} learns from rows, without rollouts: use train")
    elif value == "colocate" and draft.tree.get("execution") == "ray":
        draft.set("cluster.colocate", True, "mode")
    elif value == "colocate":
        draft.say("sampling and training share the device in every run", "mode")
    elif value == "bench":
        draft.say("the model is evaluated on the evaluation tasks, nothing is trained", "mode")
    elif draft.in_two_processes:
        draft.set("mode", "explore" if value == "serve" else value, "mode")
        draft.set_default("project", "Trinity-RFT", "project")  # the other process must find the run
        draft.set_default("name", "rft", "name")
        for part in ("engine", "trainer"):  # the two files may say it of one side alone
            draft.set_default(f"{part}.dtype", "bfloat16", "explorer.rollout_model.dtype")
        draft.say("explorer and trainer are two processes; nothing is evaluated (docs/use/two-processes.md)", "mode")
        if value == "serve":
            draft.say(_SERVE, "mode")
    elif value not in (None, "both"):
        draft.wrong("mode", f"must be both, bench, colocate, explore, train or serve, got {value!r}")


def run_name(draft: Draft, now: datetime) -> None:
    """`name`, `group` and `continue_from_checkpoint`: the run's directory."""
    name, group, again = (draft.get(key) for key in ("name", "group", "continue_from_checkpoint"))
    if group and name is None:
        draft.say("without a name the run is Experiment-<time>, directly in the project's folder", "group")
    elif group:
        draft.say(f"the run is named {group}-{name}", "group")
        name = f"{group}-{name}"
    if name is None:
        return
    draft.set("name", name, "name")
    if again is not False or draft.evaluate_only:
        return
    folder = _run_folder(draft, name)
    if folder.is_dir() and any(folder.iterdir()):
        renamed = f"{name}_{now:%Y%m%d%H%M%S}"
        draft.set("name", renamed, "name")
        draft.say(f"the run {name} exists, so this one is named {renamed}", "continue_from_checkpoint")


def latest_checkpoint(draft: Draft) -> None:
    """Which weights `mode: bench` evaluates; Trinity-RFT reads the key in no other mode."""
    key = "explorer.bench_on_latest_checkpoint"
    if not draft.get(key):
        return
    name = draft.tree.get("name")
    latest = _run_folder(draft, str(name)) / "latest"
    if not draft.evaluate_only:
        draft.idle("it belongs to mode bench", key)
    elif name is None:
        draft.refuse(key, "name says which run's checkpoint it is: set it")
    elif not latest.is_dir():
        draft.refuse(key, f"there is no checkpoint at {latest}: leave it out to evaluate model.model_path")
    else:
        draft.set("model.model_path", str(latest), key)
        draft.idle("bench_on_latest_checkpoint comes first", "model.model_path")


def _run_folder(draft: Draft, name: str) -> Path:
    """The directory of the run of this name."""
    root = Path(str(draft.given.get("checkpoint_root_dir", "checkpoints")))
    project = str(draft.given.get("project", DEFAULT_PROJECT))
    return root / project / name


def sizes(draft: Draft) -> None:
    """Batches, groups, steps, what trains beside the step's rollouts, and how many of them run at once."""
    key = "buffer.train_batch_size"
    rows = expert.experts(draft)
    batch, repeat, train = (draft.get(name) for name in ("buffer.batch_size", "algorithm.repeat_times", key))
    if draft.given.get("mode") == "train" and batch is None and train:
        batch = _tasks_of_a_batch(draft, train, repeat or 1)
    draft.move("buffer.batch_size", "algorithm.batch_size")
    draft.move("algorithm.repeat_times", "algorithm.group_size")
    rollouts = batch * repeat if batch and repeat else None
    if train and rows:  # both are counted there
        train -= rows
    elif rollouts and rows:
        draft.say(f"a step trains on all {rollouts} rollouts and {rows} of the expert's rows", "buffer.batch_size")
    synchronizer.replay(draft, rollouts, train)
    updates = 1
    if train in (None, 0, rollouts) or "replay_share" in draft.tree.get("sampling", {}):
        pass  # one update of everything
    elif rollouts and rollouts % train == 0:
        updates = rollouts // train
        draft.set("trainer.num_minibatches", updates, key)
        draft.say(f"each step's {rollouts} rollouts make {updates} updates of {train}", key)
        if rows:
            draft.set("expert.batch_size", rows * updates, "algorithm.sample_strategy_args.expert_data_ratio")
    else:
        draft.say("each step trains on all rollouts of its tasks (batch_size x repeat_times)", key)
    total_steps(draft, updates)
    _concurrency(draft, repeat or 1)
    draft.set_default("rollout.timeout_s", 1800.0, "explorer.max_timeout")


def _tasks_of_a_batch(draft: Draft, train: int, repeat: int) -> int:
    """A trainer without an explorer knows its batch by the rollouts in it."""
    key = "buffer.train_batch_size"
    if train % repeat:
        draft.refuse(key, f"must be a multiple of algorithm.repeat_times ({repeat})")
    tasks = train // repeat
    draft.set("algorithm.batch_size", tasks, key)
    draft.say(f"that many rollouts are of {tasks} tasks (algorithm.batch_size)", key)
    return tasks


def _concurrency(draft: Draft, repeat: int) -> None:
    """A runner does one rollout at a time, or those of one task, and each engine has its runners."""
    key = "explorer.runner_per_model"
    runners, engines = draft.get(key), draft.given.get("explorer.rollout_model.engine_num")
    most = draft.given.get("explorer.max_repeat_times_per_runner")
    if runners is None:
        return
    each = 1
    if draft.given.get("explorer.concurrent_mode") in ("asynchronous", "multi-threading"):
        each = min(repeat, most or repeat)
    total = runners * (engines or 1) * each
    draft.set("rollout.max_concurrent_rollouts", total, key)
    draft.say(f"at most {total} rollouts run at once, as there (rollout.max_concurrent_rollouts)", key)


def total_steps(draft: Draft, updates: int) -> None:
    """The fewer steps count. The trainer's steps are updates there, of which a step of ours has `updates`."""
    explorer, trainer = "buffer.total_steps", "trainer.total_steps"
    found = {key: steps for key in (explorer, trainer) if (steps := draft.get(key)) is not None}
    if trainer in found and updates > 1:
        found[trainer] = -(-found[trainer] // updates)
        draft.say(f"that many updates are {found[trainer]} steps of {updates}", trainer)
    if found:
        least = min(found, key=lambda key: found[key])
        draft.set("train_dataset.total_steps", found[least], least)
        draft.idle(f"{least} ends the run before", *(found.keys() - {least}))


def lengths(draft: Draft) -> None:
    """Context and answer lengths, and whether the model thinks; the engine's value wins over the model's."""
    total, prompt, answer = (
        _first(draft, name, "explorer.rollout_model", "model")
        for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    length, before, after = (draft.get(key) for key in (total, prompt, answer))
    draft.move(total, "model.max_model_len")
    if length is None and before is not None and after is not None:
        length = before + after
        draft.set("model.max_model_len", length, prompt)
        draft.say(f"with max_response_tokens, model.max_model_len is {length}", prompt)
    draft.move(answer, "model.max_tokens")
    if length is not None:
        rest = max(length - (length // 2 if before is None else before), 1)
        draft.set_default("model.max_tokens", rest, "model.max_response_tokens")
    draft.idle("prompts are never cut: one that leaves no room to answer ends its rollout", prompt)
    draft.move(_first(draft, "enable_thinking", "explorer.rollout_model", "model"), "model.enable_thinking")
    _parsers(draft)


def _parsers(draft: Draft) -> None:
    """How tool calls and thinking are read; without `enable_auto_tool_choice` calls stay text, whatever the parser."""
    engine = "explorer.rollout_model"
    choice, parser = f"{engine}.enable_auto_tool_choice", f"{engine}.tool_call_parser"
    if draft.get(choice) is False and draft.get(parser) is not None:
        draft.set("model.tool_call_parser", None, choice)
        draft.say("tool calls stay text: the tool_call_parser is not used", choice)
    else:
        draft.move(parser, "model.tool_call_parser")
    draft.move(f"{engine}.reasoning_parser", "model.reasoning_parser")
    for name in ("tool_call_parser", "reasoning_parser"):
        draft.set_default(f"model.{name}", None, f"{engine}.{name}")


def sampling(draft: Draft, taskset: str) -> None:
    """The sampling of training: what the taskset says wins, and goes to the workflow too, as its rollout arguments."""
    arguments = f"{taskset}.rollout_args"
    for name in ("temperature", "top_p", "top_k", "max_tokens"):
        key = _first(draft, name, arguments, "explorer.rollout_model", "model")
        if name == "max_tokens" and key in draft.given:
            overruled = [f"{section}.max_response_tokens" for section in ("explorer.rollout_model", "model")]
            draft.idle(f"{key} comes first", *overruled)
        draft.move(key, f"model.{name}")
        if key.startswith(arguments):
            draft.move(key, f"task_args.rollout_args.{name}")


def _first(draft: Draft, name: str, *sections: str) -> str:
    """The first section's key of that name that is given (else just the first); the others are named as overruled."""
    keys = [f"{section}.{name}" for section in sections]
    given = [key for key in keys if key in draft.given] or keys[:1]
    draft.idle(f"{given[0]} comes first", *given[1:])
    return given[0]


def trainer_config(draft: Draft) -> None:
    """The part of verl's own settings that has a counterpart; the rest is named."""
    rules = dict.fromkeys(_SECTIONS_OF_VERL, _of_verl)
    answer_section(draft, "trainer.trainer_config", rules, "is no section of verl's")


def _of_verl(draft: Draft, name: str, value: Any) -> None:
    left, _ = _applied(draft, name, value)
    draft.given |= dict.fromkeys(left)
    draft.idle("a setting of verl's; the trainer is our own (trainer.*)", *left)


def _applied(draft: Draft, name: str, value: Any) -> tuple[list[str], bool]:
    """Apply what can be. The names of all else, whole sections by one name, and whether anything was applied."""
    if name == "trainer.trainer_config.algorithm.rollout_correction":
        draft.given[name] = value
        rollout_correction(draft, name, value)
        return [], True
    if isinstance(value, dict) and value:
        inner = [_applied(draft, f"{name}.{key}", part) for key, part in value.items()]
        applied = any(some for _, some in inner)
        return ([left for lefts, _ in inner for left in lefts] if applied else [name]), applied
    place = _VERL.get(name.removeprefix("trainer.trainer_config."))
    if place is None or value is None:
        return [name], False
    other = draft.origins.get(tuple(place.split(".")))
    if other is not None:
        draft.wrong(name, f"says the same as {other.removeprefix(draft.file + ': ')}: keep one of them")
    draft.set(place, value, name)
    return [], True
