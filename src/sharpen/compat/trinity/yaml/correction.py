"""verl's rollout correction: which logprobs the ratio of a policy loss is to, and how rollouts of older weights weigh.

In: a draft and the section's key. Out: the draft, with the section answered for.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft
from sharpen.compat.trinity.yaml.functions import ALGORITHMS
from sharpen.compat.trinity.yaml.rules import Rule, answer_section, fixed, flag, idle, later, number, refused

_WITHOUT_RATIO = ("opmd", "sft", "")
"""Policy losses of Trinity-RFT that make no use of old logprobs."""
_BYPASSED = "it belongs to bypass_mode false"


def _threshold(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, str) and "_" in value:  # which Python reads as a number
        draft.refuse(key, "bounds on two sides do not exist here: give the upper one (loss.behaviour: masked has two)")
        del draft.given[key]
    else:
        number(draft, key, value)


_RULES: dict[str, Rule] = {
    "bypass_mode": flag,
    "rollout_is": later,
    "rollout_is_threshold": _threshold,
    "rollout_is_batch_normalize": fixed(False),
    "rollout_rs": refused(
        "rejection sampling does not exist here: leave it out (loss.behaviour: masked is near to it)"
    ),
    "rollout_rs_threshold": idle("it belongs to rollout_rs"),
    "rollout_token_veto_threshold": refused("a veto does not exist here: leave it out"),
    "loss_type": fixed("ppo_clip"),
}


def rollout_correction(draft: Draft, key: str, value: Any) -> None:
    """The old logprobs are those recorded while sampling, or those of the weights at the start of the step
    (`bypass_mode: false`); then `rollout_is: token` weighs each token by the ratio of the two."""
    answer_section(draft, key, _RULES, "is no setting of verl's rollout_correction")
    kind, bound = f"{key}.rollout_is", f"{key}.rollout_is_threshold"
    if draft.given.get(f"{key}.bypass_mode", True):
        draft.idle(_BYPASSED, kind, bound)
        _set(draft, "none", f"{key}.bypass_mode")
    elif draft.given.get(kind) is None:
        draft.idle("it belongs to rollout_is", bound)
        _set(draft, "unweighted", f"{key}.bypass_mode")
    elif draft.given[kind] == "token":
        _set(draft, "truncated", kind)
        draft.move(bound, "loss.behaviour_high")
    else:
        draft.refuse(kind, "use token, or leave it out: a whole answer's weight does not exist here")


def bypass_old_logprobs(draft: Draft, key: str, value: Any) -> None:
    """The same by one key, without weights."""
    flag(draft, key, value)
    if draft.get(key) is False:
        _set(draft, "unweighted", key)


def _set(draft: Draft, behaviour: str, key: str) -> None:
    """Apply the correction, where the policy loss has a ratio."""
    usual = ALGORITHMS.get(str(draft.given.get("algorithm.algorithm_type")), ("", "ppo"))[1]
    if (draft.given.get("algorithm.policy_loss_fn") or usual) in _WITHOUT_RATIO:
        draft.idle("the policy loss makes no use of old logprobs", key)
    else:
        draft.set("loss.behaviour", behaviour, key)
