"""The two functions of verl that Trinity-RFT's examples import beside its own: Trinity-RFT needs verl, and we do not.

In: answers and truths; a function and its time limit. Out: whether they are equal; the function, limited.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from sharpen.compat.trinity.equality import bare, equal, number_in

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
