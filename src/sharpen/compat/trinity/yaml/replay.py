"""Experiences that train again: the replay buffer and the bound on staleness of a Trinity-RFT file.

In: a draft with every key that the file gives. Out: the draft, with those of the replay buffer and `staleness_control`
answered for. There, experiences are queued and the trainer takes those of highest priority, as many as it needs; here a
step trains on its own rollouts and on a share of earlier groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.expert import applies, strategy_arguments
from sharpen.compat.trinity.yaml.synchronizer import style

_BUFFER = "buffer.trainer_input.experience_buffer"
_REPLAY = f"{_BUFFER}.replay_buffer"
_ENABLE = (f"{_REPLAY}.enable", f"{_BUFFER}.use_priority_queue")
_COOLDOWN = (f"{_REPLAY}.reuse_cooldown_time", f"{_BUFFER}.reuse_cooldown_time")
_FUNCTION = f"{_REPLAY}.priority_fn"
_ARGUMENTS = (f"{_REPLAY}.priority_fn_args", f"{_BUFFER}.replay_buffer_kwargs")
_MEANING = {
    "decay": "a group's odds fall with its age, and by half with each use",
    "use_count_limit": "a group may train again until it is too old (sampling.max_staleness)",
    "sigma": "groups are drawn at random, by their odds",
}
_STALENESS = "algorithm.sample_strategy_args.max_staleness"


def replay(draft: Draft, rollouts: int | None, trained: int | None) -> None:
    """`rollouts` are those of a step, `trained` the experiences that Trinity-RFT takes for one."""
    enabled = [key for key in _ENABLE if draft.flag(key)]
    again = [key for key in _COOLDOWN if not is_one_of(draft.given.get(key), (None,))]
    draft.same(*_ENABLE, *_COOLDOWN)
    on = False
    if enabled and again and rollouts and trained and trained > rollouts:
        on = True
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
    for key in again:
        if not enabled:
            draft.idle(key, "the replay buffer is off")
    _priority(draft, on)
    _staleness(draft, on)


def _priority(draft: Draft, on: bool) -> None:
    name = draft.word(_FUNCTION)
    draft.same(_FUNCTION)
    if name not in (None, "linear_decay", "decay_limit_randomization"):
        draft.refuse(_FUNCTION, "use linear_decay or decay_limit_randomization")
    elif on and name is not None:
        draft.set("sampling.replay_priority", "recency", _FUNCTION)
    elif on:
        draft.set_default("sampling.replay_priority", "recency", _FUNCTION)
    elif name is not None:
        draft.idle(_FUNCTION, "no experience trains a second time")
    for key in _ARGUMENTS:
        value = draft.given.get(key)
        draft.same(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            draft.wrong(key, f"must be a section of settings, but {shown(value)} came")
            continue
        if not on:
            draft.idle(key, "no experience trains a second time")
            continue
        for argument in map(str, value):
            if argument in _MEANING:
                draft.idle(f"{key}.{argument}", _MEANING[argument])
            elif key == _ARGUMENTS[0]:
                near = get_close_matches(argument, _MEANING, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(_MEANING)}"
                draft.wrong(f"{key}.{argument}", f"is not an argument of the priority function; {hint}")
            else:
                draft.idle(f"{key}.{argument}", "a setting of earlier versions")


def _staleness(draft: Draft, on: bool) -> None:
    if applies(draft):  # the strategy's arguments are the expert's
        return
    if draft.given.get("algorithm.sample_strategy") != "staleness_control":
        key = "algorithm.sample_strategy_args"
        if not is_one_of(draft.given.get(key), OFF):
            draft.idle(key, "batches are the step's own rollouts")
        draft.same(key)
        return
    strategy_arguments(draft, ("max_staleness",))
    number = draft.number(_STALENESS)
    if number is None or number == float("inf"):
        return
    if not on:
        _of_batches_ahead(draft, number)
    elif number != int(number) or number < 1:
        draft.refuse(_STALENESS, "must be a whole number of updates, 1 at least, where earlier groups train again")
    else:
        draft.set("sampling.max_staleness", int(number), _STALENESS)


def _of_batches_ahead(draft: Draft, number: float) -> None:
    """The bound where no group trains again: it holds rollouts back that would run too far ahead of the trainer."""
    if style(draft) in ("fixed", None):
        draft.say("no rollout is older than sync.interval and sync.offset make it", _STALENESS)
    elif number != int(number) or number < 1:
        draft.refuse(_STALENESS, "must be a whole number of updates, 1 at least")
    else:
        draft.set("sync.max_staleness", int(number), _STALENESS)
