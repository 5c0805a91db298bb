"""Trinity-RFT's algorithms, and the functions that make them, by their names there, with our counterparts.

In: nothing. Out: tables. A function's arguments have a rule each; one that is not among them is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft, is_one_of
from sharpen.compat.trinity.yaml.rules import (
    Rule,
    alternatives,
    at,
    choice,
    expanded,
    fixed,
    flag,
    idle,
    itself,
    number,
    refused,
    to,
)

LOSS_AGG_MODE = "algorithm.loss_agg_mode"
MIXED = ("mix", "mix_chord")
"""Algorithms that learn from an expert's rows beside rollouts."""
DISTILL = {"on_policy_distill": "reverse_sampled", "jsd": "js"}
"""Algorithms that learn from a teacher, and the distance from it."""


KL = at("loss.kl", itself("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"))
"""Estimators of the KL divergence, which have the same names here."""
AGGREGATIONS = at(
    "loss.aggregation",
    {
        "token-mean": "token-mean",
        "seq-mean-token-mean": "sequence-mean-token-mean",
        "seq-mean-token-sum": "sequence-mean-token-sum",
    },
)
"""How token losses become one number."""
OF_ROWS: dict[str, dict[str, Any]] = {
    "token-mean": {"loss.aggregation": "token-mean"},
    "seq-mean-token-mean": {"loss.aggregation": "rollout-mean"},
    "seq-mean-token-sum": {"loss.aggregation": "constant-length", "loss.constant_length": 1},
}
"""The same of rows, which are Trinity-RFT's sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that exists here, and its arguments. `differs`: our preset of the algorithm has another function,
    after its paper, so that this one is named where the file is silent. `swallows`: Trinity-RFT's takes arguments that
    it makes no use of.
    """

    name: str
    arguments: Mapping[str, Rule] = field(default_factory=dict)
    differs: bool = False
    swallows: bool = False


def _function(
    name: str, rows: Mapping[str, Rule] | None = None, *, differs: bool = False, swallows: bool = False
) -> Function:
    return Function(name=name, arguments=expanded(rows or {}), differs=differs, swallows=swallows)


def _tau(draft: Draft, key: str, value: Any) -> None:
    baseline = draft.given.get(f"{key.rpartition('.')[0]}.opmd_baseline")
    if baseline == "logavgexp":
        draft.move(key, "loss.advantage_args.tau")
    else:
        draft.idle("it belongs to opmd_baseline logavgexp", key)


def _mixture(draft: Draft, key: str, value: Any) -> None:
    """The teacher's weight; its ends are the pure divergences."""
    number(draft, key, value)
    weight = draft.given.get(key)
    if weight in (0.0, 1.0):
        draft.set("distill.divergence", "reverse" if weight == 0.0 else "forward", key)
    else:
        draft.move(key, "distill.beta")


def _own_aggregation(draft: Draft, key: str, value: Any) -> None:
    counts = draft.given.get(LOSS_AGG_MODE, "token-mean")
    if draft.get(key) not in AGGREGATIONS:
        draft.refuse(key, f"use {alternatives(AGGREGATIONS)}")
    elif value != counts and counts in AGGREGATIONS:
        draft.say(f"{LOSS_AGG_MODE} ({counts}) takes its place, as there", key)
        draft.set_default("loss.aggregation", AGGREGATIONS[counts]["loss.aggregation"], LOSS_AGG_MODE)


def _aggregation_of_mix(draft: Draft, key: str, value: Any) -> None:
    """That of rollouts or of an expert's rows, which have the same here."""
    section = key.rpartition(".")[0]
    rows, rollouts = (draft.given.get(f"{section}.{part}_loss_agg_mode") for part in ("sft", "grpo"))
    whole = draft.given.get(LOSS_AGG_MODE)
    if value in AGGREGATIONS and rows != rollouts and value != (whole or "token-mean"):
        draft.refuse(key, f"rollouts and an expert's rows have one: set {LOSS_AGG_MODE}")
    elif value in AGGREGATIONS and whole not in (None, value):
        draft.refuse(key, f"{LOSS_AGG_MODE} is {whole!r}: keep one of them")
    else:
        choice(AGGREGATIONS)(draft, key, value)


def _mu(place: str) -> Rule:
    """Of the weight of an expert's rows; Trinity-RFT's defaults hold as soon as the file says something of it."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        section = key.rpartition(".")[0]
        draft.move(key, place)
        for name, usual in (("mu_decay_steps", 0), ("mu_valley", 0.1)):
            if f"{section}.{name}" not in draft.given:
                draft.set_default(f"expert.{name}", usual, f"{section}.{name}")

    return rule


def _sequence_masking(draft: Draft, key: str, value: Any) -> None:
    flag(draft, key, value)
    threshold = f"{key.rpartition('.')[0]}.delta_sequence_masking"
    if draft.get(key) and draft.given.get(threshold) is None:
        draft.set_default("loss.sequence_mask", 0.1, threshold)
    if draft.get(key) and is_one_of(draft.given.get("algorithm.bypass_old_logprobs"), (False,)):
        draft.say("sequences are compared with their record, not with the weights at the step's beginning", key)


def _masking_threshold(draft: Draft, key: str, value: Any) -> None:
    if draft.given.get(f"{key.rpartition('.')[0]}.enable_sequence_masking"):
        draft.move(key, "loss.sequence_mask")
    else:
        OFF_PART(draft, key, value)


OFF_PART = idle("it belongs to a part of the function that is off")
_THRESHOLD = {
    "std_threshold": to("loss.std_threshold"),
    "std_cal_level": choice({"group": {}, "batch": {"loss.advantage": "grpo_global_std"}}),
    "epsilon": fixed(1e-6),
}
_CLIP_SIDES = {"clip_range_low": to("loss.clip_low"), "clip_range_high": to("loss.clip_high")}
_CLIP = {"clip_range": to("loss.clip_low", "loss.clip_high"), **_CLIP_SIDES}  # the more particular one comes last
_MIXED = {
    **_CLIP,
    "sft_loss_agg_mode grpo_loss_agg_mode": _aggregation_of_mix,
    "use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer train_batch_size_usual "
    "train_batch_size_expert read_batch_size_usual read_batch_size_expert repeat_times": idle(
        "micro-batches never change a gradient here"
    ),
    "use_token_level_loss_in_sft": idle("Trinity-RFT dropped it (sft_loss_agg_mode)"),
}


def _advantage_argument(*names: str) -> dict[str, Rule]:
    return {name: to(f"loss.advantage_args.{name}") for name in names}


def _loss_argument(*names: str) -> dict[str, Rule]:
    return {name: to(f"loss.policy_loss_args.{name}") for name in names}


_TAU = "loss.advantage_args.tau"
ADVANTAGES = {
    "grpo": _function("grpo", {**_THRESHOLD, "duplicate_experiences": fixed(False), "rank_penalty": fixed(None)}),
    "grpo_verl": _function("grpo", {"epsilon": fixed(1e-6)}),
    "step_wise_grpo": _function(
        "step_wise_grpo", {**_THRESHOLD, "enable_step_norm": to("loss.step_norm")}, swallows=True
    ),
    "cod": _function(
        "step_wise_grpo",
        {
            **_THRESHOLD,
            "std_cal_level": choice(
                {"group": {}, "batch": {"loss.advantage": "grpo_global_std"}, "none": {"loss.std_normalize": False}}
            ),
            "enable_step_norm": to("loss.step_norm"),
            "iterative_hint_e2e_causal": refused(
                "it needs what only the workflows of Trinity-RFT's own research write into experiences (task_rewards, "
                "exp_type, hint_idx): set false, which is step_wise_grpo"
            ),
        },
    ),
    "ppo": _function("call_gae", _advantage_argument("gamma", "lam"), differs=True),
    "remax": _function("remax"),
    "rloo": _function("rloo"),
    "reinforceplusplus": _function("reinforceplusplus_tokens", {"gamma": fixed(1.0)}, differs=True),
    "reinforce": _function("reinforce"),
    "opmd": _function("opmd", {"opmd_baseline": choice({"mean": {}, "logavgexp": {_TAU: 1.0}}), "tau": _tau}),
    "asymre": _function("asymre", _advantage_argument("baseline_shift")),
    "rec": _function("rec", {"std_normalize": to("loss.std_normalize"), "epsilon": fixed(1e-6), "drop": fixed(None)}),
    "gigpo": _function(
        "gigpo",
        {
            **_advantage_argument("omega", "gamma"),
            "fnorm": choice(at("loss.std_normalize", {"std": True, "none": False})),
            "epsilon": fixed(1e-6),
            "step_reward_key": fixed("step_reward"),
            "env_state_hash_key": fixed("env_state_hash"),
        },
        swallows=True,
    ),
    "clipb": _function("clipb", {**_advantage_argument("mu"), "epsilon": fixed(1e-6)}),
    "clipv": _function("clipv", {**_advantage_argument("mu", "max_frac"), "epsilon": fixed(1e-6)}),
    "on_policy_distill": _function("none", {"kl_coef": to("distill.coef")}),
    "jsd": _function(
        "none",
        {
            "kl_coef": to("distill.coef"),
            "lambda_coef": _mixture,
            "chunk_size": idle("the vocabulary is always compared in chunks"),
            "temperature": fixed(1.0),
        },
    ),
}
"""Advantage functions."""

POLICY_LOSSES = {
    "ppo": _function(
        "ppo",
        {
            **_CLIP,
            "clip_ratio_c": to("loss.dual_clip"),
            "enable_sequence_masking": _sequence_masking,
            "delta_sequence_masking": _masking_threshold,
            "fallback_to_policy_gradient": fixed(False),
        },
    ),
    "gspo": _function("gspo", _CLIP),
    "cispo": _function(
        "cispo",
        {**_CLIP_SIDES, "enable_mask_clip": fixed(False), "mask_clip_range_low mask_clip_range_high": OFF_PART},
    ),
    "sapo": _function("sapo_gate", _loss_argument("tau_pos", "tau_neg"), differs=True),
    "topr": _function("topr", {"advantage_threshold": to("loss.policy_loss_args.threshold")}),
    "opmd": _function("opmd", _loss_argument("tau")),
    "sppo": _function("sppo", _loss_argument("epsilon")),
    "rec": _function(
        "rec",
        {
            "epsilon_low": to("loss.clip_low"),
            "epsilon_high": to("loss.clip_high"),
            "clip_mode": choice(at("loss.policy_loss_args.clip", itself("one-side", "two-side", "none"))),
            "weight": choice(at("loss.policy_loss_args.importance", {"none": False, "importance_sampling": True})),
            "regularizer": fixed("none"),
            "temp": fixed(1.0),
            "regularizer_coef epsilon_low_prime epsilon_high_prime": OFF_PART,
        },
    ),
    "sft": _function("sft"),
    "importance_sampling": _function("importance_sampling"),
    "m2po": _function("m2po", {"m2_threshold": to("loss.policy_loss_args.threshold"), "log_ratio_clip": fixed(20.0)}),
    "mix": _function("ppo", {**_MIXED, "mu": to("expert.mu")}),
    "mix_chord": _function(
        "ppo",
        {
            **_MIXED,
            "mu_peak": _mu("expert.mu"),
            **{name: _mu(f"expert.{name}") for name in ("mu_valley", "mu_warmup_steps", "mu_decay_steps")},
            "enable_phi_function": to("expert.phi"),
        },
    ),
}
"""Policy losses."""
OF_EVERY_LOSS: Mapping[str, Rule] = {"loss_agg_mode": _own_aggregation}
"""An argument that every policy loss has."""

ALGORITHMS = {
    "ppo": ("ppo", "ppo"),
    "grpo": ("grpo", "ppo"),
    "grpo_verl": ("grpo", "ppo"),
    "multi_step_grpo": ("step_wise_grpo", "ppo"),
    "dapo": ("grpo", "ppo"),
    "rloo": ("rloo", "ppo"),
    "reinforceplusplus": ("reinforceplusplus", "ppo"),
    "gspo": ("grpo", "gspo"),
    "sapo": ("grpo", "sapo"),
    "cispo": ("grpo", "cispo"),
    "m2po": ("grpo", "m2po"),
    "topr": ("reinforce", "topr"),
    "opmd": ("opmd", "opmd"),
    "asymre": ("asymre", "opmd"),
    "sppo": ("opmd", "sppo"),
    "rec": ("rec", "rec"),
    "raft": ("", "sft"),
    "gigpo": ("gigpo", "ppo"),
    "mix": ("grpo", "mix"),
    "mix_chord": ("grpo", "mix_chord"),
    "on_policy_distill": ("on_policy_distill", "ppo"),
    "jsd": ("jsd", ""),
}
"""The algorithms that exist here, with their advantage function and policy loss; jsd's loss is the divergence."""

SUPERVISED = {
    "sft": _function("sft"),
    "cpt": _function("sft"),
    "dpo": _function("dpo", _loss_argument("beta", "label_smoothing")),
}
"""The algorithms that learn from rows alone, with their loss."""

DIFFERENT = {
    "ppo": "advantages call by call, as Trinity-RFT's (loss.advantage: gae is over a rollout's calls); the critic's "
    "settings are our own (critic.*), whatever trainer_config.critic says",
    "reinforceplusplus": "whitened over tokens, as Trinity-RFT's (loss.advantage: reinforceplusplus: over rollouts)",
    "sapo": "the loss is Trinity-RFT's (loss.policy_loss: sapo is the paper's, of half its slope)",
    "dapo": "where the file is silent the paper's values hold: clip 0.2 and 0.28, groups without spread dropped",
    "gspo": "where the file is silent the paper's values hold: mean over sequences (Trinity-RFT: over tokens)",
    "raft": "every rollout that the workflow returns is imitated, as in Trinity-RFT (raft in our own files: the best "
    "of each group)",
    "cpt": "each text gets an end token (Trinity-RFT: what the tokenizer adds by itself)",
    "rec": "where the file is silent: bounds on one side, no KL (Trinity-RFT: none, k2 0.001)",
    "gigpo": "where the file is silent the paper's values hold: KL low_var_kl 0.01, no dual clip (Trinity-RFT: k2); a "
    "call without info['env_state_hash'] has what the environment showed as its state (Trinity-RFT: none)",
}
"""Algorithms of which a line says what is Trinity-RFT's here and what is not."""
