"""Recompute the run certificate offline from the run's records.

In: a run directory. Out: a `Certificate` of the steps behind its weights, compared with what the run recorded: what
each step stored as trained is checked against the recorded calls (`certificate.rollouts`), and the tokens are scored
again with every checkpoint whose policy version sampled some of them. The forward pass is the trainer's; nothing else
is shared with the code that makes the batches.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from sharpen.config.explain import InvalidConfigError, explain
from sharpen.config.resuming import recorded_settings
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certificate import (
    Certificate,
    LogprobGaps,
    add_up,
    problems_of,
    recorded_certificate,
)
from sharpen.evidence.certificate.checks import MEANING_OF_ROWS
from sharpen.evidence.certificate.constraints import constraint_check, wrong_experts
from sharpen.evidence.certificate.expectation import carries_loss, is_eligible
from sharpen.evidence.certificate.lineage import Lineage, in_words, read_lineage
from sharpen.evidence.certificate.rollouts import recompute_steps
from sharpen.evidence.certificate.rules import Rules
from sharpen.evidence.certificate.saved_weights import SavedWeights, read_saved_weights
from sharpen.evidence.certificate.sources import check_sources, without_second
from sharpen.evidence.certificate.verdict import judge_again
from sharpen.learning.algorithm.supervised import learns_from_rows
from sharpen.learning.experience.reading import read_checks, read_groups_at, read_parity
from sharpen.learning.schedule import Schedule
from sharpen.models.table import bring
from sharpen.types import Call, Experience, Rollout

if TYPE_CHECKING:
    from sharpen.learning.trainer.parity import LogprobGap


def certify(run_dir: Path, *, logprobs: bool = True) -> Certificate:
    """Recompute a run's certificate and compare it with what the run recorded.

    With `logprobs=False` no model is loaded. Raises `ConfigError` if `run_dir` is not a run directory.
    """
    for name in ("run.db", "resolved.json"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir} is not a run directory: it has no {name}")
    config = read_resolved(run_dir / "resolved.json")
    check_sources(config, _recorded_sources(run_dir / "resolved.json"))
    without = "" if logprobs else "as requested"
    if logprobs:
        try:
            bring(*config.families)
        except ConfigError as error:
            without = f"since their model's family is not known: {error}"
    saved = read_saved_weights(run_dir, every=not without)
    if learns_from_rows(config.algorithm):
        from sharpen.evidence.certificate.rows import recompute

        found = recompute(run_dir, config, saved, losses=not without)
    else:
        found = _recompute(run_dir, config, saved, without=without)
    found = replace(
        found,
        problems=(*found.problems, *saved.problems),
        not_recomputed=(*found.not_recomputed, *saved.not_compared),
    )
    return with_verdict(found, run_dir, config)


def _recorded_sources(path: Path) -> dict[str, dict[str, int | str]]:
    """Return the identities of the algorithm's parts that the run recorded, by setting."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {
        name.removeprefix("identity."): one["value"] for name, one in entries.items() if name.startswith("identity.")
    }


def with_verdict(certificate: Certificate, run_dir: Path, config: RunConfig) -> Certificate:
    """Return the certificate with what computing the verdict again found, and with what it does not cover because a
    part of the algorithm brings no second formula. `config` are the run's current settings."""
    missing = tuple(without_second(config).values())
    judged = judge_again(run_dir, Settings.of(run_dir, config).config, read_lineage(run_dir))
    return replace(
        certificate,
        verdict=judged.line,
        problems=(*certificate.problems, *judged.problems),
        not_recomputed=(*certificate.not_recomputed, *missing, *judged.not_recomputed),
    )


def _recompute(run_dir: Path, config: RunConfig, saved: SavedWeights, *, without: str) -> Certificate:
    """Recompute the certificate of a run with rollouts. `without` says why no model is loaded, if none is."""
    settings, lineage = Settings.of(run_dir, config), read_lineage(run_dir)
    recomputed = recompute_steps(run_dir, lineage, settings.rules, settings.replay_staleness)
    recorded = recorded_certificate(run_dir, lineage)
    problems, missing = recomputed.problems, [*recomputed.not_compared, *_not_recomputed(Rules.of(config))]
    gaps = _recomputed_gaps(run_dir, config, saved, lineage, settings, problems, missing) if not without else None
    if without:
        missing.append(f"the logprobs, {without}; the certificate keeps the run's own comparison")
    by_step = dict(recomputed.checks)
    for step, checks in read_checks(run_dir / "run.db").items():
        if step in by_step:
            by_step[step] += tuple(check for check in checks if check.name in MEANING_OF_ROWS)
    return replace(
        recorded,
        checks=add_up(by_step.values()),
        logprob_gaps=gaps,
        draws=recomputed.draws,
        problems=tuple(dict.fromkeys((*recorded.problems, *problems_of(by_step), *problems))),
        not_recomputed=tuple(missing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that each step was trained with: the current ones, and earlier ones by the last step they applied
    to."""

    now: RunConfig
    earlier: dict[int, RunConfig] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: Path, now: RunConfig) -> Settings:
        """Read the current settings and those that the run kept each time it resumed with different ones."""
        names = {path: re.fullmatch(r"resolved\.until_step_(\d+)\.json", path.name) for path in run_dir.iterdir()}
        earlier = {int(match.group(1)): read_resolved(path) for path, match in names.items() if match is not None}
        return cls(now=now, earlier=dict(sorted(earlier.items())))

    def config(self, step: int) -> RunConfig:
        """Return the settings of a step."""
        return next((config for until, config in self.earlier.items() if step <= until), self.now)

    def rules(self, step: int) -> Rules:
        """Return the rules that the settings of a step define."""
        return Rules.of(self.config(step))

    def replay_staleness(self, step: int) -> int:
        """Return how many policy versions a replayed group may be behind in a step."""
        config = self.config(step)
        updates = config.trainer.num_minibatches * config.trainer.epochs
        schedule = Schedule.of(config.sync, mode=config.mode, updates=updates)
        return config.sampling.max_staleness or 4 * updates + schedule.max_staleness


def _not_recomputed(rules: Rules) -> tuple[str, ...]:
    """Describe what the records do not determine: advantages that the trainer makes with a critic or the reference
    model, and rows of an expert's dataset."""
    exceptions = []
    if rules.formula.entropy_clip:
        exceptions.append(
            "which tokens lost their advantage to the entropy clip, which needs the weights of every step; the "
            "advantages before the clip were recomputed"
        )
    if rules.formula.token_baseline:
        exceptions.append(
            "the baselines of single tokens, which need the weights of every step; the rewards less their group's "
            "mean, from which they are subtracted, were recomputed"
        )
    if rules.expert:
        exceptions.append(
            "the checks rows, mask and rendered of the expert's rows, kept as the run recorded them (the expert's "
            "dataset is not part of the records), and the weights of the expert's tokens"
        )
    if rules.formula.critic:
        exceptions.append(
            "the advantages of single tokens, which need the critic's weights at every step; the calls' rewards behind "
            "them were recomputed"
        )
    if rules.teacher:
        exceptions.append(
            "the teacher's logprobs, and advantages or losses computed from them, which need its weights (of a teacher "
            "behind an endpoint, the scores on record were compared with those that trained); the advantages before "
            "the teacher's part were recomputed"
        )
    if rules.kl_in_reward:
        exceptions.append(
            "the KL penalty of single tokens, which needs the reference model; the advantages before it were recomputed"
        )
    return tuple(exceptions)


def read_resolved(path: Path) -> RunConfig:
    """Read the configuration that a run wrote into `resolved.json`. Raises `ConfigError` if it is damaged, or if this
    version of Sharpen no longer has one of its settings."""
    tree: dict[str, Any] = {}
    try:
        for key, value in recorded_settings(json.loads(path.read_text(encoding="utf-8"))).items():
            section = tree
            *sections, name = key.split(".")
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise InvalidConfigError.of(f"{path} is from another version of Sharpen", explain(RunConfig, error)) from None


def _recomputed_gaps(
    run_dir: Path,
    config: RunConfig,
    saved: SavedWeights,
    lineage: Lineage,
    settings: Settings,
    problems: list[str],
    missing: list[str],
) -> LogprobGaps | None:
    """Score the recorded tokens again with each checkpoint whose version sampled some of them, and with the model
    before training.

    Adds a sentence to `problems` for each version outside the tolerance, and to `missing` for tokens without a
    checkpoint.
    """
    import torch

    from sharpen.engine.token_masks import TokenMasks
    from sharpen.errors import ParityError
    from sharpen.learning.trainer import checkpoint
    from sharpen.learning.trainer.lora import load_trained
    from sharpen.learning.trainer.packing import pack
    from sharpen.learning.trainer.parity import LogprobGap, Tolerance
    from sharpen.models.files import model_folder, quiet_transformers

    quiet_transformers()
    folders: dict[int, Path | None] = {0: None}
    folders |= {int(checkpoint.load(one).state["version"]): one for one in saved.folders.values()}
    model_dir = model_folder(config.model.model_path)
    calls = _allowed(_scored_calls(run_dir, lineage, settings), model_dir, problems)
    sampled, num_trained = _by_version(calls, {version: [] for version in folders}, missing)
    model = load_trained(model_dir, config.trainer, torch.device(_device(config)))
    masks = TokenMasks.of_folder(model_dir)
    rounding = (read_parity(run_dir / "run.db") or {}).get("rounding")
    tolerance = Tolerance.of(model.compute_dtype, rounding=rounding)
    total: list[LogprobGap] = []
    for version, source in sorted(folders.items()):
        if source is not None and sampled[version]:
            checkpoint.restore_policy(model, checkpoint.load(source), source)
        gap = LogprobGap(version)
        if model.routing is not None and (wrong := wrong_experts(sampled[version], model.routing.shape)):
            problems.append(wrong)
            continue
        with torch.no_grad():
            for part in pack(sampled[version], config.trainer.max_tokens_per_micro_batch, masks=masks):
                gap.add(part, model.score(part).logprobs_E)
        try:
            gap.check(tolerance)
        except ParityError as error:
            problems.append(str(error))
        total.append(gap)
    if num_trained and not any(gap.num_tokens for gap in total):
        problems.append(f"no logprob of the {num_trained} trained tokens could be compared")
    return _total_gaps(total)


def _allowed(
    calls: Iterable[tuple[int, Rollout, Call]], model_dir: Path, problems: list[str]
) -> Iterator[tuple[int, Rollout, Call]]:
    """Yield the calls whose tokens their constraints allow; add a sentence to `problems` for each of the others."""
    check = constraint_check(model_dir)
    for step, rollout, call in calls:
        problem = check(rollout, call)
        if problem is None:
            yield step, rollout, call
        else:
            problems.append(problem)


def _by_version(
    calls: Iterable[tuple[int, Rollout, Call]], sampled: dict[int, list[Experience]], missing: list[str]
) -> tuple[dict[int, list[Experience]], int]:
    """Group the calls, as sequences, under each version in `sampled` that sampled some of their tokens. Also return the
    number of all trained tokens, without those of truncated distributions of unknown support."""
    truncated = 0
    uncompared: Counter[int] = Counter()
    steps: set[int] = set()
    num_trained = 0
    for step, rollout, call in calls:
        if not call.has_ratio:
            truncated += len(call.sampled_ids_S)
            continue
        versions, counts = np.unique(call.versions_S, return_counts=True)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True):
            num_trained += count
            if version in sampled:
                sampled[version].append(_sequence(rollout, call))
            else:
                uncompared[version] += count
                steps.add(step)
    if truncated:
        missing.append(
            f"the logprobs of {truncated} tokens sampled with top_p, top_k or min_p: from which tokens is not recorded"
        )
    if uncompared:
        missing.append(
            f"the logprobs of {sum(uncompared.values())} of {num_trained} trained tokens, in steps "
            f"{in_words(sorted(steps))}: the weights that sampled them (versions {in_words(sorted(uncompared))}) have "
            "no checkpoint any more; only the run's own comparison covers them"
        )
    return sampled, num_trained


def _total_gaps(gaps: list[LogprobGap]) -> LogprobGaps | None:
    """Average the gaps of all versions, weighted by their tokens; None if no token was compared."""
    compared = [gap for gap in gaps if gap.num_tokens]
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


def _scored_calls(run_dir: Path, lineage: Lineage, settings: Settings) -> Iterator[tuple[int, Rollout, Call]]:
    """Yield the calls that carry loss in the steps behind the weights, including those of groups that were left out,
    and those that another policy than the trained one sampled."""
    for step, keys in lineage.groups.items():
        rules = settings.rules(step)
        for key in keys:
            (group,) = read_groups_at(run_dir / "run.db", [key])
            for rollout in group.rollouts:
                for call in rollout.calls if is_eligible(rollout, rules) else ():
                    frozen = call.agent in rules.frozen and call.sampling.temperature > 0
                    if carries_loss(call) or (frozen and len(call.sampled_ids_S)):
                        yield step, rollout, call


def _sequence(rollout: Rollout, call: Call) -> Experience:
    """Turn a call into a sequence of its own, to be scored. Shared prefixes of calls are computed once
    (`trainer.packing`)."""
    start, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
    length = start + count

    def after_prompt(values_S: Any, fill: float, dtype: Any) -> Any:
        values_T = np.full(length, fill, dtype)
        values_T[start:] = values_S
        return values_T

    return Experience(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        ids_T=np.concatenate([call.prompt_ids_P, call.sampled_ids_S]),
        loss_mask_T=after_prompt(True, False, np.bool_),
        logprobs_T=after_prompt(call.logprobs_S, 0.0, np.float32),
        versions_T=after_prompt(call.versions_S, -1, np.int32),
        calls_T=after_prompt(call.index, -1, np.int32),
        temperatures_T=after_prompt(call.sampling.temperature, 1.0, np.float32),
        advantages_T=np.zeros(length, np.float32),
        weights_T=np.zeros(length, np.float32),
        supports={} if call.supports is None else {call.index: call.supports},
        constraints={} if call.constraint is None else {call.index: call.constraint},
        routes_NLK=call.routes_NLK,
        pictures=call.pictures,
    )


def _device(config: RunConfig) -> str:
    import torch

    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if torch.cuda.is_available() else "cpu"
