"""Recompute the certificate of a run without rollouts from its dataset.

In: a run directory. Out: a `Certificate`. `run.db` holds which rows each step drew, with digests of them, but not their
text: the rows come from the dataset of `resolved.json`, and rows that changed since are not checked. Rows are drawn in
the run's order, made into sequences and checked a second time; the recorded losses are measured again with each
checkpoint and with the model before training. What is not available any more is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sharpen.agent.tasks.data import RunData
from sharpen.agent.tasks.order import TaskOrder, distinct, make_order
from sharpen.config.run import RunConfig
from sharpen.errors import DatasetError, ModelError
from sharpen.evidence.certificate.certificate import Certificate, LossGaps, add_up, problems_of, recorded_certificate
from sharpen.evidence.certificate.lineage import read_lineage
from sharpen.evidence.certificate.saved_weights import SavedWeights
from sharpen.learning.algorithm.supervised import SUPERVISED, SupervisedAlgorithm, resolve_supervised
from sharpen.learning.experience.reading import StepRecord, read_checks, read_steps, read_taught
from sharpen.learning.experience.records import EXPERT, TaughtRow
from sharpen.learning.supervised.batches import HELD_OUT, row_digest, split, taught_row, weighted
from sharpen.learning.supervised.checks import check_step
from sharpen.learning.supervised.data import load_rows, make_tutor, read_data
from sharpen.learning.supervised.lessons import Lesson, Tutor
from sharpen.models.files import model_folder, quiet_transformers
from sharpen.types import Check

_FLOAT32, _BFLOAT16 = 1e-4, 1e-2
"""How far a loss (a mean over many tokens) may be from the recorded one, which the same code computed, maybe on another
machine."""
_PAIR_FACTOR = 10.0
"""Factor on this tolerance for a pair's loss, which sums the gaps over all tokens of two answers instead of averaging
them."""


@dataclass(slots=True)
class _Found:
    """The results. `lessons` holds the lessons of the steps whose rows have not changed."""

    checks: dict[int, tuple[Check, ...]] = field(default_factory=dict)
    lessons: dict[int, list[Lesson]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def recompute(run_dir: Path, config: RunConfig, saved: SavedWeights, *, losses: bool) -> Certificate:
    """Recompute the certificate of a run without rollouts. With `losses=False` no loss is measured and no model
    loaded."""
    algorithm = resolve_supervised(config.algorithm.algorithm_type, config.loss)
    journal = run_dir / "run.db"
    lineage = read_lineage(run_dir)
    steps = {record.step: record for record in lineage.steps}
    recorded = read_checks(journal)
    found = _Found()
    gaps = None
    for step, rows in read_taught(journal).items():
        found.problems += _counts(step, rows, steps.get(step))
    try:
        data = read_data(config, algorithm, config.workflow is not None)
        folder = _folder(run_dir, config)
    except (DatasetError, ModelError) as error:
        found.missing.append(f"the rows, and everything made from them: {error}")
    else:
        quiet_transformers()
        tutor = make_tutor(config.model, config.supervised, algorithm.data, folder)
        _rows(run_dir, config, algorithm, data, tutor, steps, found)
        if losses:
            gaps = _losses(run_dir, config, saved, algorithm, data, tutor, found)
    for step in steps:
        found.checks.setdefault(step, recorded.get(step, ()))
    by_step = {step: found.checks[step] for step in steps}
    noted = recorded_certificate(run_dir, lineage)
    if add_up(by_step.values()) != noted.checks:
        found.problems.append("the recomputed checks differ from those that the run recorded")
    return replace(
        noted,
        checks=add_up(by_step.values()),
        losses=gaps,
        problems=tuple(dict.fromkeys((*noted.problems, *problems_of(by_step), *found.problems))),
        not_recomputed=tuple(found.missing),
    )


def read_lessons(run_dir: Path, config: RunConfig) -> tuple[dict[int, list[Lesson]], list[str]]:
    """Return the lessons of each step whose rows have not changed, and what is missing."""
    algorithm = resolve_supervised(config.algorithm.algorithm_type, config.loss)
    found = _Found()
    try:
        data = read_data(config, algorithm, config.workflow is not None)
        tutor = make_tutor(config.model, config.supervised, algorithm.data, _folder(run_dir, config))
    except (DatasetError, ModelError) as error:
        return {}, [str(error)]
    steps = {record.step: record for record in read_lineage(run_dir).steps}
    _rows(run_dir, config, algorithm, data, tutor, steps, found)
    return found.lessons, found.missing


def read_expert_lessons(run_dir: Path, config: RunConfig) -> tuple[dict[int, list[Lesson]], str]:
    """Return the lessons of an expert's rows in each step, as the run's order draws them, of the steps whose recorded
    rows are these; and why others are missing."""
    assert config.expert.dataset is not None
    algorithm = SUPERVISED["sft"]
    try:
        rows = load_rows(config.expert.dataset, algorithm.data, config.supervised)
        tutor = make_tutor(config.model, config.supervised, algorithm.data, _folder(run_dir, config))
    except (DatasetError, ModelError) as error:
        return {}, str(error)
    order = TaskOrder(len(rows), config.seed, config.expert.batch_size or config.algorithm.batch_size)
    noted, lessons, missing = read_taught(run_dir / "run.db"), {}, "the run did not record the expert's rows"
    for step in range(1, max(noted, default=0) + 1):
        drawn = [rows[place] for place in order.draw()]
        names = [f"{EXPERT}{name}" for name in distinct([row.id for row in drawn])]
        try:
            made = [tutor.lesson(row, name) for row, name in zip(drawn, names, strict=True)]
        except DatasetError as error:
            missing = f"the expert's rows are others than they were: {error}"
            continue
        again = [taught_row(row, lesson) for row, lesson in zip(drawn, made, strict=True)]
        if again == noted.get(step):
            lessons[step] = made
        elif step in noted:
            missing = "the expert's rows, or their order, are others than those that were recorded"
    return lessons, missing


def _counts(step: int, rows: Sequence[TaughtRow], record: StepRecord | None) -> Iterator[str]:
    """Yield each count of a step's rows that differs from the step's metrics."""
    if record is None:  # the held-out rows, or a step that was repeated later
        return
    counts = {
        "batch/rows": sum(row.num_tokens > 0 for row in rows),
        "batch/rows_too_long": sum(row.too_long for row in rows),
        "batch/rows_empty": sum(row.num_tokens == 0 and not row.too_long for row in rows),
        "trainer/trained_tokens": sum(row.num_tokens for row in rows),
    }
    for name, count in counts.items():
        if record.metrics.get(name) != count:
            yield f"step {step}: its rows have {name} {count}, but the run recorded {record.metrics.get(name, 0):g}"


def _rows(
    run_dir: Path,
    config: RunConfig,
    algorithm: SupervisedAlgorithm,
    data: RunData,
    tutor: Tutor,
    steps: Mapping[int, StepRecord],
    found: _Found,
) -> None:
    """Draw, tokenize and check the rows of every step again."""
    before = _num_rows(run_dir)
    if before not in (None, len(data.training)):
        found.missing.append(
            f"the rows, and everything made from them: there were {before} to train on, the dataset "
            f"{config.train_dataset.path!r} has {len(data.training)} now"
        )
        return
    order = make_order(data.training, config.sampling, seed=config.seed, batch_size=config.algorithm.batch_size)
    taught = read_taught(run_dir / "run.db")
    changed: list[str] = []
    for step in range(1, max(steps, default=0) + 1):
        rows = [data.training[place] for place in order.draw()]
        if step not in steps:
            found.problems.append(f"step {step} is not in run.db")
            continue
        names = distinct([row.id for row in rows])
        noted = taught.get(step)
        if noted is not None and [row.row_id for row in noted] != names:
            wrong = next((row.row_id for row, name in zip(noted, names, strict=False) if row.row_id != name), "fewer")
            found.problems.append(f"step {step}: trained on {wrong}, but its order draws {', '.join(names[:3])}, ...")
            continue
        try:
            lessons = [tutor.lesson(row, name) for row, name in zip(rows, names, strict=True)]
        except DatasetError as error:
            changed.append(f"step {step}, {error}")
            continue
        again = [taught_row(row, lesson) for row, lesson in zip(rows, lessons, strict=True)]
        edited = [row.row_id for row, now in zip(noted or [], again, strict=False) if row.row_digest != now.row_digest]
        if edited:
            changed += [f"step {step}, row {name}" for name in edited]
            continue
        found.problems += [
            f"step {step}: row {row.row_id} was trained on other tokens or images than it gives"
            for row, now in zip(noted or [], again, strict=False)
            if row != now
        ]
        updates = [weighted(part, algorithm) for part in split(lessons, config.trainer.num_minibatches)]
        found.checks[step] = check_step(lessons, [update for update in updates if update], tutor)
        found.lessons[step] = lessons
    if changed:
        found.missing.append(f"steps with rows that have changed since: {len(changed)} rows, first {changed[0]}")
    if unrecorded := [step for step in steps if step not in taught]:
        found.missing.append(
            f"which rows were trained in {len(unrecorded)} steps, first step {unrecorded[0]}: the run did not record "
            "them, so those that its order draws were checked"
        )


def _losses(
    run_dir: Path,
    config: RunConfig,
    saved: SavedWeights,
    algorithm: SupervisedAlgorithm,
    data: RunData,
    tutor: Tutor,
    found: _Found,
) -> LossGaps | None:
    """Measure the recorded losses again: the held-out loss at each checkpoint, and the loss of the step after it (if
    that step was a single update, whose loss is that of the weights before it)."""
    from sharpen.learning.supervised.held_out import HeldOut
    from sharpen.learning.trainer.roles import TrainerPlan
    from sharpen.learning.trainer.trainer import Trainer

    try:
        base = model_folder(config.model.model_path)
    except ModelError as error:
        found.missing.append(f"the losses: {error}")
        return None
    plan = TrainerPlan(
        model_path=base,
        algorithm=algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=1,
        seed=config.seed,
    )
    trainer = Trainer.load(plan, config.engine.device)
    folders = saved.folders
    rounded = str(trainer.policy.compute_dtype) == "torch.bfloat16"
    bound = (_BFLOAT16 if rounded else _FLOAT32) * (1.0 if algorithm.pair_loss is None else _PAIR_FACTOR)
    held_out = HeldOut(
        rows=data.held_out,
        tutor=tutor,
        trainer=trainer,
        algorithm=algorithm,
        batch_size=config.algorithm.batch_size,
    )
    noted, later = _recorded_held_out(run_dir), _recorded_losses(run_dir, found)
    digests = [row.row_digest for row in read_taught(run_dir / "run.db").get(HELD_OUT, ())]
    if digests != list(map(row_digest, data.held_out)):
        found.missing.append("the held-out losses: the held-out rows have changed since, or were not recorded")
        noted = {}
    gaps: list[float] = []
    for step in sorted({0, *folders}):
        if step in folders:
            trainer.restore(folders[step])
        pairs = []
        if step in noted:
            pairs.append((f"the held-out loss after step {step}", noted[step], held_out.measure().loss))
        if step + 1 in later:
            again = trainer.measure(weighted(found.lessons[step + 1], algorithm)).loss
            pairs.append((f"the loss of step {step + 1}", later[step + 1], again))
        for what, before, now in pairs:
            gaps.append(abs(now - before))
            if not gaps[-1] <= bound * max(1.0, abs(before)):  # weights may give NaN
                found.problems.append(f"{what} was recorded as {before:.6g}, but the weights give {now:.6g}")
    return LossGaps(compared=len(gaps), max=max(gaps), steps=tuple(sorted({0, *folders}))) if gaps else None


def _recorded_held_out(run_dir: Path) -> dict[int, float]:
    """Return the recorded held-out loss by step; 0 is the model before training."""
    losses: dict[int, float] = {}
    path = run_dir / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        content = json.loads(line)
        if content.get("eval/loss") is not None:
            losses[int(content["step"])] = float(content["eval/loss"])
    return losses


def _recorded_losses(run_dir: Path, found: _Found) -> dict[int, float]:
    """Return the recorded training loss of each single-update step whose rows have not changed."""
    return {
        record.step: float(record.metrics["trainer/loss"])
        for record in read_steps(run_dir / "run.db")
        if record.step in found.lessons and record.metrics.get("trainer/num_updates") == 1.0
    }


def _num_rows(run_dir: Path) -> int | None:
    """Return how many rows the run drew from, according to its latest checkpoint; None if that is not known."""
    from sharpen.learning.trainer import checkpoint

    latest = checkpoint.pointed(run_dir, "latest")
    if latest is None:
        return None
    state = json.loads((latest / checkpoint.STATE / "state.json").read_text(encoding="utf-8"))
    number = state["position"]["order"].get("num_tasks")
    return None if number is None else int(number)


def _folder(run_dir: Path, config: RunConfig) -> Path:
    """Return the folder of tokenizer and chat template: the model before training, else the latest checkpoint."""
    from sharpen.learning.trainer.checkpoint import pointed

    try:
        return model_folder(config.model.model_path)
    except ModelError:
        latest = pointed(run_dir, "latest")
        if latest is None:
            raise
        return latest
