"""Searches with GEPA: the proposing model reads answers, rewards and the judge's notes under one prompt and writes a
better prompt; improved prompts are developed further. Import this module only where GEPA is installed.

In: `PromptAttempts`, and the tasks to reflect on. Out: nothing; the attempts keep the results.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch

from sharpen.beyond.prompt_tune.comparison import PromptAttempts, text_of_answer, text_of_task
from sharpen.beyond.trials.ranking import Result
from sharpen.types import Task

log = logging.getLogger("sharpen.prompts")

PART = "system_prompt"
"""GEPA's name for the text that is tuned."""
MAX_FAILURES = 3
"""Consecutive failures of the proposing model that end the search."""
NUM_REFLECTED = 3
"""Tasks of one reflection."""


class Adapter:
    """The agent as GEPA sees it; implements `gepa.GEPAAdapter`."""

    propose_new_texts = None

    def __init__(self, attempts: PromptAttempts) -> None:
        self._attempts = attempts

    def evaluate(self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """Run a prompt on tasks."""
        results = self._attempts.results(candidate[PART], batch)
        return EvaluationBatch(
            outputs=[text_of_answer(result) for result in results],
            scores=[self._attempts.score(result) for result in results],
            trajectories=results if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return what the proposing model reads."""
        return {
            PART: [
                {
                    "Inputs": text_of_task(result.task),
                    "Generated Outputs": text_of_answer(result),
                    "Feedback": feedback(result),
                }
                for result in eval_batch.trajectories
            ]
        }


class Log:
    """Sends GEPA's log lines to our logger."""

    def log(self, message: str) -> None:
        """Log one line."""
        log.info("%s", message)


def feedback(result: Result) -> str:
    """Return the reward and the judge's metrics (including text) of a result, or why it failed."""
    if result.reward is None:
        return f"No result: {result.error}"
    judged = {} if result.trial is None else result.trial.judged
    return ". ".join([f"Reward: {result.reward:g}", *(f"{name}: {value}" for name, value in judged.items())])


class Asker:
    """Asks the proposing model, and stops the search after repeated failures, which GEPA itself would only log."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._failures: list[Exception] = []

    def __call__(self, prompt: Any) -> str:
        try:
            answer = self._lm(prompt)[0] if isinstance(prompt, str) else self._lm(messages=prompt)[0]
        except Exception as error:  # counted here, handled by GEPA
            self._failures.append(error)
            raise
        self._failures.clear()
        return str(answer["text"] if isinstance(answer, Mapping) else answer)

    @property
    def error(self) -> Exception | None:
        """The first of `MAX_FAILURES` consecutive failures, if there were as many."""
        return self._failures[0] if len(self._failures) >= MAX_FAILURES else None

    def has_failed(self, state: Any) -> bool:
        """Return whether to stop; a stop condition of GEPA."""
        return self.error is not None


def search(
    attempts: PromptAttempts,
    training: Sequence[Task],
    lm: Any,
    *,
    num_candidates: int,
    binary: bool,
    progress: bool,
    seed: int,
) -> None:
    """Propose prompts and try them, with the number of rollouts that accepting `num_candidates` takes. `binary` says
    that rewards are 0 or 1, so that 1 is perfect. Raises the errors of the proposing model."""
    asker = Asker(lm)
    gepa.optimize(
        seed_candidate={PART: attempts.initial},
        trainset=list(training),
        valset=list(attempts.validation),
        adapter=Adapter(attempts),
        reflection_lm=asker,
        reflection_minibatch_size=min(NUM_REFLECTED, len(training)),
        skip_perfect_score=binary,
        max_metric_calls=(num_candidates + 1) * len(attempts.validation) + 2 * NUM_REFLECTED * num_candidates,
        stop_callbacks=[asker.has_failed],
        logger=Log(),
        display_progress_bar=progress,
        seed=seed,
    )
    if asker.error is not None:
        raise asker.error
