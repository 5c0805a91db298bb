"""Causes in the rollouts: failures, broken tool calls, limits, calls without loss, degenerate texts.

In: `RolloutRunData`. Out: a `Finding`, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from sharpen.evidence.diagnose.data import NGRAM, Digest, RolloutRunData
from sharpen.evidence.diagnose.finding import Finding, ends, ids, steps
from sharpen.evidence.diagnose.series import early_mean, late_mean
from sharpen.types import MODEL_CAUSED, Outcome

EXCLUDED_SHARE = 0.05
"""Failures of one rollout in twenty are not an accident, and training on the survivors is a bias."""
PARSE_ERRORS = 0.15
"""Malformed tool calls per rollout. A model that is learning to call tools makes a few (0.03 in the quickstart)."""
CUT_SHARE = 0.2
"""If one rollout in five is cut off, a limit instead of the model decides what is learnt."""
COMPARED = 3
"""With fewer complete rollouts there is nothing to compare with: a reward that does not rise is enough."""
UNTRAINED_SHARE = 0.5
"""With half of the rollouts without loss, most of what was sampled is not used."""
DRIFT_RATIO, DRIFT_Z = 2.0, 4.0
"""Rollouts twice or half as long, beyond noise. Agents that learn to use their tools usually write up to half more."""
REPEATED_SHARE, REPEATED_GROWTH = 0.3, 0.2
"""Normal text and JSON repeat fewer than one in ten n-grams within a window of 64 tokens."""
TAKEOVER_SHARE, TAKEOVER_BEFORE, TAKEOVER_TASKS = 0.6, 0.2, 4
"""Different tasks have different answers: a rollout that is word for word the same in most of them answers none."""

_ADVICE = {
    Outcome.JUDGE_ERROR: "Run the judge on these responses, and make it return a reward for any response.",
    Outcome.WORKFLOW_ERROR: "If the model's answers cause it, name the exception in rollout.model_exceptions or raise "
    "UnusableAnswerError, and set rollout.failure_reward; let the agent catch the errors of its tools.",
    Outcome.TIMEOUT: "Raise rollout.timeout_s, or give the agent's tools time limits of their own.",
    Outcome.BLOCKED_LOOP: "Await in the agent, or move blocking work to a thread (asyncio.to_thread).",
    Outcome.INFRASTRUCTURE: "Check the endpoint or engine that the error names.",
    Outcome.CANCELLED: "Something cancels the workflow: look for time limits in its own code.",
}
_LIMIT_ADVICE = "Set rollout.failure_reward (e.g. 0.0), so that the model learns from its own failures."


def excluded(data: RolloutRunData) -> Finding | None:
    """Rollouts without a reward, by cause; named `judge_failures` if the cause is the judge."""
    counts = _num_excluded(data)
    total = sum(data.outcomes.values())
    failed = [rollout for rollout in (*data.last, *data.first) if rollout.reward is None]
    if not counts or total == 0 or sum(counts.values()) < EXCLUDED_SHARE * total:
        return None
    cause, count = max(counts.items(), key=lambda item: item[1])
    examples = [rollout for rollout in failed if rollout.outcome == cause] or failed
    worst = sorted(data.rows, key=lambda row: -row.metrics.get(f"rollout/failures/{cause.value}", 0.0))
    judge = cause == Outcome.JUDGE_ERROR
    return Finding(
        name="judge_failures" if judge else "excluded_rollouts",
        what=(
            f"The judge failed on {count} of {total} rollouts"
            if judge
            else f"{count} of {total} rollouts ended without a reward because of {cause.value}"
        )
        + " (retried attempts included).",
        evidence={
            "share of attempts that failed": sum(counts.values()) / total,
            "share of rollouts excluded, last steps": late_mean(data.values("rollout/excluded_share")) or 0.0,
            **{f"{outcome.value}": float(number) for outcome, number in counts.items()},
        },
        examples=ids(examples) or steps(row for row in worst if row.metrics.get(f"rollout/failures/{cause.value}")),
        quotes=tuple(dict.fromkeys(rollout.error for rollout in examples if rollout.error))[:2],
        advice=_ADVICE.get(cause, _LIMIT_ADVICE),
    )


def _num_excluded(data: RolloutRunData) -> dict[Outcome, int]:
    """Count the attempts that ended without a reward, by cause."""
    scored = {Outcome.OK} | (MODEL_CAUSED if data.config.rollout.failure_reward is not None else set())
    return {Outcome(name): count for name, count in data.outcomes.items() if count and Outcome(name) not in scored}


def tool_parse_failures(data: RolloutRunData) -> Finding | None:
    """Tool calls fail to parse, and their number does not fall."""
    errors = data.values("gateway/tool_parse_errors") or [
        fmean([rollout.parse_errors for rollout in data.last] or [0.0])
    ]
    early, late = early_mean(errors) or 0.0, late_mean(errors) or 0.0
    if late < PARSE_ERRORS:
        return None
    parser = data.config.model.tool_call_parser
    return Finding(
        name="tool_parse_failures",
        what=f"The model makes {late:.2g} malformed tool calls per rollout; the agent sees them as plain text.",
        evidence={"malformed calls per rollout, first steps": early, "malformed calls per rollout, last steps": late},
        examples=ids(rollout for rollout in data.last if rollout.parse_errors),
        advice=(
            f"Look at such a call: if it is well-formed for this model, model.tool_call_parser ({parser!r}) is the "
            "wrong one. If it is cut off, raise model.max_tokens. Otherwise show a call in the prompt, and let the "
            "agent answer a malformed call with an error message."
        ),
    )


def truncation(data: RolloutRunData) -> Finding | None:
    """Responses are cut off at a limit, and that costs reward."""
    cut = [rollout for rollout in data.last if rollout.cut]
    whole = [rollout.reward for rollout in data.last if not rollout.cut and rollout.reward is not None]
    share = len(cut) / len(data.last) if data.last else 0.0
    if share < CUT_SHARE:
        return None
    least, most = data.reward_range
    of_cut = [least if rollout.reward is None else rollout.reward for rollout in cut]
    loss = fmean(whole) - fmean(of_cut) if whole else 0.0
    costs = len(whole) >= COMPARED and loss > 0.1 * (most - least)
    helpless = len(whole) < COMPARED and not data.solved and _never_rose(data)
    if not costs and not helpless:
        return None
    evidence = {
        "rollouts cut off": share,
        "calls cut off, last steps": late_mean(data.values("rollout/truncated_share")) or 0.0,
        "mean reward of those cut off": fmean(of_cut),
        "model.max_tokens": float(data.config.model.max_tokens),
    }
    if whole:
        evidence["mean reward of the others"] = fmean(whole)
    return Finding(
        name="truncation",
        what=f"{share:.0%} of the rollouts are cut off at their limit of tokens"
        + (", and their rewards are lower than the others'." if costs else ", and the reward does not rise."),
        evidence=evidence,
        examples=ids(cut),
        advice=(
            "Raise model.max_tokens (and model.max_model_len), or the max_tokens that the agent itself passes; or ask "
            "for shorter answers in the prompt."
        ),
    )


def _never_rose(data: RolloutRunData) -> bool:
    """Return whether the mean reward did not rise beyond noise; in a short run, whether all rewards are equal."""
    reward, (least, most) = data.reward, data.reward_range
    if reward is None:
        return most == least
    return reward.z < 3.0 and reward.peak - reward.early < 0.2 * (most - least)


def empty_masks(data: RolloutRunData) -> Finding | None:
    """Rollouts, or whole steps, have no token that carries loss."""
    scored = [rollout for rollout in data.last if rollout.reward is not None]
    without = [rollout for rollout in scored if rollout.num_trainable == 0]
    share = len(without) / len(scored) if scored else 0.0
    idle = [
        row
        for row in data.rows
        if not row.metrics.get("batch/loss_tokens")
        and row.metrics.get("rollout/count")
        and row.metrics.get("rollout/excluded_share", 0.0) < 1.0
        and (data.flat_share(row) or 0.0) < 1.0
    ]
    if share < UNTRAINED_SHARE and len(idle) < max(3, 0.1 * len(data.rows)):
        return None
    reasons: Counter[str] = Counter()
    for rollout in without:
        reasons.update(rollout.untrained or {"no model call": 1})
    return Finding(
        name="empty_masks",
        what=f"{share:.0%} of the rollouts have no token that carries loss ({_describe(reasons)})."
        if share >= UNTRAINED_SHARE
        else f"{len(idle)} steps trained no token, though their rewards differ.",
        evidence={
            "rollouts without a trained token": share,
            "steps without a trained token": float(len(idle)),
            **{f"calls: {reason}": float(count) for reason, count in reasons.items()},
        },
        examples=ids(without) or steps(idle),
        advice=(
            "Only calls that are sampled (temperature above 0), delivered to the agent and made through the model "
            "object passed to the workflow are trained: let the agent use that object, at temperature 1."
        ),
    )


_REASONS = {
    "greedy": "sampled at temperature 0",
    "left_out": "left out by the workflow",
    "unused": "one of several answers, of which the agent used another",
    "abandoned": "never delivered",
    "empty": "nothing sampled",
}


def _describe(reasons: Counter[str]) -> str:
    return ", ".join(_REASONS.get(reason, reason) for reason, _ in reasons.most_common(2)) or "no model call"


def length_drift(data: RolloutRunData) -> Finding | None:
    """Rollouts become much longer or shorter without a higher reward."""
    length, reward = data.trend("rollout/sampled_tokens"), data.reward
    if length is None or reward is None or reward.z > 2.0 or abs(length.z) < DRIFT_Z:
        return None
    ratio = length.late / max(length.early, 1e-9)
    if 1 / DRIFT_RATIO < ratio < DRIFT_RATIO:
        return None
    longer = ratio > 1.0
    return Finding(
        name="length_drift",
        what=f"Rollouts became {'longer' if longer else 'shorter'} without higher rewards: from {length.early:.0f} to "
        f"{length.late:.0f} sampled tokens.",
        evidence={
            **ends("sampled tokens", length),
            **ends("mean reward", reward),
        },
        examples=ids(sorted(data.last, key=lambda rollout: -rollout.num_tokens if longer else rollout.num_tokens)),
        advice=(
            "Averaging over each rollout's own length favours long wrong answers; loss.aggregation token-mean and "
            "constant-length do not. Make the judge reward the task, not length; limit model.max_tokens."
        ),
    )


def degenerate_text(data: RolloutRunData) -> Finding | None:
    """The reward rises while texts turn into repetitions, or into the same text for all tasks."""
    reward = data.reward
    if reward is None or reward.z < 3.0:
        return None
    before, after = _repeated(data.first), _repeated(data.last)
    text_before, text_after = _most_common(data.first), _most_common(data.last)
    repeats = after >= REPEATED_SHARE and after - before >= REPEATED_GROWTH
    num_tasks = len({rollout.task_id for rollout in data.last})
    takeover = num_tasks >= TAKEOVER_TASKS and text_after[0] >= TAKEOVER_SHARE and text_before[0] <= TAKEOVER_BEFORE
    if not repeats and not takeover:
        return None
    return Finding(
        name="degenerate_text",
        what="The reward rises while "
        + (
            f"the same text becomes the answer of {text_after[0]:.0%} of all rollouts."
            if takeover
            else f"texts turn into repetitions: {after:.0%} of their {NGRAM}-grams occurred shortly before."
        ),
        evidence={
            "repeated n-grams, first": before,
            "repeated n-grams, last": after,
            "share of the commonest text, first": text_before[0],
            "share of the commonest text, last": text_after[0],
            **ends("mean reward", reward),
        },
        examples=ids(
            [rollout for rollout in data.last if rollout.fingerprint == text_after[1]]
            if takeover
            else sorted(data.last, key=lambda rollout: -(rollout.repeated or 0.0))
        ),
        advice=(
            "The judge rewards this text: read one and close the gap in the judge. Until then, a KL term (loss.kl, "
            "loss.kl_coef) keeps the model near its own language."
        ),
    )


def _repeated(rollouts: Sequence[Digest]) -> float:
    return fmean([rollout.repeated for rollout in rollouts if rollout.repeated is not None] or [0.0])


def _most_common(rollouts: Sequence[Digest]) -> tuple[float, str]:
    """Return the share of rollouts that sampled the most common tokens, and their fingerprint."""
    if not rollouts:
        return 0.0, ""
    fingerprint, count = Counter(rollout.fingerprint for rollout in rollouts).most_common(1)[0]
    return count / len(rollouts), fingerprint
