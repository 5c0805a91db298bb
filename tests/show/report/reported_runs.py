"""Run directories with evaluations, written by the journal's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.learning.experience.journal import Journal
from sharpen.types import Call, CallStatus, Group, Outcome, Picture, PictureSpan, Rollout, Sampling, Task


def answered(group_id: str, task: Task, text: str, reward: float | None, pictures: Sequence[Picture] = ()) -> Group:
    """A group of one rollout that was shown `pictures` and said `text`."""
    content: Any = task.row["question"]
    if pictures:
        shown = [{"type": "image_url", "image_url": {"url": f"sha256:{one.sha256}"}} for one in pictures]
        content = [*shown, {"type": "text", "text": content}]
    call = Call(
        index=0,
        parent=None,
        prompt_ids_P=np.array([1, 2], dtype=np.int32),
        sampled_ids_S=np.array([3], dtype=np.int32),
        logprobs_S=np.array([-1.0], dtype=np.float32),
        versions_S=np.array([0], dtype=np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": content}),
        tools=(),
        response={"role": "assistant", "content": text},
        pictures=tuple(PictureSpan(picture=one, start=at, length=1) for at, one in enumerate(pictures)),
    )
    rollout = Rollout(
        id=f"{group_id}/0",
        group_id=group_id,
        task_id=task.id,
        index=0,
        attempt=0,
        calls=(call,),
        outcome=Outcome.OK if reward is not None else Outcome.JUDGE_ERROR,
        reward=reward,
    )
    return Group(id=group_id, task=task, version=0, rollouts=(rollout,))


def make_run(
    folder: Path,
    answers: Mapping[str, tuple[tuple[str, float | None], tuple[str, float | None]]],
    *,
    pictures: Sequence[Picture] = (),
    **files: Any,
) -> Path:
    """Write a run whose held-out tasks, with `pictures`, were answered so before and after, in sampled mode; `files`
    replace the content of `summary`, `certificate`, `resolved`."""
    run = folder / "Project" / "run"
    run.mkdir(parents=True)
    journal = Journal(run / "evaluations.db")
    for place, moment in enumerate(("before", "after")):
        for index, (name, both) in enumerate(answers.items()):
            task = Task(id=name, index=index, row={"question": f"question of {name}", "answer": "42"})
            journal.add(answered(f"{moment}/held-out/sampled/{name}", task, *both[place], pictures))
    journal.close()
    rows = [{"step": step, "time": 1000.0 + step, "reward/mean": step / 4} for step in (1, 2, 3)]
    rows += [{"step": 0, "eval/sampled/accuracy": 0.2, "eval/sampled/low": 0.1, "eval/sampled/high": 0.4}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    verdict = {
        "kind": "better",
        "model": str(run / "global_step_3"),
        "original": False,
        "text": "better by +0.5 (sampled accuracy)",
        "measure": "sampled accuracy",
        "difference": 0.5,
        "low": 0.1,
        "high": 0.9,
        "num_tasks": len(answers),
        "remarks": ["3 tasks before and 0 after ran out of time"],
    }
    summary = {"verdict": verdict, "steps": 3, "seconds": 90.0, "sampled_tokens": 1234, "peak_memory_mb": 2048.0}
    certificate = {"holds": True, "checks": [{"name": "ids", "checked": 7, "broken": 0, "first": None}]}
    certificate["outcomes"] = {"ok": 9, "timeout": 1}
    resolved = {
        "model.model_path": {"value": "org/base", "origin": "file"},
        "algorithm.algorithm_type": {"value": "grpo", "origin": "file"},
        "seed": {"value": 0, "origin": "default"},
    }
    for name, content in {"summary": summary, "certificate": certificate, "resolved": resolved, **files}.items():
        (run / f"{name}.json").write_text(json.dumps(content))
    return run
