"""The gradients of a model on this machine, compared with a plain loop's, for `sharpen doctor`.

In: a model's folder or name. Out: a `GradientProbe` with the trainer that the default settings make on this machine:
its device, precision and kernels. In a process of its own (`python -m sharpen.cli.doctor.gradients MODEL`, which prints
the finding as the last line), so that a library that crashes is a finding and not the end of the command.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from sharpen.cli.doctor.checks import Finding, run_alone
from sharpen.config.load import resolve
from sharpen.evidence.certificate.gradient_probe import ADVICE, GradientProbe, probe_gradients
from sharpen.learning.recipe import recipe_of
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.models.files import model_folder

TIME_LIMIT_S = 1800.0
_PROGRAM = (sys.executable, "-m", "sharpen.cli.doctor.gradients")


def gradients_check(model: str, timeout_s: float = TIME_LIMIT_S, program: Sequence[str] = _PROGRAM) -> Finding:
    """Compare the gradients of a model in a process of its own."""
    answer = run_alone([*program, model], "gradients", f"comparing the gradients of {model}", timeout_s)
    return answer if isinstance(answer, Finding) else Finding(**answer)


def probe_model(model: str) -> GradientProbe:
    """Load the trainer of a model with default settings, and probe it. Raises `ModelError` for a model that cannot be
    trained."""
    settings = {"model.model_path": model, "model.max_model_len": 256, "train_dataset.path": "none"}
    config = resolve(settings=settings).config
    folder = model_folder(model)
    plan = TrainerPlan(
        model_path=folder,
        algorithm=recipe_of(config).algorithm,
        config=config.trainer,
        learning_rate=config.algorithm.learning_rate,
        planned_updates=1,
    )
    return probe_gradients(config, folder, Trainer.load(plan))


def finding_of(found: GradientProbe) -> Finding:
    """Return what the result of a probe means."""
    if found.problem:
        return Finding(name="gradients", state="problem", what=found.problem, todo=ADVICE)
    if found.not_probed:
        return Finding(
            name="gradients",
            state="warning",
            what=found.line,
            todo="a run trains without this comparison too; `sharpen check` compares with the run's own settings",
        )
    return Finding(name="gradients", state="ok", what=found.line)


def main() -> None:
    """Probe the model that the first argument names; what libraries say goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        finding = finding_of(probe_model(sys.argv[1]))
    print(json.dumps(asdict(finding)))


if __name__ == "__main__":
    main()
