"""Causes in the updates: a learning rate too high or too low, KL, entropy, clipping.

In: `RolloutRunData`. Out: a `Finding`, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from sharpen.evidence.diagnose.data import Digest, RolloutRunData, by_group
from sharpen.evidence.diagnose.finding import Finding, ends, ids, steps
from sharpen.evidence.diagnose.series import edge, late_mean, slope_t

FALLEN_TO, FALL_Z = 0.3, 4.0
"""A collapse leaves this share of the peak (above the least reward), and is this many standard errors deep."""
PARTLY_FALLEN_TO, PARTLY_FALL_Z = 0.75, 3.0
"""A lasting loss of a quarter, which counts only if gradients grew too: otherwise it can be noise."""
ENTROPY_FACTOR, GRADIENT_FACTOR, LENGTH_FACTOR = 2.0, 3.0, 2.0
"""The change of entropy, gradient norm or length around a collapse that shows that the policy broke; one of them is
enough."""
MIN_MOVEMENT_STEPS = 12
"""With fewer steps, even a sane learning rate need not show an effect beyond noise."""
MOVED_T = 3.0
"""Student's t of a slope that noise alone rarely reaches (1 in 100 with a dozen steps)."""
MOVED_KL = 1e-3
"""KL to the model before training, per token, of a policy that has moved (probabilities changed by a few per cent)."""
MAX_FLAT_SHARE = 0.7
"""If fewer than three in ten groups have a spread, the signal is missing; the learning rate is not the cause."""
KL_REFERENCE, KL_GROWTH = 0.5, 5.0
"""Nats per token from the model before training; and the factor over its median in the first half of the run."""
KL_STEP = 0.1
"""Nats per token within one step. PPO's early stopping is usually set to 0.01 to 0.05."""
ENTROPY_SHARE, ENTROPY_FLOOR, ENTROPY_FLAT = 0.1, 0.005, 0.5
"""The remaining share of the entropy, or its absolute value in nats; and the share of groups that then have no
spread."""
CLIPPED_SHARE = {"gspo": 0.5}
"""Share of tokens whose gradient is removed by clipping, by policy loss. GSPO's narrow range clips 15% by design."""
DEFAULT_CLIPPED_SHARE = 0.3


def learning_rate_too_high(data: RolloutRunData) -> Finding | None:
    """The reward was higher once, fell, and the policy broke on the way."""
    reward = data.reward
    if reward is None:
        return None
    least, most = data.reward_range
    height, rest = reward.peak - least, reward.late - least
    if height < 0.05 * (most - least) or height <= 0.0:
        return None
    rewarded = data.having("reward/mean")
    at_peak = rewarded[reward.peak_at]
    evidence, signs = _breakage(data, at_peak.step)
    collapsed = rest <= FALLEN_TO * height and reward.fall_z >= FALL_Z and signs
    dropped = rest <= PARTLY_FALLEN_TO * height and reward.fall_z >= PARTLY_FALL_Z and "gradient" in signs
    if not collapsed and not dropped:
        return None
    rate, beta2 = data.config.algorithm.learning_rate, data.config.trainer.beta2
    fallen = [
        row
        for row in rewarded[reward.peak_at :]
        if row.metrics["reward/mean"] - least <= (FALLEN_TO if collapsed else PARTLY_FALLEN_TO) * height
    ]
    return Finding(
        name="learning_rate_too_high",
        what=f"The reward was {reward.peak:.3g} around step {at_peak.step} and fell to {reward.late:.3g}, while "
        f"{' and '.join(signs.values())}: learning rate {rate:g} is too high.",
        evidence={
            "mean reward at its peak": reward.peak,
            "mean reward, last steps": reward.late,
            "learning rate": rate,
            "trainer.beta2": beta2,
            **evidence,
        },
        examples=tuple(dict.fromkeys((f"step {at_peak.step}", *steps(fallen[:1])))),
        advice=(
            f"Go back to a checkpoint before step {fallen[0].step if fallen else at_peak.step} and lower "
            f"algorithm.learning_rate to {rate / 3:.1g} or less"
            + (
                f"; set trainer.beta2 to 0.95: {beta2:g} averages squared gradients over {1 / (1 - beta2):.0f} steps, "
                "too slowly to shorten the steps when a gradient grows."
                if beta2 >= 0.99
                else "; add a KL term (loss.kl)."
            )
        ),
    )


def _breakage(data: RolloutRunData, peak_step: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return numbers around the fall, and those of them that show that the policy broke, as clauses."""
    evidence: dict[str, float] = {}
    signs: dict[str, str] = {}
    before, after = data.values_around("trainer/entropy", peak_step)
    if before and after:
        usual, late = fmean(before), late_mean(before + after) or 0.0
        evidence |= {"entropy until then": usual, "entropy, last steps": late}
        if late >= ENTROPY_FACTOR * usual or late <= usual / ENTROPY_FACTOR:
            signs["entropy"] = f"entropy went from {usual:.2g} to {late:.2g}"
    before, after = data.values_around("trainer/grad_norm", peak_step)
    if before and after:
        usual, largest = median(before), max(before[-1 - edge(len(before + after)) :] + after)
        evidence |= {"gradient norm until then": usual, "largest gradient norm after": largest}
        if largest >= GRADIENT_FACTOR * max(usual, 1e-9):
            signs["gradient"] = f"the gradient norm reached {largest:.2g} (before {usual:.2g})"
    before, after = data.values_around("rollout/sampled_tokens", peak_step)
    usual, late = fmean(before or [0.0]), late_mean(before + after) or 0.0
    if usual > 0 and not usual / LENGTH_FACTOR < late < usual * LENGTH_FACTOR:
        evidence |= {"sampled tokens until then": usual, "sampled tokens, last steps": late}
        signs["length"] = f"rollouts went from {usual:.0f} to {late:.0f} tokens"
    return evidence, signs


def learning_rate_too_low(data: RolloutRunData) -> Finding | None:
    """Rewards differ within groups, but neither reward nor entropy nor length changes beyond noise."""
    rewards = data.values("reward/mean")
    if len(rewards) < MIN_MOVEMENT_STEPS or data.solved:
        return None
    flat = fmean(data.flat_shares or [1.0])
    kl = late_mean(data.values("trainer/kl_reference"))
    names = ("reward/mean", "trainer/entropy", "rollout/sampled_tokens")
    slopes = {name: slope_t(data.values(name)) for name in names if len(data.values(name)) >= MIN_MOVEMENT_STEPS}
    trained = sum(data.values("trainer/trained_tokens"))
    if flat > MAX_FLAT_SHARE or not trained or max(map(abs, slopes.values())) >= MOVED_T or (kl or 0.0) >= MOVED_KL:
        return None
    rate = max(data.values("trainer/learning_rate") or [data.config.algorithm.learning_rate])
    evidence = {"learning rate": rate, "steps": float(len(rewards)), "groups with a spread": 1.0 - flat}
    evidence |= {f"slope of {name}, in standard errors": value for name, value in slopes.items()}
    if kl is not None:
        evidence["KL to the model before training, last steps"] = kl
    varied = [rollout for members in by_group(data.last).values() if _spread(members) for rollout in members]
    return Finding(
        name="learning_rate_too_low",
        what=f"Groups have differing rewards, but in {len(rewards)} steps at learning rate {rate:g} neither reward nor "
        "entropy nor length moved beyond noise.",
        evidence=evidence,
        examples=ids(varied),
        advice=(
            f"Raise algorithm.learning_rate to {10 * rate:g}."
            if rate > 0
            else "Set algorithm.learning_rate: it is 0, so that no weight can change."
        )
        + " If that changes nothing, the KL term may be too strong (loss.kl_coef).",
    )


def kl_blow_up(data: RolloutRunData) -> Finding | None:
    """The policy moves far away from the model before training, or too far within one step."""
    reference, within = data.values("trainer/kl_reference"), data.values("trainer/kl_old")
    late, step_kl = late_mean(reference) or 0.0, late_mean(within) or 0.0
    usual = median(reference[: max(1, len(reference) // 2)]) if reference else 0.0
    away = late >= KL_REFERENCE and late >= KL_GROWTH * usual and data.stalled
    if not away and step_kl < KL_STEP * (1.0 + _replayed_steps(data)):
        return None
    name = "trainer/kl_reference" if away else "trainer/kl_old"
    evidence = {"KL within a step, last steps": step_kl}
    if reference:
        evidence |= {"KL to the reference, first half": usual, "KL to the reference, last steps": late}
    return Finding(
        name="kl_blow_up",
        what=f"The policy drifts away from the model before training: KL {late:.2g} nats per token, {usual:.2g} before."
        if away
        else f"A single step moves the policy by {step_kl / (1.0 + _replayed_steps(data)):.2g} nats per token.",
        evidence=evidence,
        examples=steps(data.highest(name)),
        advice=(
            "Lower algorithm.learning_rate, or raise loss.kl_coef."
            if away
            else "Lower algorithm.learning_rate, trainer.epochs or trainer.num_minibatches."
        ),
    )


def entropy_collapse(data: RolloutRunData) -> Finding | None:
    """The policy samples the same texts again and again before the tasks are solved."""
    entropy, flat = data.trend("trainer/entropy"), late_mean(data.flat_shares)
    if entropy is None or flat is None or flat < ENTROPY_FLAT or not data.stalled:
        return None
    if entropy.late > max(ENTROPY_SHARE * entropy.early, ENTROPY_FLOOR):
        return None
    reward = data.reward
    return Finding(
        name="entropy_collapse",
        what=f"Entropy fell from {entropy.early:.2g} to {entropy.late:.2g} nats before the tasks were solved: "
        "the rollouts of a group are alike, and nothing new is tried.",
        evidence={
            **ends("entropy", entropy),
            "groups without spread, last steps": flat,
            "same tokens within a group, last": _alike(data.last),
            **({"mean reward, last steps": reward.late} if reward else {}),
        },
        examples=ids(members[0] for members in by_group(data.last).values() if _num_texts(members) < len(members)),
        advice=(
            "Go back to a checkpoint with more entropy; lower algorithm.learning_rate, raise loss.clip_high "
            "(DAPO: 0.28) or add loss.entropy_coef; keep model.temperature at 1."
        ),
    )


def clip_fraction(data: RolloutRunData) -> Finding | None:
    """Many tokens of the batch have no gradient because their ratio is clipped."""
    clipped = late_mean(data.values("trainer/clip_fraction"))
    loss = data.config.loss.policy_loss or data.config.algorithm.algorithm_type
    limit = CLIPPED_SHARE.get(loss, DEFAULT_CLIPPED_SHARE)
    if clipped is None or clipped < limit:
        return None
    return Finding(
        name="clip_fraction",
        what=f"{clipped:.0%} of the tokens are clipped and have no gradient.",
        evidence={
            "clipped, last steps": clipped,
            "limit": limit,
            "KL within a step, last steps": late_mean(data.values("trainer/kl_old")) or 0.0,
            "updates per step": late_mean(data.values("trainer/num_updates")) or 1.0,
        },
        examples=steps(data.highest("trainer/clip_fraction")),
        advice="Lower algorithm.learning_rate, trainer.epochs or trainer.num_minibatches, or widen loss.clip_high"
        + (", or lower sampling.max_staleness." if data.config.sampling.replay_share else "."),
    )


def _replayed_steps(data: RolloutRunData) -> float:
    """Return how many steps ago the replayed groups were sampled, on average; 0 without replay."""
    age = late_mean(data.values("batch/replay_age_mean")) or 0.0
    return age / (late_mean(data.values("trainer/num_updates")) or 1.0)


def _spread(members: Sequence[Digest]) -> bool:
    return len({rollout.reward for rollout in members if rollout.reward is not None}) > 1


def _num_texts(members: Sequence[Digest]) -> int:
    return len({rollout.fingerprint for rollout in members})


def _alike(rollouts: Sequence[Digest]) -> float:
    """Return the share of rollouts that sampled exactly the same tokens as another one of their group."""
    if not rollouts:
        return 0.0
    alike = 0
    for members in by_group(rollouts).values():
        counts = Counter(rollout.fingerprint for rollout in members)
        alike += sum(count for count in counts.values() if count > 1)
    return alike / len(rollouts)
