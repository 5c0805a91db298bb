"""When weights move in a Trinity-RFT file: its section `synchronizer`.

In: a draft with every key that the file gives. Out: the draft, with those of style, intervals and offset answered for.
A batch of the explorer's there is a step here; the trainer's steps there are updates, of which a step may have several.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.expert import strategy_arguments
from sharpen.compat.trinity.yaml.functions import MIXED
from sharpen.compat.trinity.yaml.rules import Rule, answer_section, at, choice, follow, idle, number

_STYLES = {
    "fixed": "fixed",
    "explorer_driven": "dynamic_by_explorer",
    "trainer_driven": "dynamic_by_trainer",
    "dynamic_by_explorer": "dynamic_by_explorer",
    "dynamic_by_trainer": "dynamic_by_trainer",
    "fully_async": "fully_async",
}
_STYLE, _INTERVAL, _OFFSET = (f"synchronizer.{name}" for name in ("sync_style", "sync_interval", "sync_offset"))
_EXPLORER, _TRAINER = (f"synchronizer.{side}_sync_interval" for side in ("explorer", "trainer"))


def style(draft: Draft) -> str | None:
    """Ours for the file's style; None where there is no such style."""
    return _STYLES.get(draft.given.get(_STYLE, "fixed").lower())


def synchronizer(draft: Draft) -> None:
    """Style, interval and offset."""
    found, given = style(draft), draft.get(_STYLE)
    if draft.in_two_processes:
        draft.idle(
            "the explorer takes the newest weights, and never waits (docs/use/two-processes.md)", _STYLE, _OFFSET
        )
        _interval(draft, "dynamic_by_trainer")
        return
    if found is None:
        draft.wrong(_STYLE, f"must be one of {', '.join(_STYLES)}, got {given!r}")
    elif given is not None:
        draft.set("sync.style", found, _STYLE)
    _interval(draft, found)
    if found != "fully_async":
        draft.move(_OFFSET, "sync.offset")
    elif draft.get(_OFFSET):
        draft.idle("with fully_async nobody waits, there and here (sync.max_staleness bounds how far ahead)", _OFFSET)


def _interval(draft: Draft, found: str | None) -> None:
    """That of the side that asks; of the explorer where both do."""
    asks, other = (_TRAINER, _EXPLORER) if found in ("dynamic_by_trainer", "fully_async") else (_EXPLORER, _TRAINER)
    key = asks if asks in draft.given else _INTERVAL
    left = (other,) if key == _INTERVAL else (other, _INTERVAL)
    draft.idle(f"weights move after the steps that {key} counts (sync.interval)", *left)
    number = draft.get(key)
    if number is not None:
        updates = draft.tree.get("trainer", {}).get("num_minibatches", 1) if asks == _TRAINER else 1
        steps = -(-number // updates)
        draft.set("sync.interval", steps, key)
        if steps != number:
            draft.say(f"that many updates are {steps} step{'s' if steps > 1 else ''} of {updates} (sync.interval)", key)


# Experiences that train again: the replay buffer and the bound on staleness of a Trinity-RFT file.
#
# In: a draft with every key that the file gives. Out: the draft, with those of the replay buffer and
# `staleness_control` answered for. There, experiences are queued and the trainer takes those of highest priority, as
# many as it needs; here a step trains on its own rollouts and on a share of earlier groups.

_BUFFER = "buffer.trainer_input.experience_buffer"
_REPLAY = f"{_BUFFER}.replay_buffer"
_ENABLE = (f"{_REPLAY}.enable", f"{_BUFFER}.use_priority_queue")
_COOLDOWN = (f"{_REPLAY}.reuse_cooldown_time", f"{_BUFFER}.reuse_cooldown_time")
_FUNCTION, _ARGUMENTS = f"{_REPLAY}.priority_fn", f"{_REPLAY}.priority_fn_args"
_FORMER_ARGUMENTS = f"{_BUFFER}.replay_buffer_kwargs"
_FUNCTIONS = at("sampling.replay_priority", dict.fromkeys(("linear_decay", "decay_limit_randomization"), "recency"))
_MEANING: dict[str, Rule] = {
    "decay": idle("a group's odds fall with its age, and by half with each use"),
    "use_count_limit": idle("a group may train again until it is too old (sampling.max_staleness)"),
    "sigma": idle("groups are drawn at random, by their odds"),
}
_STALENESS = "algorithm.sample_strategy_args.max_staleness"


def replay(draft: Draft, rollouts: int | None, trained: int | None) -> None:
    """`rollouts` are those of a step, `trained` the experiences that Trinity-RFT takes for one."""
    enabled = [key for key in _ENABLE if draft.get(key)]
    again = [key for key in _COOLDOWN if draft.get(key) is not None]
    on = bool(enabled and again and rollouts and trained and trained > rollouts)
    if on and rollouts and trained:
        draft.set("sampling.replay_share", trained / rollouts - 1.0, again[0])
        draft.say(
            f"of the {trained} experiences that a step trains, {trained - rollouts} are of earlier steps "
            "(sampling.replay_share), without a time to wait",
            again[0],
        )
    elif enabled and again:
        draft.say(
            "a step trains on its own rollouts, as many as train_batch_size asks for; for earlier ones, ask for more, "
            "or set sampling.replay_share",
            again[0],
        )
    elif enabled:
        draft.say("each step trains on its own rollouts, each of them once", enabled[0])
    else:
        draft.idle("the replay buffer is off", *again)
    _priority(draft, on)
    if not draft.trains_by(MIXED):  # else the strategy's arguments are the expert's
        _staleness(draft, on)


def _priority(draft: Draft, on: bool) -> None:
    if on or draft.given.get(_FUNCTION) not in (None, *_FUNCTIONS):
        follow(draft, _FUNCTION, choice(_FUNCTIONS))
    if not on:
        draft.idle("no experience trains a second time", _FUNCTION, _ARGUMENTS, _FORMER_ARGUMENTS)
        return
    draft.set_default("sampling.replay_priority", "recency", _FUNCTION)
    answer_section(draft, _ARGUMENTS, _MEANING, "is not an argument of the priority function")
    former = dict.fromkeys(draft.get(_FORMER_ARGUMENTS) or (), idle("a setting of earlier versions")) | _MEANING
    answer_section(draft, _FORMER_ARGUMENTS, former, "")


def _staleness(draft: Draft, on: bool) -> None:
    if draft.given.get("algorithm.sample_strategy") != "staleness_control":
        if draft.get("algorithm.sample_strategy_args"):
            draft.idle("batches are the step's own rollouts", "algorithm.sample_strategy_args")
        return
    strategy_arguments(draft, {"max_staleness": number})
    bound = draft.given.get(_STALENESS)
    if bound in (None, float("inf")):
        return
    if not on and style(draft) in ("fixed", None):  # where no group trains again, rollouts that run ahead are held back
        draft.say("no rollout is older than sync.interval and sync.offset make it", _STALENESS)
    elif bound != int(bound) or bound < 1:
        draft.refuse(_STALENESS, "must be a whole number of updates, 1 at least")
    else:
        draft.set("sampling.max_staleness" if on else "sync.max_staleness", int(bound), _STALENESS)
