"""The algorithm of a Trinity-RFT file: its name, its functions with their arguments, the optimizer.

In: a draft with every key that the file gives. Out: the draft, with those of `algorithm` answered for.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharpen.compat.trinity.algorithms import (
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    PART,
    POLICY_LOSS_FN,
    PartRegistry,
    parameters_of,
)
from sharpen.compat.trinity.yaml.draft import Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.functions import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    DIFFERENT,
    DISTILL,
    KL,
    LOSS_AGG_MODE,
    MIXED,
    OF_EVERY_LOSS,
    OF_ROWS,
    OFF_PART,
    POLICY_LOSSES,
    SUPERVISED,
    Function,
)
from sharpen.compat.trinity.yaml.rules import alternatives, answer_section, choice, fixed, follow, later, nearest, to
from sharpen.config.functions import import_object
from sharpen.errors import ConfigError

_TYPE = "algorithm.algorithm_type"
_OFF_TARGET = {"target_kl": OFF_PART, "horizon": OFF_PART}
_STEP_WISE = "step_wise_grpo"


def algorithm(draft: Draft) -> None:
    """`algorithm_type` and its functions."""
    name = _algorithm_type(draft)
    if any(problem.place == tuple(_TYPE.split(".")) for problem in draft.problems):
        return  # what the functions' arguments mean is not known
    if name in SUPERVISED:
        _supervised(draft, name)
    else:
        advantage, loss = (
            _own_functions(name) if name and name in ALGORITHM_TYPE else ALGORITHMS[name or "multi_step_grpo"]
        )
        _advantage(draft, advantage)
        _policy_loss(draft, loss)
        _kl(draft)
        _entropy(draft)
        _aggregation(draft, draft.given.get("algorithm.policy_loss_fn") or loss)
        if name == "sapo":  # here its paper's is the default
            draft.set_default("loss.aggregation", "token-mean", LOSS_AGG_MODE)
        elif name == "raft":
            draft.set_default("loss.advantage", "every_rollout", "algorithm.advantage_fn")


def _algorithm_type(draft: Draft) -> str | None:
    """The algorithm's name, None where the file does not say."""
    name: str | None = draft.get(_TYPE)
    if name is None:
        stated = any(key.startswith(("algorithm.", "model.model_path")) for key in draft.given)
        if stated and not draft.evaluate_only:
            draft.say(
                f"{_TYPE} is not given: multi_step_grpo, unless an argument says otherwise (Trinity-RFT's own default "
                "is ppo)"
            )
        return None
    if name in ALGORITHM_TYPE:
        _registered(draft, _TYPE, ALGORITHM_TYPE, _TYPE)
        return name
    known = [*ALGORITHMS, *SUPERVISED, *ALGORITHM_TYPE]
    if name not in known:
        draft.wrong(_TYPE, f"is {name!r}, which is no algorithm of Trinity-RFT's{nearest(name, known)}")
        return None
    draft.move(_TYPE, _TYPE)
    if name in DIFFERENT:
        draft.say(DIFFERENT[name], _TYPE)
    return name


def _own_functions(name: str) -> tuple[str, str]:
    """The advantage function and the policy loss of an algorithm that a plugin registered."""
    algorithm = import_object(ALGORITHM_TYPE.place(name).removesuffix(f".{PART}"))
    given = {"advantage_fn": "grpo", "policy_loss_fn": "ppo", **algorithm.default_config()}
    return given["advantage_fn"], given["policy_loss_fn"]


def _registered(draft: Draft, key: str, registry: PartRegistry, place: str) -> None:
    """What a plugin registered takes the place of ours, or is refused in its words."""
    try:
        draft.set(place, registry.place(draft.given[key]), key)
    except ConfigError as error:
        draft.wrong(key, f"is {draft.given[key]!r}: {error}")


def _registered_arguments(draft: Draft, key: str, registry: PartRegistry, name: str, place: str) -> None:
    cls = import_object(registry.place(name).removesuffix(f".{PART}"))
    _arguments(draft, key, Function(name=name, arguments={one: to(f"{place}.{one}") for one in parameters_of(cls)}))


def _supervised(draft: Draft, name: str) -> None:
    """The loss of an algorithm that learns from rows: its own, and nothing beside it."""
    key, loss = "algorithm.policy_loss_fn", SUPERVISED[name]
    if draft.get(key) not in (None, loss.name):
        draft.refuse(key, f"the loss of {name} is {loss.name}: leave it out")
    _arguments(draft, key, loss)
    if name == "dpo":
        _aggregation_of_pairs(draft)
        _kl_of_pairs(draft)
    else:
        follow(draft, LOSS_AGG_MODE, choice(OF_ROWS))
        if draft.given.get(LOSS_AGG_MODE) == "seq-mean-token-sum":
            draft.say("tokens add up within a row, rows are averaged (loss.constant_length: 1)", LOSS_AGG_MODE)
        _nothing_beside(draft, name, "kl")
    _nothing_beside(draft, name, "entropy")


def _aggregation_of_pairs(draft: Draft) -> None:
    """There it is that of the KL term alone, which is a mean over tokens here."""
    text = "the loss of dpo is the mean over pairs, its KL term the mean over tokens"
    if draft.get(LOSS_AGG_MODE) in (None, "token-mean"):
        draft.idle(text, LOSS_AGG_MODE)
    else:
        draft.say(f"{text} (there, this counts for the KL term)", LOSS_AGG_MODE)


def _kl_of_pairs(draft: Draft) -> None:
    """The KL term beside dpo, which Trinity-RFT always has: k2, unless another is named."""
    key = "algorithm.kl_loss_fn"
    name = draft.get(key)
    arguments = draft.get(f"{key}_args")
    coef = arguments.get("kl_coef") if isinstance(arguments, Mapping) else None
    rules = {**_OFF_TARGET, "kl_coef": later, "adaptive": fixed(False)}
    _arguments(draft, key, Function(name="kl", arguments=rules))
    if name not in (None, *KL):
        draft.refuse(key, f"use {alternatives(KL)}")
    elif is_one_of(coef, (0,)):
        draft.idle("kl_coef is 0", key)
    else:
        ours = {None: "k2", "none": "k2", "corrected_k3": "k3"}.get(name, name)
        if name in ("none", "corrected_k3"):
            draft.say(f"with dpo this is {ours}, as there", key)
        (draft.set_default if name is None else draft.set)("loss.kl", ours, key)
        if coef is None:
            draft.set_default("loss.kl_coef", 0.001, f"{key}_args.kl_coef")
        else:
            draft.set("loss.kl_coef", coef, f"{key}_args.kl_coef")


def _nothing_beside(draft: Draft, name: str, part: str) -> None:
    """A KL or entropy term is refused where it would count."""
    key = f"algorithm.{part}_loss_fn"
    function, coef = draft.get(key), (draft.given.get(f"{key}_args") or {}).get(f"{part}_coef")
    counts = part == "kl" if coef is None else not is_one_of(coef, (0,))
    if function not in (None, "none") and counts:
        draft.refuse(key, f"{name} has no {part} term here: set none")
    draft.idle(f"{name} has no {part} term", f"{key}_args")


def _advantage(draft: Draft, usual: str) -> None:
    key, former = "algorithm.advantage_fn", "algorithm.add_strategy"  # what it was called before
    if former in draft.given or f"{former}_args" in draft.given:
        if key in draft.given or f"{key}_args" in draft.given:
            draft.refuse(former, "advantage_fn is given too: leave add_strategy out")
        key = former
    name = draft.get(key) or usual
    if name in ADVANTAGE_FN:
        if name != usual:
            _registered(draft, key, ADVANTAGE_FN, "loss.advantage")
        _registered_arguments(draft, key, ADVANTAGE_FN, name, "loss.advantage_args")
        return
    if name == _STEP_WISE and draft.given.get(_TYPE) == "grpo":
        draft.set(_TYPE, "multi_step_grpo", key)
        draft.say("with algorithm_type grpo this is multi_step_grpo", key)
    elif name != usual and name not in ADVANTAGES:
        draft.wrong(key, f"is {name!r}, which does not exist here{nearest(name, [*ADVANTAGES, *ADVANTAGE_FN])}")
        return
    elif (name in DISTILL) != (usual in DISTILL):
        draft.refuse(key, _goes_with(name, usual, name in DISTILL))
    elif name in DISTILL:
        _divergence(draft, name, key)
    elif name != usual:
        draft.set("loss.advantage", ADVANTAGES[name].name, key)
    elif name and ADVANTAGES[name].differs:
        draft.set_default("loss.advantage", ADVANTAGES[name].name, key)
    if name == "gigpo":
        draft.set_default("loss.advantage_args.across_tasks", True, key)
    if name:
        _arguments(draft, key, ADVANTAGES[name])


def _divergence(draft: Draft, name: str, key: str) -> None:
    """Of the two algorithms with a teacher, the other's function chooses the other's divergence."""
    if name != draft.given.get(_TYPE):
        draft.set("distill.divergence", DISTILL[name], key)
    if name == "jsd":
        draft.say(
            "jsd is the divergence over the whole vocabulary, with its own gradient (Trinity-RFT: the sampled token's "
            "term, as an advantage)"
        )


def _arguments(draft: Draft, key: str, function: Function) -> None:
    """Those of the function that `key` names."""
    rules = {**function.arguments, **(OF_EVERY_LOSS if key == "algorithm.policy_loss_fn" else {})}
    unknown = f"is not an argument of {function.name!r}"
    answer_section(draft, f"{key}_args", rules, unknown, swallows=function.swallows)


def _goes_with(name: str, usual: str, special: bool) -> str:
    """Why a function that is `special`, or one that is not, cannot take the place of the algorithm's `usual` one."""
    return f"it goes with algorithm_type: {name}" if special else f"this algorithm's own is {usual}: leave it out"


def _policy_loss(draft: Draft, usual: str) -> None:
    key = "algorithm.policy_loss_fn"
    name = draft.get(key) or usual
    if name in POLICY_LOSS_FN:
        if name != usual:
            _registered(draft, key, POLICY_LOSS_FN, "loss.policy_loss")
        _registered_arguments(draft, key, POLICY_LOSS_FN, name, "loss.policy_loss_args")
        return
    if not usual:
        draft.idle("the loss is the divergence itself", key, f"{key}_args")
    elif name not in POLICY_LOSSES:
        draft.wrong(key, f"is {name!r}, which does not exist here{nearest(name, [*POLICY_LOSSES, *POLICY_LOSS_FN])}")
    elif name != usual and (name in MIXED or usual in MIXED):
        draft.refuse(key, _goes_with(name, usual, name in MIXED))
    else:
        ours = POLICY_LOSSES[name]
        if name != usual:
            draft.set("loss.policy_loss", ours.name, key)
        elif ours.differs:
            draft.set_default("loss.policy_loss", ours.name, key)
        _arguments(draft, key, ours)
        if name == "ppo" != usual:
            draft.set_default("loss.dual_clip", 3.0, f"{key}_args.clip_ratio_c")


def _aggregation(draft: Draft, loss: str) -> None:
    """Trinity-RFT's rule: with arguments of its own, a loss that gets no `loss_agg_mode` among them keeps its default,
    whatever `algorithm.loss_agg_mode` is."""
    key = "algorithm.policy_loss_fn_args"
    arguments = draft.given.get(key)
    follow(draft, LOSS_AGG_MODE, choice(AGGREGATIONS))
    if loss in MIXED or not isinstance(arguments, dict) or arguments.get("loss_agg_mode") is not None:
        return
    own = "seq-mean-token-mean" if loss == "gspo" else "token-mean"
    given = draft.given.get(LOSS_AGG_MODE)
    if given in AGGREGATIONS and given != own:
        draft.set("loss.aggregation", AGGREGATIONS[own]["loss.aggregation"], key)
        draft.say(
            f"as there, the loss {loss} has {own}, since policy_loss_fn_args does not set it (there, this counts for "
            "the KL and entropy terms alone; here all terms have the loss's)",
            LOSS_AGG_MODE,
        )
    elif "gspo" in (loss, draft.given.get(_TYPE)):  # our preset of gspo, or of another algorithm with its loss, differs
        draft.set_default("loss.aggregation", AGGREGATIONS[own]["loss.aggregation"], f"{key}.loss_agg_mode")


def _kl(draft: Draft) -> None:
    """The KL term, in the loss or (of ppo) in the reward."""
    key, charged = "algorithm.kl_loss_fn", draft.get("algorithm.kl_penalty_fn") not in (None, "none")
    name = draft.get(key)
    if charged:
        _kl_penalty(draft, name)
    elif name in KL_FN:
        _registered(draft, key, KL_FN, "loss.kl")
    else:
        follow(draft, key, choice(KL))
    arguments = {**_OFF_TARGET, "kl_coef": OFF_PART if name == "none" else to("loss.kl_coef"), "adaptive": fixed(False)}
    _arguments(draft, key, Function(name="kl", arguments=arguments))
    if not charged:
        arguments = {**_OFF_TARGET, "kl_coef": OFF_PART, "adaptive": OFF_PART}
        _arguments(draft, "algorithm.kl_penalty_fn", Function(name="none", arguments=arguments))


def _kl_penalty(draft: Draft, in_loss: str | None) -> None:
    """The KL penalty in the reward. `in_loss` is the estimator of the KL term in the loss."""
    key = "algorithm.kl_penalty_fn"
    name = draft.given[key]
    if name not in KL:
        draft.refuse(key, f"use {alternatives(KL)}")
    elif draft.given.get(_TYPE) != "ppo":
        draft.refuse(key, "Trinity-RFT charges it with ppo only: use kl_loss_fn, which is in the loss (or loss.kl_in)")
    elif in_loss != "none":
        draft.refuse(key, "the KL term is either in the reward or in the loss: set kl_loss_fn: none")
    else:
        draft.set("loss.kl", name, key)
        draft.set("loss.kl_in", "reward", key)
    given = draft.given.get(f"{key}_args") or {}
    adaptive = is_one_of(given.get("adaptive"), (True,))
    arguments = {"kl_coef": to("loss.kl_coef"), "adaptive": later, **_OFF_TARGET}
    if adaptive:
        arguments |= {"target_kl": to("loss.kl_target"), "horizon": to("loss.kl_horizon")}
    _arguments(draft, key, Function(name=name, arguments=arguments))
    if adaptive and any(given.get(argument) is None for argument in _OFF_TARGET):
        draft.wrong(f"{key}_args", "with adaptive must have target_kl and horizon")


def _entropy(draft: Draft) -> None:
    key = "algorithm.entropy_loss_fn"
    name = draft.get(key)
    known = ["mix", "none"] if draft.given.get(_TYPE) in MIXED else ["default", "none"]
    if name == "none":
        draft.set("loss.entropy_coef", 0.0, key)
    elif name in ENTROPY_LOSS_FN:
        _registered(draft, key, ENTROPY_LOSS_FN, key)
    elif name not in (None, "default", *known):
        draft.refuse(key, f"use {alternatives(known)}")
    of_coef = OFF_PART if name == "none" else to("loss.entropy_coef")
    _arguments(draft, key, Function(name=name or "default", arguments={"entropy_coef": of_coef}))


def optimizer(draft: Draft) -> None:
    """Schedule, warm-up and the gradient's norm."""
    section = "algorithm.optimizer"
    style = draft.get(f"{section}.warmup_style")  # the former name of lr_scheduler_type, which wins there too
    key = f"{section}.lr_scheduler_type" if style is None else f"{section}.warmup_style"
    if draft.get(f"{section}.lr_scheduler_type") is not None or style is not None:
        draft.move(key, "trainer.schedule")
        if draft.given[key] != "constant":
            draft.set_default("trainer.min_lr_ratio", 0.01, f"{section}.min_lr_ratio")
    steps, ratio = f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio"
    warmup, share = draft.get(steps), draft.get(ratio)
    total = draft.given.get("trainer.total_steps") or draft.given.get("buffer.total_steps")
    if warmup is not None and warmup >= 0:
        draft.move(steps, "trainer.warmup_steps")
    elif share and total is None:
        draft.refuse(ratio, "a share needs buffer.total_steps too: set lr_warmup_steps instead")
    elif share:
        draft.set("trainer.warmup_steps", int(share * total), ratio)
    _gradient_norm(draft)


def _gradient_norm(draft: Draft) -> None:
    keys = ("trainer.grad_clip", "trainer.actor_grad_clip", "algorithm.optimizer.clip_grad")
    given = [key for key in keys if key in draft.given]
    for key in given:
        if draft.given[key] != draft.given[given[0]]:
            draft.refuse(key, f"{given[0]} is {shown(draft.given[given[0]])}: give one of them")
        draft.move(key, "trainer.max_grad_norm")
