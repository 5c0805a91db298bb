"""The algorithm of a Trinity-RFT file: its name, its functions with their arguments, the optimizer.

In: a draft with every key that the file gives. Out: the draft, with those of `algorithm` answered for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.expert import MIXED
from sharpen.compat.trinity.yaml.functions import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    DIFFERENT,
    KL,
    OF_ROWS,
    POLICY_LOSSES,
    SIZES,
    SUPERVISED,
    Function,
)
from sharpen.compat.trinity.yaml.teacher import DISTILL, divergence

_TYPE = "algorithm.algorithm_type"
_OF_TARGET = ("target_kl", "horizon")
_PENALTY = ("kl_coef", *_OF_TARGET)
_STEP_WISE = "step_wise_grpo"


def algorithm(draft: Draft) -> None:
    """`algorithm_type` and its functions."""
    before = len(draft.problems)
    name = _algorithm_type(draft)
    if len(draft.problems) > before:  # what the functions' arguments mean is not known
        draft.same(*(key for key in draft.given if key.startswith("algorithm.") and ".optimizer." not in key))
        return
    if name in SUPERVISED:
        _supervised(draft, str(name))
        return
    advantage, loss = ALGORITHMS[name or "multi_step_grpo"]
    _advantage(draft, advantage)
    aggregation = draft.word("algorithm.loss_agg_mode")
    _policy_loss(draft, loss)
    _kl(draft)
    _entropy(draft)
    if aggregation in AGGREGATIONS:
        draft.set("loss.aggregation", AGGREGATIONS[aggregation], "algorithm.loss_agg_mode")
    elif aggregation is not None:
        draft.refuse("algorithm.loss_agg_mode", f"use {', '.join(AGGREGATIONS)}")
    elif name == "sapo":  # here its paper's is the default
        draft.set_default("loss.aggregation", "token-mean", "algorithm.loss_agg_mode")


def _algorithm_type(draft: Draft) -> str | None:
    """The algorithm's name, None where the file does not say."""
    name = draft.word(_TYPE)
    if name is None:
        stated = any(key.startswith(("algorithm.", "model.model_path")) for key in draft.given)
        if stated and not draft.evaluate_only:
            draft.lines.append(
                f"{draft.file}: {_TYPE} is not given: multi_step_grpo, unless an argument says otherwise "
                "(Trinity-RFT's own default is ppo)"
            )
        return None
    if name not in ALGORITHMS and name not in SUPERVISED:
        near = get_close_matches(name, [*ALGORITHMS, *SUPERVISED], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join((*ALGORITHMS, *SUPERVISED))}"
        draft.wrong(_TYPE, f"is {name!r}, which is no algorithm of Trinity-RFT's{hint}")
        return None
    draft.set(_TYPE, name, _TYPE)
    if name in DIFFERENT:
        draft.say(DIFFERENT[name], _TYPE)
    return name


def _supervised(draft: Draft, name: str) -> None:
    """The loss of an algorithm that learns from rows: its own, and nothing beside it."""
    key, loss = "algorithm.policy_loss_fn", SUPERVISED[name]
    if draft.word(key) not in (None, loss.name):
        draft.refuse(key, f"the loss of {name} is {loss.name}: leave it out")
    draft.same(key)
    given = _arguments(draft, f"{key}_args", loss)
    mode, own = "algorithm.loss_agg_mode", f"{key}_args.loss_agg_mode"
    if "loss_agg_mode" in given and given["loss_agg_mode"] != draft.given.get(mode, "token-mean"):
        draft.refuse(own, "Trinity-RFT takes algorithm.loss_agg_mode instead: set that")
    draft.same(own)
    aggregation = draft.word(mode)
    if name == "dpo" and aggregation is not None:
        draft.idle(mode, "the loss of dpo is the mean over pairs")
    elif aggregation in OF_ROWS:
        draft.set("loss.aggregation", OF_ROWS[aggregation], mode)
        if OF_ROWS[aggregation] == "constant-length":
            draft.set("loss.constant_length", 1, mode)
            draft.say("tokens add up within a row, rows are averaged (loss.constant_length: 1)", mode)
    elif aggregation is not None:
        draft.refuse(mode, f"use {', '.join(OF_ROWS)}")
    for part in ("kl", "entropy"):
        _nothing_beside(draft, name, part)


def _nothing_beside(draft: Draft, name: str, part: str) -> None:
    """A KL or entropy term is refused where it would count."""
    key = f"algorithm.{part}_loss_fn"
    function, arguments = draft.word(key), draft.given.get(f"{key}_args") or {}
    coef = arguments.get(f"{part}_coef") if isinstance(arguments, Mapping) else None
    counts = coef not in (None, 0, 0.0) or (part == "kl" and coef is None)
    if function not in (None, "none") and counts:
        draft.refuse(key, f"{name} has no {part} term here: set none")
    elif function is None and part == "kl" and name == "dpo":
        draft.lines.append(f"{draft.file}: {key} is not given: no KL term (Trinity-RFT adds k2 with 0.001 to dpo)")
    off = f"{key}_args"
    if off in draft.given:
        draft.idle(off, f"{name} has no {part} term")
    draft.same(key)


def _advantage(draft: Draft, usual: str) -> None:
    key = "algorithm.advantage_fn"
    former = "algorithm.add_strategy"  # what it was called before
    if former in draft.given or f"{former}_args" in draft.given:
        if key in draft.given or f"{key}_args" in draft.given:
            draft.refuse(former, "advantage_fn is given too: leave add_strategy out")
        draft.same(key, f"{key}_args")
        key = former
    name = draft.word(key) or usual
    draft.same(key)
    if name == _STEP_WISE and usual == "grpo" and draft.given.get(_TYPE) == "grpo":
        draft.set(_TYPE, "multi_step_grpo", key)
        draft.say("with algorithm_type grpo this is multi_step_grpo", key)
    elif name != usual:
        if name not in ADVANTAGES:
            _no_function(draft, key, name, ADVANTAGES)
            return
        if (name in DISTILL) != (usual in DISTILL):
            draft.refuse(key, _goes_with(name, usual, name in DISTILL))
        elif name not in DISTILL:
            draft.set("loss.advantage", ADVANTAGES[name].name, key)
    function = ADVANTAGES.get(name)
    if function is None:
        return
    if name == usual and function.differs:
        draft.set_default("loss.advantage", function.name, key)
    if name == "gigpo":
        draft.set_default("loss.advantage_args.across_tasks", True, key)
    given = _arguments(draft, f"{key}_args", function)
    if name in DISTILL and usual in DISTILL:
        divergence(draft, name, given, key)
    if given.get("std_cal_level") == "batch":
        draft.set("loss.advantage", "grpo_global_std", f"{key}_args.std_cal_level")
    _one_of(draft, given, f"{key}_args.std_cal_level", ("group", "batch"))
    _one_of(draft, given, f"{key}_args.opmd_baseline", ("mean", "logavgexp"))
    if "tau" in given:
        if given.get("opmd_baseline") == "logavgexp":
            draft.set("loss.advantage_args.tau", given["tau"], f"{key}_args.tau")
        else:
            draft.idle(f"{key}_args.tau", "it belongs to opmd_baseline logavgexp")
    elif given.get("opmd_baseline") == "logavgexp":
        draft.set("loss.advantage_args.tau", 1.0, f"{key}_args.opmd_baseline")
    if "fnorm" in given:
        draft.set("loss.std_normalize", given["fnorm"] == "std", f"{key}_args.fnorm")
        _one_of(draft, given, f"{key}_args.fnorm", ("std", "none"))


def _goes_with(name: str, usual: str, special: bool) -> str:
    """Why a function that is `special`, or one that is not, cannot take the place of the algorithm's `usual` one."""
    return f"it goes with algorithm_type: {name}" if special else f"this algorithm's own is {usual}: leave it out"


def _policy_loss(draft: Draft, usual: str) -> None:
    key = "algorithm.policy_loss_fn"
    name = draft.word(key) or usual
    draft.same(key)
    if not usual:
        for part in (key, f"{key}_args"):
            if part in draft.given:
                draft.idle(part, "the loss is the divergence itself")
        return
    if name not in POLICY_LOSSES:
        _no_function(draft, key, name, POLICY_LOSSES)
        return
    if name != usual and (name in MIXED or usual in MIXED):
        draft.refuse(key, _goes_with(name, usual, name in MIXED))
        draft.same(f"{key}_args")
        return
    if name != usual:
        draft.set("loss.policy_loss", POLICY_LOSSES[name].name, key)
        if name == "ppo":
            draft.set_default("loss.dual_clip", 3.0, f"{key}_args.clip_ratio_c")
    elif POLICY_LOSSES[name].differs:
        draft.set_default("loss.policy_loss", POLICY_LOSSES[name].name, key)
    given = _arguments(draft, f"{key}_args", POLICY_LOSSES[name])
    if name in MIXED:
        _mixed(draft, name, given, key)
    for side in ("low", "high"):  # the more particular one wins
        if f"clip_range_{side}" in given:
            draft.set(f"loss.clip_{side}", given[f"clip_range_{side}"], f"{key}_args.clip_range_{side}")
    if "clip_mode" in given:
        draft.set("loss.policy_loss_args.clip", given["clip_mode"], f"{key}_args.clip_mode")
        _one_of(draft, given, f"{key}_args.clip_mode", ("one-side", "two-side", "none"))
    if "weight" in given:
        draft.set("loss.policy_loss_args.importance", given["weight"] != "none", f"{key}_args.weight")
        _one_of(draft, given, f"{key}_args.weight", ("none", "importance_sampling"))
    if "loss_agg_mode" in given:
        own = f"{key}_args.loss_agg_mode"
        if given["loss_agg_mode"] != draft.given.get("algorithm.loss_agg_mode", "token-mean"):
            draft.refuse(own, "Trinity-RFT takes algorithm.loss_agg_mode instead: set that")
        draft.same(own)


def _mixed(draft: Draft, name: str, given: Mapping[str, Any], key: str) -> None:
    """What the losses of rollouts and of an expert's rows have in common, and how the weight of the latter goes."""
    for size in SIZES:
        if size in given:
            draft.idle(f"{key}_args.{size}", "micro-batches never change a gradient here")
    modes = [given.get(f"{part}_loss_agg_mode") for part in ("sft", "grpo")]
    whole = draft.given.get("algorithm.loss_agg_mode")
    for part, mode in zip(("sft", "grpo"), modes, strict=True):
        own = f"{key}_args.{part}_loss_agg_mode"
        if mode is None:
            continue
        if mode not in AGGREGATIONS:
            draft.refuse(own, f"use {', '.join(AGGREGATIONS)}")
        elif modes[0] != modes[1] and mode != (whole or "token-mean"):
            draft.refuse(own, "rollouts and an expert's rows have one: set algorithm.loss_agg_mode")
        elif whole not in (None, mode):
            draft.refuse(own, f"algorithm.loss_agg_mode is {whole!r}: keep one of them")
        else:
            draft.set("loss.aggregation", AGGREGATIONS[mode], own)
    if name == "mix_chord" and any(argument.startswith("mu_") for argument in given):
        draft.set_default("expert.mu_decay_steps", 0, f"{key}_args.mu_decay_steps")
        draft.set_default("expert.mu_valley", 0.1, f"{key}_args.mu_valley")


def _kl(draft: Draft) -> None:
    key = "algorithm.kl_loss_fn"
    name = draft.word(key)
    penalized = _kl_penalty(draft, name)
    if penalized:
        draft.same(key)
    elif name in KL:
        draft.set("loss.kl", name, key)
    elif name is not None:
        draft.refuse(key, f"use one of {', '.join(KL)}")
    off = name == "none"
    function = Function(
        name="kl",
        moves={} if off else {"kl_coef": ("loss.kl_coef",)},
        off={"adaptive": False},
        idle=("target_kl", "horizon", *(("kl_coef",) if off else ())),
    )
    _arguments(draft, f"{key}_args", function)


def _kl_penalty(draft: Draft, in_loss: str | None) -> bool:
    """The KL penalty in the reward; whether there is one. `in_loss` is the estimator of the KL term in the loss."""
    key = "algorithm.kl_penalty_fn"
    name = draft.word(key)
    arguments = f"{key}_args"
    if name in (None, "none"):
        draft.same(key)
        _arguments(draft, arguments, Function(name="none", idle=("adaptive", *_PENALTY)))
        return False
    if name not in KL:
        draft.refuse(key, f"use one of {', '.join(KL)}")
    elif draft.given.get(_TYPE) != "ppo":
        draft.refuse(key, "Trinity-RFT charges it with ppo only: use kl_loss_fn, which is in the loss (or loss.kl_in)")
    elif in_loss != "none":
        draft.refuse(key, "the KL term is either in the reward or in the loss: set kl_loss_fn: none")
    else:
        draft.set("loss.kl", name, key)
        draft.set("loss.kl_in", "reward", key)
    adaptive = _is_adaptive(draft.given.get(arguments))
    of_target = {"target_kl": ("loss.kl_target",), "horizon": ("loss.kl_horizon",)}
    moves = {"kl_coef": ("loss.kl_coef",), "adaptive": (), **(of_target if adaptive else {})}
    given = _arguments(
        draft, arguments, Function(name=name or "none", moves=moves, idle=() if adaptive else _OF_TARGET)
    )
    if adaptive and not set(_OF_TARGET) <= given.keys():
        draft.wrong(arguments, "with adaptive must have target_kl and horizon")
    return True


def _is_adaptive(arguments: Any) -> bool:
    return isinstance(arguments, Mapping) and is_one_of(arguments.get("adaptive", False), (True,))


def _entropy(draft: Draft) -> None:
    key = "algorithm.entropy_loss_fn"
    name = draft.word(key)
    if name == "none":
        draft.set("loss.entropy_coef", 0.0, key)
        _arguments(draft, f"{key}_args", Function(name="none", idle=("entropy_coef",)))
        return
    mixed = draft.given.get(_TYPE) in MIXED
    if name not in (None, "default") and not (mixed and name == "mix"):
        draft.refuse(key, "use mix or none" if mixed else "use default or none")
    draft.same(key)
    _arguments(draft, f"{key}_args", Function(name="default", moves={"entropy_coef": ("loss.entropy_coef",)}))


def _arguments(draft: Draft, key: str, function: Function) -> dict[str, Any]:
    """Answer for every argument of a function; what is given. Null means not given."""
    value = draft.given.get(key)
    if value is None:
        return {}
    draft.same(key)
    if not isinstance(value, Mapping):
        draft.wrong(key, f"must be a section of settings, but {shown(value)} came")
        return {}
    known = [*function.moves, *function.off, *function.idle, "loss_agg_mode"]
    given = {str(name): inner for name, inner in value.items() if inner is not None}
    for name, inner in given.items():
        own = f"{key}.{name}"
        draft.given[own] = inner
        if name in function.moves:
            for place in function.moves[name]:
                draft.set(place, inner, own)
            draft.same(own)
        elif name in function.idle:
            draft.idle(own, "it belongs to a part of the function that is off")
        elif name in function.off:
            draft.same(own)
            if inner != function.off[name]:
                draft.refuse(own, f"it is {function.off[name]!r} here: leave it out")
        elif name != "loss_agg_mode" or "policy_loss_fn" not in key:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known[:-1]) or 'none'}"
            draft.wrong(own, f"is not an argument of {function.name!r}; {hint}")
    return given


def _one_of(draft: Draft, given: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> None:
    name = key.rpartition(".")[2]
    if name in given and given[name] not in choices:
        draft.refuse(key, f"use {' or '.join(choices)}")


def _no_function(draft: Draft, key: str, name: str, known: Iterable[str]) -> None:
    near = get_close_matches(name, list(known), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    draft.wrong(key, f"is {name!r}, which does not exist here{hint}: use one of {', '.join(known)}")
    draft.same(f"{key}_args")


def optimizer(draft: Draft) -> None:
    """Schedule, warm-up and the gradient's norm."""
    key = "algorithm.optimizer.lr_scheduler_type"
    style = "algorithm.optimizer.warmup_style"  # its former name, which wins there too
    chosen = style if style in draft.given else key
    if chosen in draft.given:
        draft.set("trainer.schedule", draft.given[chosen], chosen)
        if draft.given[chosen] != "constant":
            draft.set_default("trainer.min_lr_ratio", 0.01, "algorithm.optimizer.min_lr_ratio")
    draft.same(key, style)
    steps, ratio = "algorithm.optimizer.lr_warmup_steps", "algorithm.optimizer.lr_warmup_steps_ratio"
    warmup, share = draft.whole(steps), draft.number(ratio)
    draft.same(steps, ratio)
    if warmup is not None and warmup >= 0:
        draft.set("trainer.warmup_steps", warmup, steps)
    elif share:
        total = draft.whole("trainer.total_steps") or draft.whole("buffer.total_steps")
        if total is None:
            draft.refuse(ratio, "a share needs buffer.total_steps too: set lr_warmup_steps instead")
        else:
            draft.set("trainer.warmup_steps", int(share * total), ratio)
    _gradient_norm(draft)


def _gradient_norm(draft: Draft) -> None:
    keys = ("trainer.grad_clip", "trainer.actor_grad_clip", "algorithm.optimizer.clip_grad")
    given = [key for key in keys if key in draft.given]
    for key in given:
        if draft.given[key] != draft.given[given[0]]:
            draft.refuse(key, f"{given[0]} is {shown(draft.given[given[0]])}: give one of them")
        draft.set("trainer.max_grad_norm", draft.given[key], key)
