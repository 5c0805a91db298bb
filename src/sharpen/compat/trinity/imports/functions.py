"""Small functions and constants that Trinity-RFT's examples import from it.

In: texts of answers, names. Out: what they hold, whether they are right, loggers.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from sharpen.compat.trinity.equality import bare, equal, number_in, says
from sharpen.compat.trinity.rewards import answer_in_tags, last_boxed, thinks_once, truth_in
from sharpen.compat.trinity.workflows.maths import answer_said

TASKSET_PATH_ENV_VAR = "TRINITY_TASKSET_PATH"
PLUGIN_DIRS_ENV_VAR = "TRINITY_PLUGIN_DIRS"

validate_think_pattern = thinks_once
find_boxed_answer = last_boxed
simple_answer_parser = answer_in_tags
extract_answer = answer_said

_FRACTION = re.compile(r"\\frac\s*([^{\s\\])\s*(?:([^{\s\\])|(?=\{))")


def get_logger(name: str | None = None, level: int | None = None, in_ray_actor: bool = False) -> logging.Logger:
    """The logger of workflows, or one below it. `level` is its own; `in_ray_actor` makes no difference here."""
    logger = logging.getLogger("sharpen.workflow" + (f".{name}" if name else ""))
    if level is not None:
        logger.setLevel(level)
    return logger


def remove_right_units(text: str) -> str:
    """An answer without the unit that `\\text{ ...}` puts behind it."""
    return text.partition("\\text{ ")[0]


def fix_fracs(text: str) -> str:
    """Fractions with the braces that were left out: `\\frac12` as `\\frac{1}{2}`, `\\frac1{72}` as `\\frac{1}{72}`."""
    return _FRACTION.sub(lambda match: f"\\frac{{{match[1]}}}" + (f"{{{match[2]}}}" if match[2] else ""), text)


def match_answer(response: str) -> tuple[bool, str]:
    """Whether what follows the thinking has a box, and its content (or all of it)."""
    after = response.rpartition("</think>")[2]
    boxed = last_boxed(after)
    return (True, boxed) if boxed else (False, after)


def grade_answer(given_answer: str | None, ground_truth: str) -> tuple[bool, str | None]:
    """Whether two answers say the same, and the given one."""
    return given_answer is not None and equal(given_answer, truth_in(ground_truth)), given_answer


def verify_math_answer(response_text: str, ground_truth: Any) -> tuple[float, dict[str, Any]]:
    """1.0 for a solution with the right answer, else 0.0, and what was compared."""
    answer, truth = answer_said(response_text), truth_in(ground_truth)
    right = answer is not None and says(answer, truth)
    return float(right), {"parsed_prediction": answer, "ground_truth": truth, "is_correct": right}


# The two functions of verl that Trinity-RFT's examples import beside its own: Trinity-RFT needs verl, and we do not.
#
# In: answers and truths; a function and its time limit. Out: whether they are equal; the function, limited.

R = TypeVar("R")


def math_equal(
    prediction: Any,
    reference: Any,
    include_percentage: bool = True,
    tolerance: float = 1e-4,
    timeout: float = 10.0,
    pi: float = math.pi,
) -> bool:
    """Whether two mathematical answers are equal.

    Numbers are within a relative `tolerance`, with `include_percentage` also if one is a hundred times the other; all
    else is compared as in our rewards (`equality`), for which `timeout` and `pi` mean nothing.
    """
    answer, truth = str(prediction), str(reference)
    numbers = number_in(bare(answer)), number_in(bare(truth))
    if numbers[0] is None or numbers[1] is None:
        return equal(answer, truth)
    factors = (Fraction(1, 100), 1, 100) if include_percentage else (1,)
    return any(math.isclose(numbers[0].value, numbers[1].value * factor, rel_tol=tolerance) for factor in factors)


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """A decorator: the call raises `TimeoutError` after so many seconds. `use_signals` means nothing.

    The function runs in a thread of its own, which goes on if it takes longer: it cannot be ended.
    """

    def limited(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> R:
            results: list[R] = []
            errors: list[BaseException] = []

            def target() -> None:
                try:
                    results.append(function(*arguments, **named))
                except BaseException as error:  # it is raised where the function was called
                    errors.append(error)

            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            thread.join(seconds)
            if errors:
                raise errors[0]
            if not results:
                raise TimeoutError(f"{function.__name__} took longer than {seconds} seconds")
            return results[0]

        return run

    return limited
