"""The last check of `sharpen doctor`: one step of a real run, with a tiny model and everything that a run has. Before
it, the model's gradients are compared with a plain loop's.

In: a folder for the model and the run. Out: `StepResult`. In a process of its own (`python -m sharpen.cli.doctor.step
DIR`, which prints the result as the last line), so that a library that crashes is a finding and not the command's end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.doctor.checks import Finding, run_alone
from sharpen.cli.doctor.gradients import probe_model
from sharpen.cli.starter.tasks import rows
from sharpen.cli.starter.tiny_model import make_tiny_model

TIME_LIMIT_S = 300.0
_PROGRAM = (sys.executable, "-m", "sharpen.cli.doctor.step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the step did. `changed` says whether the weights are others than before."""

    device: str
    rollouts: int
    changed: bool
    certified: bool
    seconds: float


def step_check(folder: Path, timeout_s: float = TIME_LIMIT_S, program: Sequence[str] = _PROGRAM) -> Finding:
    """Train a step in a process of its own."""
    answer = run_alone([*program, str(folder)], "training", "a step of a tiny model", timeout_s)
    return answer if isinstance(answer, Finding) else finding_of(StepResult(**answer))


def finding_of(result: StepResult) -> Finding:
    """Return what the result of a step means."""
    if not result.changed or not result.certified:
        what = (
            "the step left the weights as they were" if not result.changed else "the step's certificate does not hold"
        )
        todo = "this is a fault of Sharpen or of a library here: report it with the versions above"
        return Finding(name="training", state="problem", what=f"{what} ({result.device})", todo=todo)
    what = (
        f"a step of a tiny model trained on {result.device}: gradients those of a plain loop, {result.rollouts} "
        f"rollouts, certified, {result.seconds:.1f} s"
    )
    return Finding(name="training", state="ok", what=what)


async def _agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Ask the task's question; a longer answer is better, so that rewards differ with random weights."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=float(len(reply.choices[0].message.content or "")))


def train_step(folder: Path) -> StepResult:
    """Train one step with random weights. Raises `GradientError` if their gradients are wrong."""
    model = make_tiny_model(folder / "model", steps=0)
    probe_model(str(model)).check()
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows()["train"][:8]), encoding="utf-8")
    result = tune(
        workflow_func=_agent,
        train_dataset=DatasetConfig(path=str(tasks), total_steps=1),
        model=TunerModelConfig(model_path=str(model), max_model_len=64),
        algorithm=AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(folder / "runs"),
            "check.enabled": False,
            "evaluation.max_tasks": 1,
        },
    )
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    certificate = json.loads((result.run_dir / "certificate.json").read_text(encoding="utf-8"))
    return StepResult(
        device=_device(),
        rollouts=8,
        changed=_digest(result.model_dir) != _digest(model),
        certified=bool(certificate["holds"]),
        seconds=next(row["time/step_s"] for row in metrics if "time/step_s" in row),
    )


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "the processor"


def _digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Train the step; the run's own output goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        result = train_step(Path(sys.argv[1]))
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
