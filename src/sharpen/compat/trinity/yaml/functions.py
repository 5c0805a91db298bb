"""Trinity-RFT's algorithms, and the functions that make them, by their names there, with our counterparts.

In: nothing. Out: tables. An argument that is not in `moves` is accepted at the value in `off`, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that exists here. `moves`: arguments and the settings they become; `off`: arguments with the value
    that is how it is here; `idle`: arguments that mean nothing without another one. `differs`: our preset of the
    algorithm has another function, after its paper, so that this one is named where the file is silent.
    """

    name: str
    moves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    differs: bool = False


_OF_GROUP = {"epsilon": 1e-6, "duplicate_experiences": False, "rank_penalty": None}
_THRESHOLD = {"std_threshold": ("loss.std_threshold",)}
_CLIP = {
    "clip_range": ("loss.clip_low", "loss.clip_high"),
    "clip_range_low": ("loss.clip_low",),
    "clip_range_high": ("loss.clip_high",),
}


SIZES = (
    *("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"),
    *("train_batch_size_usual", "train_batch_size_expert"),
)
"""Arguments by which Trinity-RFT's mixed losses undo what micro-batches do to a mean."""
_MIXED: dict[str, tuple[str, ...]] = dict.fromkeys((*SIZES, "sft_loss_agg_mode", "grpo_loss_agg_mode"), ())


def _own(part: str, name: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"loss.{part}_args.{name}",)}


ADVANTAGES = {
    "grpo": Function(name="grpo", moves={**_THRESHOLD, "std_cal_level": ()}, off=_OF_GROUP),
    "grpo_verl": Function(name="grpo", off={"epsilon": 1e-6}),
    "step_wise_grpo": Function(
        name="step_wise_grpo",
        moves={**_THRESHOLD, "enable_step_norm": ("loss.step_norm",), "std_cal_level": ()},
        off={"epsilon": 1e-6},
    ),
    "ppo": Function(name="call_gae", moves={**_own("advantage", "gamma"), **_own("advantage", "lam")}, differs=True),
    "remax": Function(name="remax"),
    "rloo": Function(name="rloo"),
    "reinforceplusplus": Function(name="reinforceplusplus_tokens", off={"gamma": 1.0}, differs=True),
    "reinforce": Function(name="reinforce"),
    "opmd": Function(name="opmd", moves={"opmd_baseline": (), "tau": ()}),
    "asymre": Function(name="asymre", moves=_own("advantage", "baseline_shift")),
    "rec": Function(name="rec", moves={"std_normalize": ("loss.std_normalize",)}, off={"epsilon": 1e-6, "drop": None}),
    "gigpo": Function(
        name="gigpo",
        moves={**_own("advantage", "omega"), **_own("advantage", "gamma"), "fnorm": ()},
        off={"epsilon": 1e-6, "step_reward_key": "step_reward", "env_state_hash_key": "env_state_hash"},
    ),
    "clipb": Function(name="clipb", moves=_own("advantage", "mu"), off={"epsilon": 1e-6}),
    "clipv": Function(
        name="clipv",
        moves={**_own("advantage", "mu"), **_own("advantage", "max_frac")},
        off={"epsilon": 1e-6},
    ),
    "on_policy_distill": Function(name="none", moves={"kl_coef": ("distill.coef",)}),
    "jsd": Function(
        name="none",
        moves={"kl_coef": ("distill.coef",), "lambda_coef": (), "chunk_size": ()},
        off={"temperature": 1.0},
    ),
}
"""Advantage functions. Those with empty `moves` are decided in `algorithm`."""

POLICY_LOSSES = {
    "ppo": Function(
        name="ppo",
        moves={**_CLIP, "clip_ratio_c": ("loss.dual_clip",)},
        off={"enable_sequence_masking": False, "fallback_to_policy_gradient": False},
        idle=("delta_sequence_masking",),
    ),
    "gspo": Function(name="gspo", moves=_CLIP),
    "cispo": Function(
        name="cispo",
        moves={key: _CLIP[key] for key in ("clip_range_low", "clip_range_high")},
        off={"enable_mask_clip": False},
        idle=("mask_clip_range_low", "mask_clip_range_high"),
    ),
    "sapo": Function(
        name="sapo_gate",
        moves={**_own("policy_loss", "tau_pos"), **_own("policy_loss", "tau_neg")},
        differs=True,
    ),
    "topr": Function(name="topr", moves={"advantage_threshold": ("loss.policy_loss_args.threshold",)}),
    "opmd": Function(name="opmd", moves=_own("policy_loss", "tau")),
    "sppo": Function(name="sppo", moves=_own("policy_loss", "epsilon")),
    "rec": Function(
        name="rec",
        moves={"epsilon_low": ("loss.clip_low",), "epsilon_high": ("loss.clip_high",), "clip_mode": (), "weight": ()},
        off={"regularizer": "none", "temp": 1.0},
        idle=("regularizer_coef", "epsilon_low_prime", "epsilon_high_prime"),
    ),
    "sft": Function(name="sft"),
    "importance_sampling": Function(name="importance_sampling"),
    "mix": Function(name="ppo", moves={**_CLIP, **_MIXED, "mu": ("expert.mu",)}),
    "mix_chord": Function(
        name="ppo",
        moves={
            **_CLIP,
            **_MIXED,
            "mu_peak": ("expert.mu",),
            **{name: (f"expert.{name}",) for name in ("mu_valley", "mu_warmup_steps", "mu_decay_steps")},
            "enable_phi_function": ("expert.phi",),
        },
    ),
}
"""Policy losses."""

KL = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
"""Estimators of the KL divergence, which have the same names here."""

AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
}
"""How token losses become one number."""

OF_ROWS = {"token-mean": "token-mean", "seq-mean-token-mean": "rollout-mean", "seq-mean-token-sum": "constant-length"}
"""The same of rows, which are Trinity-RFT's sequences; the constant is 1."""

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
    "sft": Function(name="sft"),
    "cpt": Function(name="sft"),
    "dpo": Function(name="dpo", moves=_own("policy_loss", "beta"), off={"label_smoothing": 0.0}),
}
"""The algorithms that learn from rows, with their loss."""

DIFFERENT = {
    "ppo": "advantages call by call, as Trinity-RFT's (loss.advantage: gae is over a rollout's calls); the critic's "
    "settings are our own (critic.*), whatever trainer_config.critic says",
    "reinforceplusplus": "whitened over tokens, as Trinity-RFT's (loss.advantage: reinforceplusplus: over rollouts)",
    "sapo": "the loss is Trinity-RFT's (loss.policy_loss: sapo is the paper's, of half its slope)",
    "dapo": "where the file is silent the paper's values hold: clip 0.2 and 0.28, groups without spread dropped",
    "gspo": "where the file is silent the paper's values hold: mean over sequences (Trinity-RFT: over tokens)",
    "cpt": "each text gets an end token (Trinity-RFT: what the tokenizer adds by itself)",
    "rec": "where the file is silent: bounds on one side, no KL (Trinity-RFT: none, k2 0.001)",
    "gigpo": "where the file is silent the paper's values hold: KL low_var_kl 0.01, no dual clip (Trinity-RFT: k2); a "
    "call without info['env_state_hash'] has what the environment showed as its state (Trinity-RFT: none)",
}
"""Algorithms of which a line says what is Trinity-RFT's here and what is not."""
