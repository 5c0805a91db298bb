"""The run certificate, recomputed offline from the records.

In: a run directory. Out: a `Certificate`, compared with what the run noted: each step's batches are drawn again and
held against the recorded calls, and the tokens are scored again with every checkpoint whose policy version sampled
some.

Shape suffixes: E loss tokens of a pack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agenttune.algorithm.presets import Algorithm
from agenttune.algorithm.resolve import algorithm_of
from agenttune.algorithm.supervised import SUPERVISED
from agenttune.certificate.audit import MEANING_OF_ROWS, audit
from agenttune.certificate.certificate import Certificate, LogprobGaps, add_up, problems_of, recorded_certificate
from agenttune.config.explain import InvalidConfigError, explain
from agenttune.config.run import RunConfig
from agenttune.errors import ConfigError
from agenttune.experience.draw import Batch, draw_batches
from agenttune.experience.reading import (
    TrainedCall,
    read_checks,
    read_groups_at,
    read_last_groups,
    read_steps,
    read_trained,
)
from agenttune.experience.records import EXPERT
from agenttune.experience.replay import Replay, mixed
from agenttune.sync.schedule import Schedule
from agenttune.types import Check, Group

_ADVANTAGE_TOLERANCE = 1e-5


def certify(run_dir: Path, *, logprobs: bool = True) -> Certificate:
    """Recompute the certificate of a run, and compare it with what the run noted.

    Raises `ConfigError` if `run_dir` is not a run's directory. `logprobs=False` leaves the models alone.
    """
    for name in ("run.db", "resolved.json"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir} is not the directory of a run: it has no {name}")
    config = read_resolved(run_dir / "resolved.json")
    if config.algorithm.algorithm_type in SUPERVISED:
        from agenttune.supervised.recompute import recompute

        return recompute(run_dir, config, losses=logprobs)
    algorithm = algorithm_of(config)
    journal = run_dir / "run.db"
    steps = {record.step: record.metrics for record in read_steps(journal)}
    by_step: dict[int, tuple[Check, ...]] = {}
    problems: list[str] = []
    trained = _last_trained(journal)
    replay = Replay.of(config, algorithm, ahead=Schedule.of(config, total=1).max_staleness)
    versions = {record.step: record.version for record in read_steps(journal)}
    for step, groups in _steps(journal, steps):
        version = versions.get(step - 1, 0)
        replayed = [kept.group for kept in replay.draw(step, version)] if replay is not None else []
        order = mixed(groups, replayed, algorithm)
        batches = draw_batches(order, algorithm, config.trainer.num_minibatches)
        by_step[step] = audit(
            groups,
            batches,
            algorithm,
            version=version,
            group_size=config.algorithm.group_size,
            batch_size=config.algorithm.batch_size,
            max_staleness=int(steps[step].get("sync/staleness_allowed", 0)),
            replayed=replayed,
            replay_staleness=replay.max_staleness if replay is not None else 0,
        )
        if replay is not None:
            replay.keep(order, batches)
        problems += _differences(step, batches, trained.get(step, {}))
    problems += [f"step {step} was trained, but its groups are not in run.db" for step in steps if step not in by_step]
    gaps = _recomputed_gaps(run_dir, config, problems) if logprobs else None
    recorded = recorded_certificate(run_dir)
    for step, checks in read_checks(journal).items():
        if step in by_step:
            by_step[step] += tuple(check for check in checks if check.name in MEANING_OF_ROWS)
    if add_up(by_step.values()) != recorded.checks:
        problems.append("the checks recomputed differ from those that the run noted")
    return Certificate(
        steps=len(steps),
        checks=add_up(by_step.values()),
        logprob_gaps=gaps,
        staleness=recorded.staleness,
        outcomes=recorded.outcomes,
        calls=recorded.calls,
        problems=(*problems_of(by_step), *problems),
        not_recomputed=_not_recomputed(algorithm),
    )


def _not_recomputed(algorithm: Algorithm) -> tuple[str, ...]:
    """What the records do not determine: advantages that the trainer makes with a critic or the reference model, and
    what was read from an expert's dataset."""
    exceptions = []
    if algorithm.clips_by_entropy:
        exceptions.append(
            "which tokens lost their advantage by what they do to the entropy, which needs the weights of every step; "
            "the advantages before it were recomputed"
        )
    if algorithm.expert is not None:
        exceptions.append(
            "rows, mask and rendered, which are of the expert's rows and stand as the run noted them (their dataset is "
            "not part of the records)"
        )
    if algorithm.needs_critic:
        exceptions.append(
            "the advantages of single tokens, which need the critic's weights at every step; the rewards of calls that "
            "they are made from were recomputed"
        )
    if algorithm.needs_teacher:
        exceptions.append(
            "what the teacher says of the tokens, and advantages or losses made from it, which need its weights; the "
            "advantages before it were recomputed"
        )
    if algorithm.scores_tokens and algorithm.needs_reference and algorithm.kl_in == "reward":
        exceptions.append(
            "the KL penalty of single tokens, which needs the reference model; the advantages before it were recomputed"
        )
    return tuple(exceptions)


def read_resolved(path: Path) -> RunConfig:
    """The configuration that a run wrote into `resolved.json`. Raises `ConfigError` if this AgentTune has no such
    settings any more."""
    tree: dict[str, Any] = {}
    for key, entry in json.loads(path.read_text(encoding="utf-8")).items():
        if entry["origin"] == "derived":
            continue
        section = tree
        *sections, name = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = entry["value"]
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InvalidConfigError.of(f"{path} is of another version of AgentTune", explain(RunConfig, error)) from None


def _steps(journal: Path, steps: Mapping[int, Any]) -> Iterator[tuple[int, list[Group]]]:
    """The groups of each trained step, the last ones where a step was done again after an interruption."""
    for step, keys in read_last_groups(journal).items():
        if step in steps:
            yield step, read_groups_at(journal, keys)


def _last_trained(journal: Path) -> dict[int, dict[tuple[str, int], TrainedCall]]:
    found: dict[int, dict[tuple[str, int], TrainedCall]] = {}
    for call in read_trained(journal):
        if call.rollout_id.startswith(EXPERT):
            continue
        found.setdefault(call.step, {})[call.rollout_id, call.call] = call
    return found


def _differences(step: int, batches: Sequence[Batch], trained: Mapping[tuple[str, int], TrainedCall]) -> Iterator[str]:
    """What the run noted as trained, against the batches drawn again."""
    drawn: dict[tuple[str, int], tuple[int, float]] = {}
    for batch in batches:
        for experience in batch.experiences:
            for place in experience.loss_mask_T.nonzero()[0].tolist():
                key = (experience.rollout_id, int(experience.calls_T[place]))
                count, _ = drawn.get(key, (0, 0.0))
                drawn[key] = (count + 1, float(experience.advantages_T[place]))
    for key in drawn.keys() ^ trained.keys():
        where = "trained, but not in the batch drawn again" if key in trained else "drawn again, but not trained"
        yield f"step {step}: rollout {key[0]}, call {key[1]} was {where}"
    for key in drawn.keys() & trained.keys():
        count, advantage = drawn[key]
        if count != trained[key].num_tokens or abs(advantage - trained[key].advantage) > _ADVANTAGE_TOLERANCE:
            yield (
                f"step {step}: rollout {key[0]}, call {key[1]} was trained on {trained[key].num_tokens} tokens with "
                f"advantage {trained[key].advantage:.6g}, but {count} and {advantage:.6g} were expected"
            )


def _recomputed_gaps(run_dir: Path, config: RunConfig, problems: list[str]) -> LogprobGaps | None:
    """Score the recorded tokens again with each checkpoint whose version sampled some, and the model before training.

    Adds a sentence to `problems` for each version out of tolerance.
    """
    import torch

    from agenttune.errors import ParityError
    from agenttune.execution.model_files import model_folder, quiet_transformers
    from agenttune.experience.merge import merge, whole_support
    from agenttune.trainer import checkpoint
    from agenttune.trainer.lora import load_trained
    from agenttune.trainer.packing import pack
    from agenttune.trainer.parity import LogprobGap, Tolerance

    quiet_transformers()
    folders: dict[int, Path | None] = {0: None}
    for folder in sorted(run_dir.glob(f"{checkpoint.PREFIX}*")):
        folders[int(checkpoint.load(folder).state["version"])] = folder
    groups_of: dict[int, list[Group]] = {version: [] for version in folders}
    steps = {record.step: None for record in read_steps(run_dir / "run.db")}
    for _, groups in _steps(run_dir / "run.db", steps):
        for group in groups:
            if group.version in groups_of:
                groups_of[group.version].append(group)
    model = load_trained(model_folder(config.model.model_path), config.trainer, torch.device(_device(config)))
    total: list[LogprobGap] = []
    for version, source in sorted(folders.items()):
        rollouts = [rollout for group in groups_of[version] for rollout in group.scored if whole_support(rollout)]
        experiences = [experience for rollout in rollouts for experience in merge(rollout)]
        if source is not None and experiences:
            checkpoint.restore_policy(model, checkpoint.load(source), source)
        gap = LogprobGap(version)
        with torch.no_grad():
            for part in pack(experiences, config.trainer.max_tokens_per_micro_batch):
                gap.add(part, model.score(part).logprobs_E)
        try:
            gap.check(Tolerance.of(model.compute_dtype))
        except ParityError as error:
            problems.append(str(error))
        total.append(gap)
    compared = [gap for gap in total if gap.num_tokens]
    num_tokens = sum(gap.num_tokens for gap in compared)
    if not num_tokens:
        return None
    return LogprobGaps(
        mean=sum(gap.mean * gap.num_tokens for gap in compared) / num_tokens,
        max=max(gap.max for gap in compared),
        kl=sum(gap.kl * gap.num_tokens for gap in compared) / num_tokens,
        num_tokens=num_tokens,
        versions=tuple(gap.version for gap in compared),
    )


def _device(config: RunConfig) -> str:
    import torch

    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if torch.cuda.is_available() else "cpu"
