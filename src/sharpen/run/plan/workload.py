"""The token counts of a step: assumed from the limits in the settings, given by the user, or taken from an earlier run.

In: a run's configuration, given lengths, the directory of an earlier run. Out: a `Workload`, which says where its
numbers come from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.supervised import learns_from_rows

AT_LIMITS = "every sequence as long as the settings allow"
"""Where the numbers come from, if nobody has given lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The tokens of one step. `prompt_tokens` and `answer_tokens` are those of one of its `sequences`;
    `computed_tokens` pass through the trainer once in a step (a shared prompt counts once), and `loss_tokens` of them
    carry loss. `longest` is the length of the longest sequence. `generates`: the run samples its answers. `evaluated`:
    the tasks of an evaluation; None if nobody has counted them."""

    sequences: int
    prompt_tokens: float
    answer_tokens: float
    computed_tokens: float
    loss_tokens: float
    longest: int
    generates: bool
    source: str
    evaluated: int | None = None


def expected(config: RunConfig, prompt_tokens: int | None = None, answer_tokens: int | None = None) -> Workload:
    """Return the workload for given mean lengths, else for the limits in the settings (every sequence at its maximum).
    Raises `ConfigError` for lengths that do not fit `model.max_model_len`."""
    limit = config.model.max_model_len
    for name, value in (("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if value is not None and not 1 <= value < limit:
            raise ConfigError(f"{name} must be from 1 to model.max_model_len ({limit}) - 1, got {value}")
    if prompt_tokens is not None and answer_tokens is not None and prompt_tokens + answer_tokens > limit:
        raise ConfigError(
            f"--prompt-tokens {prompt_tokens} and --answer-tokens {answer_tokens} together exceed model.max_model_len "
            f"({limit})"
        )
    answer = answer_tokens if answer_tokens is not None else min(config.model.max_tokens, limit - (prompt_tokens or 1))
    prompt = prompt_tokens if prompt_tokens is not None else limit - answer
    group = _group(config)
    lengths = [
        f"{what} {value}" for what, value in (("prompt", prompt_tokens), ("answer", answer_tokens)) if value is not None
    ]
    source = f"lengths given: {', '.join(lengths)} tokens" if lengths else AT_LIMITS
    return Workload(
        sequences=config.algorithm.batch_size * group,
        prompt_tokens=prompt,
        answer_tokens=answer,
        computed_tokens=config.algorithm.batch_size * (prompt + group * answer),
        loss_tokens=config.algorithm.batch_size * group * answer,
        longest=round(prompt + answer),
        generates=not learns_from_rows(config.algorithm),
        source=source,
    )


def of_run(config: RunConfig, run_dir: Path) -> Workload | None:
    """Return the workload of a run from its `metrics.jsonl`: mean lengths, and the tokens of its largest step, which
    needs most memory. None if no step was trained."""
    supervised = learns_from_rows(config.algorithm)
    answers = "trainer/trained_tokens" if supervised else "tokens/sampled"
    needed = {answers, "trainer/computed_tokens", "trainer/trained_tokens", "trainer/sequence_tokens"}
    rows = [row for row in metrics_of(run_dir) if needed <= row.keys() and row["trainer/computed_tokens"]]
    if not rows:
        return None
    sequences = config.algorithm.batch_size * _group(config)
    answer = mean(row[answers] for row in rows) / sequences
    prompt = max(1.0, mean(row["trainer/sequence_tokens"] for row in rows) / sequences - answer)
    largest = max(rows, key=lambda row: float(row["trainer/computed_tokens"]))
    return Workload(
        sequences=sequences,
        prompt_tokens=prompt,
        answer_tokens=answer,
        computed_tokens=largest["trainer/computed_tokens"],
        loss_tokens=largest["trainer/trained_tokens"],
        longest=round(prompt + answer),
        generates=not supervised,
        source=f"mean lengths of {len(rows)} steps of {run_dir.name}, and its largest step",
    )


def _group(config: RunConfig) -> int:
    """Return the number of sequences made from one task or row."""
    if not learns_from_rows(config.algorithm):
        return config.algorithm.group_size
    return 2 if config.algorithm.algorithm_type == "dpo" else 1


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`, none if there is no such file. A line cut off by a crash is
    skipped."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
