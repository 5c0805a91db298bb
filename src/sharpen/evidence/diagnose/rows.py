"""Why does the loss not fall? Finds causes in the metrics of a run without rollouts.

In: `RowRunData`, the numbers of each step and the losses on held-out rows. Out: `Finding`s, the most likely cause
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from sharpen.evidence.diagnose.finding import Finding, steps
from sharpen.evidence.diagnose.series import Steps, Trend, early_mean, edge, late_mean, slope_t, trend

LEFT_OUT = 0.1
"""Share of rows that are not trained: a tenth of a dataset is more than a few outliers."""
RISE, RISE_Z = 0.1, 4.0
"""Share by which the loss ends above its lowest value (relative to that, or to what was gained), and standard
errors."""
EXPLODED = 2.0
"""Factor over the loss of the first step, which is the untrained model's: a run may jump there at once, and then
scatter so much that there is no trend."""
GRADIENT_FACTOR = 3.0
"""Factor by which gradients grow, compared with before the rise, when the model breaks."""
MIN_STEPS, MOVED_T = 12, 3.0
"""With fewer steps a sane learning rate need not show an effect; Student's t of a slope that noise alone rarely
reaches."""
NOTHING_LEFT = 0.1
"""Nats per token (or per pair) below which there is little left to learn, however flat the loss."""
OVERFIT = 0.05
"""Share by which the held-out loss ends above its lowest value. It has no noise, being measured on the same rows."""
SPIKE, SPIKE_SHARE = 10.0, 0.2
"""Factor over the median that makes a gradient an outlier, and the share of steps above which a few rows cannot be the
cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRunData(Steps):
    """The data of a run without rollouts. `held_out` has (step, loss) of its evaluations; step 0 is the model before
    training."""

    held_out: tuple[tuple[int, float], ...] = ()

    @property
    def gain(self) -> Trend | None:
        """The trend of the negated training loss, whose peak is the loss's lowest point; None for a short run."""
        return trend([-loss for loss in self.values("trainer/loss")])


def rows_left_out(data: RowRunData) -> Finding | None:
    """Many rows are too long, or contain nothing to learn."""
    counts = {name: sum(data.values(f"batch/rows{name}")) for name in ("", "_too_long", "_empty")}
    total = sum(counts.values())
    if not total:
        return None
    too_long, empty = counts["_too_long"] / total, counts["_empty"] / total
    if max(too_long, empty) < LEFT_OUT:
        return None
    what, name, share = (
        ("longer than model.max_model_len", "batch/rows_too_long", too_long)
        if too_long >= empty
        else ("without a token to learn", "batch/rows_empty", empty)
    )
    limit = data.config.model.max_model_len
    return Finding(
        name="rows_left_out",
        what=f"{share:.0%} of the rows are {what}: the model never sees them.",
        evidence={
            "share too long": too_long,
            "share empty": empty,
            "rows trained": counts[""],
            "model.max_model_len": float(limit),
        },
        examples=steps(data.highest(name)),
        advice=(
            f"Raise model.max_model_len above {limit}, or split or shorten these rows."
            if too_long >= empty
            else "Look at the rows (DatasetConfig.preview) and at the names of their fields (supervised)."
        ),
    )


def learning_rate_too_high(data: RowRunData) -> Finding | None:
    """The loss rises permanently, from the beginning or after it had fallen."""
    gain = data.gain
    if gain is None:
        return None
    lowest, early, late = -gain.peak, -gain.early, -gain.late
    taught = data.having("trainer/loss")
    at = taught[gain.peak_at]
    before, after = data.values_around("trainer/grad_norm", at.step)
    usual = median(before or [0.0])
    largest = max(before[-1 - edge(len(before + after)) :] + after, default=0.0)
    grew = largest >= GRADIENT_FACTOR * max(usual, 1e-9)
    above_start = late >= (1.0 + RISE) * early and -gain.z >= RISE_Z
    lost_again = late - lowest >= max(RISE * lowest, 0.3 * (early - lowest)) and gain.fall_z >= RISE_Z and grew
    losses = data.values("trainer/loss")
    exploded = max(losses) >= EXPLODED * losses[0] and median(losses[len(losses) // 2 :]) >= (1.0 + RISE) * losses[0]
    if not above_start and not lost_again and not exploded:
        return None
    rate = data.config.algorithm.learning_rate
    highest = max(taught[gain.peak_at :], key=lambda row: row.metrics["trainer/loss"])
    return Finding(
        name="learning_rate_too_high",
        what=f"The training loss was {lowest:.3g} around step {at.step} and rose to {late:.3g}: learning rate {rate:g} "
        "is too high."
        if above_start or lost_again
        else f"The training loss began at {losses[0]:.3g}, jumped to {max(losses):.3g} and did not come back "
        f"({late:.3g} in the last steps): learning rate {rate:g} is too high.",
        evidence={
            "loss, first steps": early,
            "lowest loss": lowest,
            "loss, last steps": late,
            "learning rate": rate,
            "gradient norm until then": usual,
            "largest gradient norm after": largest,
        },
        examples=tuple(dict.fromkeys((f"step {at.step}", *steps([highest])))),
        advice=(
            f"Lower algorithm.learning_rate to {rate / 3:.1g} or less; trainer.warmup_steps helps if the first steps "
            "do the damage. best/ is the checkpoint with the lowest held-out loss."
        ),
    )


def loss_not_falling(data: RowRunData) -> Finding | None:
    """The loss does not fall beyond noise, though there is something left to learn."""
    losses = data.values("trainer/loss")
    early, late = early_mean(losses), late_mean(losses)
    if (
        len(losses) < MIN_STEPS
        or early is None
        or late is None
        or late < NOTHING_LEFT
        or abs(slope_t(losses)) >= MOVED_T
    ):
        return None
    held = [loss for _, loss in data.held_out]
    if len(held) > 1 and min(held) < (1.0 - OVERFIT) * held[0]:
        return None
    rate = max(data.values("trainer/learning_rate") or [data.config.algorithm.learning_rate])
    return Finding(
        name="loss_not_falling",
        what=f"In {len(losses)} steps at learning rate {rate:g} the training loss did not fall beyond noise "
        f"({early:.3g} -> {late:.3g}).",
        evidence={
            "loss, first steps": early,
            "loss, last steps": late,
            "slope of the loss, in standard errors": slope_t(losses),
            "learning rate": rate,
            "gradient norm": median(data.values("trainer/grad_norm") or [0.0]),
        },
        examples=steps(data.rows[-1:]),
        advice=(
            f"Raise algorithm.learning_rate to {10 * rate:g}."
            if rate > 0
            else "Set algorithm.learning_rate: it is 0, so that no weight can change."
        )
        + " If it still does not fall, read some rows: what does not follow from the prompt cannot be learnt.",
    )


def overfitting(data: RowRunData) -> Finding | None:
    """The loss on held-out rows rises while the loss on trained rows falls."""
    if len(data.held_out) < 2:
        return None
    best_step, best = min(data.held_out, key=lambda pair: pair[1])
    last_step, last = data.held_out[-1]
    since = [row.metrics["trainer/loss"] for row in data.rows if row.step > best_step and "trainer/loss" in row.metrics]
    falling = len(since) > 1 and fmean(since[len(since) // 2 :]) < fmean(since[: len(since) // 2])
    if last < (1.0 + OVERFIT) * best or not falling:
        return None
    late = late_mean(since) or 0.0
    return Finding(
        name="overfitting",
        what=f"The held-out loss rose from {best:.3g} (step {best_step}) to {last:.3g}, while the training loss fell "
        f"to {late:.3g}: the model learns the rows by heart.",
        evidence={
            "lowest held-out loss": best,
            "its step": float(best_step),
            "held-out loss, last": last,
            "training loss, last steps": late,
            "epochs": float(data.config.train_dataset.total_epochs),
        },
        examples=(f"step {best_step}", f"step {last_step}"),
        advice=(
            "Use the checkpoint best/ (the lowest held-out loss); train fewer epochs, at a lower learning rate, or on "
            "more rows."
        ),
    )


def gradient_spikes(data: RowRunData) -> Finding | None:
    """A few steps have gradients far above the others, because of rows unlike all others."""
    updates = data.having("trainer/grad_norm")
    norms = [row.metrics["trainer/grad_norm"] for row in updates]
    if len(norms) < MIN_STEPS:
        return None
    usual = median(norms)
    after_start = updates[edge(len(norms)) :]
    spikes = [row for row in after_start if row.metrics["trainer/grad_norm"] >= SPIKE * max(usual, 1e-9)]
    clip = data.config.trainer.max_grad_norm
    if not spikes or len(spikes) > SPIKE_SHARE * len(norms) or max(norms) <= (clip or 0.0):
        return None
    spikes.sort(key=lambda row: -row.metrics["trainer/grad_norm"])
    return Finding(
        name="gradient_spikes",
        what=f"{len(spikes)} of {len(norms)} steps have gradients over {SPIKE:g} times the usual norm ({usual:.2g}).",
        evidence={
            "median gradient norm": usual,
            "largest gradient norm": max(norms),
            "trainer.max_grad_norm": float(clip or 0.0),
            "steps": float(len(spikes)),
        },
        examples=steps(spikes[:3]),
        advice=(
            "Look at the rows of these steps (table taught in run.db) for other kinds of text, wrong encodings, or "
            "answers unrelated to their prompts. Lower trainer.max_grad_norm to limit their effect."
        ),
    )


RULES: tuple[Callable[[RowRunData], Finding | None], ...] = (
    rows_left_out,
    learning_rate_too_high,
    overfitting,
    loss_not_falling,
    gradient_spikes,
)
