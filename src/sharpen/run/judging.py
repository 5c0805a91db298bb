"""The judge of a run against its owner's marks, before anything is trained.

In: a configuration, the judge, marks. Out: how far they agree; `JudgeError` below the floor of `judge_floor`. The
auxiliary models that the judge asks are opened for this alone, and closed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.agent.rollout.signature import judge_arguments, name_of
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, JudgeError
from sharpen.evidence.judges.agreement import Agreement, agreement_of, below
from sharpen.evidence.judges.asking import Judged, ask_judge
from sharpen.evidence.judges.marks import Mark, read_marks
from sharpen.placement.auxiliary.models import AuxiliaryModels, loading
from sharpen.placement.serving import ServingThread
from sharpen.placement.sessions import opened

Judge = Callable[..., Any]


def ask_with_models(config: RunConfig, judge: Judge, marks: Sequence[Mark], *, times: int = 1) -> list[Judged]:
    """Ask a judge for marked answers, with the auxiliary models of a run if it takes them."""
    if "auxiliary_models" not in judge_arguments(judge):
        return ask_judge(judge, marks, times=times)
    with _auxiliary_models(config) as models:
        return ask_judge(judge, marks, times=times, auxiliary_models=models)


def check_floor(config: RunConfig, judge: Judge | None, say: Callable[[str], None]) -> None:
    """Ask the judge for the marked answers of `judge_floor`, if there are any, and say how far it agrees. Raises
    `JudgeError` if that is less than the floor, `ConfigError` without a judge, `DatasetError` for a wrong file."""
    floor = config.judge_floor
    if floor is None or config.mode == "train":  # the judge is the explorer's
        return
    if judge is None:
        raise ConfigError(
            "judge_floor is set, but there is no judge: the workflow gives the rewards itself; give a judge_func "
            "(`judge` in a file), or remove judge_floor"
        )
    marks = read_marks(Path(floor.marks))
    found = agreement_of(ask_with_models(config, judge, marks), good_from=floor.good_from)
    say(_line(found))
    if (problem := below(found, floor.kappa)) is not None:
        raise JudgeError(
            f"the judge `{name_of(judge)}` {problem}: nothing was trained; look at what they disagree on "
            f"(sharpen judge check {floor.marks}), improve the judge, or lower judge_floor.kappa"
        )


def _line(found: Agreement) -> str:
    return f"judge: agrees with its owner on {found.agreement}, Cohen's kappa {found.kappa:.3f}"


@contextlib.contextmanager
def _auxiliary_models(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    """Open the auxiliary models of a run, as a judge receives them."""
    with contextlib.ExitStack() as stack:
        thread = ServingThread()
        stack.callback(thread.close)
        load = loading(config.engine, deterministic=config.deterministic)
        models = AuxiliaryModels(config.auxiliary_models, thread, load, listen=config.gateway)
        stack.callback(models.close)
        yield stack.enter_context(opened(models, "judge", config.seed))
