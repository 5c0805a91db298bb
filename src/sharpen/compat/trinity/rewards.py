"""Trinity's reward functions: called with `response` and `truth`, they give scores by name, whose sum is the reward.

In: the model's answer and the row's truth. Out: e.g. `{"accuracy": 1.0, "format_score": 0.0}`. Mathematical equality is
that of `equality` (the extra `math`).
"""

from __future__ import annotations

import ast
import json
import operator
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from fractions import Fraction
from typing import Any

from sharpen.compat.trinity.equality import equal, require_math_verify, says
from sharpen.errors import ConfigError

BOXES = ("\\boxed", "\\fbox")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMAT_SCORE = 0.1


class RewardFn(ABC):
    """A reward function: made once for each rollout, with `reward_fn_args`."""

    @abstractmethod
    def __call__(self, **arguments: Any) -> dict[str, float]:
        """The scores of one answer, by name."""


class MathBoxedRewardFn(RewardFn):
    """Scores the last `\\boxed{}` of the answer.

    `accuracy` is 1 if it equals the truth, else 0 (also without a box). The truth may be a number, an expression, a
    solution with a box of its own, or one that ends in `#### 42`, as GSM8K's do. `format_score` is
    `-format_score_coef` if `with_think` asks for one pair of `<think>` tags and the answer has not got it, else 0.

    Raises `ConfigError` without math-verify, `ValueError` if the truth is None.
    """

    def __init__(self) -> None:
        require_math_verify()

    def __call__(
        self,
        response: str | None = None,
        truth: Any = None,
        prompt: str | None = None,
        with_think: bool = False,
        format_score_coef: float = FORMAT_SCORE,
        **_: Any,
    ) -> dict[str, float]:
        """The scores; an empty answer (None) is a wrong one."""
        response = response or ""
        written = last_boxed(response)
        right = written is not None and says(written, truth_in(truth))
        thinks = not with_think or thinks_once(response)
        return {"accuracy": float(right), "format_score": 0.0 if thinks else -format_score_coef}


class AccuracyReward(RewardFn):
    """`accuracy` is 1 if the answer equals the truth, else 0.

    The answer is what `answer_parser` takes out of the response (and of the truth), else the last `\\boxed{}`.
    """

    def __init__(
        self, answer_parser: Callable[[str], str] | None = None, same: Callable[[str, str], bool] = equal
    ) -> None:
        """`same(answer, truth)` compares them."""
        require_math_verify()
        self.answer_parser, self.same = answer_parser, same

    def __call__(
        self, response: str | None = None, prompt: str | None = None, truth: Any = None, **_: Any
    ) -> dict[str, float]:
        """The score; an empty answer (None) is a wrong one."""
        expected = truth_in(truth)
        if self.answer_parser is None:
            written = last_boxed(response or "")
        else:
            written, expected = self.answer_parser(response or ""), self.answer_parser(expected)
        return {"accuracy": float(written is not None and self.same(written, expected))}


class FormatReward(RewardFn):
    """`format_score` is 0.1 if the answer matches the pattern from its beginning, else -0.1.

    By default: thinking in `<think>` tags, then the answer in `<answer>` tags, each tag on a line of its own.
    """

    LINES = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"

    def __init__(self, pattern: str | None = None) -> None:
        self.pattern = re.compile(pattern or self.LINES, re.DOTALL | re.MULTILINE)

    def __call__(self, response: str | None = None, **_: Any) -> dict[str, float]:
        """The score."""
        return {"format_score": FORMAT_SCORE if self.pattern.match(response or "") else -FORMAT_SCORE}


class MathRewardFn(RewardFn):
    """`accuracy` of what is in the `<answer>` tags, and `format_score` of the tags.

    The answer may be a sentence (`72 clips`, `**72**`, `Total: 72`): what math-verify reads in it counts.
    """

    TAGS = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"

    def __init__(self, answer_parser: Callable[[str], str] | None = None, pattern: str = TAGS) -> None:
        self.accuracy_reward = AccuracyReward(answer_parser or answer_in_tags, equal if answer_parser else says)
        self.format_reward = FormatReward(pattern)

    def __call__(
        self, response: str | None = None, prompt: str | None = None, truth: Any = None, **_: Any
    ) -> dict[str, float]:
        """Both scores."""
        accuracy = self.accuracy_reward(response=response, truth=truth)
        return {**accuracy, **self.format_reward(response=response)}


class CountDownRewardFn(RewardFn):
    """Numbers to a target: the equation in the last `<answer>` of the last line uses each number once.

    The truth is `{"target": .., "numbers": [..]}`, or that as JSON. `score` is 1 for the target, 0.1 for an equation
    that misses it or uses other numbers, 0 without one.
    """

    def __call__(
        self, response: str | None = None, prompt: str | None = None, truth: Any = None, **_: Any
    ) -> dict[str, float]:
        """The score."""
        wanted: Mapping[str, Any] = json.loads(truth) if isinstance(truth, str) else truth
        equations = ANSWER.findall((response or "").split("\n")[-1])
        if not equations:
            return {"score": 0.0}
        used = Counter(map(int, re.findall(r"\d+", equations[-1])))
        right = used == Counter(wanted["numbers"]) and _value(equations[-1]) == Fraction(str(wanted["target"]))
        return {"score": 1.0 if right else FORMAT_SCORE}


def total(scores: Any) -> Any:
    """The reward that scores make: their sum, or the number itself where a function gives one."""
    return sum(scores.values()) if isinstance(scores, Mapping) else scores


def truth_in(truth: Any) -> str:
    """The answer in a row's truth: what follows its last `####`, else its last box, else all of it."""
    if truth is None:
        raise ValueError("the task has no truth: task_args.response_key must name the field that holds it")
    text = str(truth)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def answer_in_tags(text: str) -> str:
    """What the first `<answer>` tags hold, or its box; without tags what `truth_in` finds."""
    match = ANSWER.search(text)
    return truth_in(match.group(1) if match else text)


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{}` (or `\\fbox{}`) holds, braces within it included; None without one that is closed."""
    at, box = max((text.rfind(box), box) for box in BOXES)
    if at < 0:
        return None
    rest = text[at + len(box) :].lstrip()
    if not rest.startswith("{"):
        match = re.match(r"[^\s$]+", rest) if text[at + len(box) : at + len(box) + 1].isspace() else None
        return match.group() if match else None
    depth = 0
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[1 : match.start()].strip()
    return None


def thinks_once(text: str) -> bool:
    """Whether a text has one pair of `<think>` tags, in order."""
    return text.count("<think>") == 1 == text.count("</think>") and text.find("<think>") < text.find("</think>")


_OPERATORS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(equation: str) -> Fraction | None:
    """The exact value of an expression of integers, the four operations and brackets; None if it is anything else."""
    try:
        return _evaluate(ast.parse(equation.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError("not arithmetic")


def check_reward_function(found: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The class that was named as reward function. Raises `ConfigError` for what is no class."""
    if not isinstance(found, type) or not hasattr(found, "__call__"):  # noqa: B004 - of its objects, not of the class
        text = "is not a class whose objects are called with response and truth"
        raise ConfigError(f"task_args.reward_fn {name!r} {text}")
    return found


# DAPO's reward for mathematics: right or wrong as 1 and -1, and a penalty for answers that come near the token limit.
#
# In: the answer's text and its tokens, the truth. Out: `{"accuracy": .., "format_score": ..}`. Source: DAPO,
# https://arxiv.org/abs/2503.14476, sections 2.3 and 2.4.

NOT_PASSED: Sized = ()
"""The default of `response_token`: the workflow passes none. Known by identity."""


class MathDAPORewardFn(RewardFn):
    """`accuracy` is 1 if what follows the thinking (its last box, else all of it) equals the truth, else -1.

    With `enable_overlong_penalty`, `format_score` is 0 up to `max_response_length - cache_length` tokens, falls to
    `-penalty_factor` at `max_response_length`, and stays there; else it is 0. Raises `ConfigError` for a penalty whose
    numbers are missing, and without math-verify.
    """

    def __init__(
        self,
        enable_overlong_penalty: bool | None = None,
        penalty_factor: float | None = None,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        require_math_verify()
        self.penalty: tuple[float, int, int] | None = None
        if not enable_overlong_penalty:
            return
        if penalty_factor is None or max_response_length is None or cache_length is None:
            raise ConfigError(
                "math_dapo_reward with enable_overlong_penalty needs reward_fn_args.penalty_factor, "
                "max_response_length and cache_length"
            )
        if max_response_length <= cache_length:
            raise ConfigError(
                f"math_dapo_reward: reward_fn_args.max_response_length is {max_response_length}, which must be greater "
                f"than cache_length ({cache_length})"
            )
        self.penalty = (penalty_factor, max_response_length, cache_length)

    def __call__(
        self, response: str | None = None, truth: Any = None, response_token: Sized | None = NOT_PASSED, **_: Any
    ) -> dict[str, float]:
        """The scores. `response_token` are the answer's tokens; None where nobody counted them (an endpoint): no
        penalty."""
        after = (response or "").rpartition("</think>")[2]
        boxed, expected = last_boxed(after), truth_in(truth)
        right = equal(after, expected) if not boxed else says(boxed, expected)
        return {"accuracy": 1.0 if right else -1.0, "format_score": self._overlong(response_token)}

    def _overlong(self, response_token: Sized | None) -> float:
        if self.penalty is None or response_token is None:
            return 0.0
        if response_token is NOT_PASSED:
            raise ConfigError(
                "math_dapo_reward's overlong penalty counts tokens, which this workflow does not pass: use "
                "math_boxed_workflow (or async_math_boxed_workflow)"
            )
        factor, longest, cache = self.penalty
        over = len(response_token) - (longest - cache)
        if over <= 0:
            return 0.0
        return -factor * min(over / cache, 1.0) if cache else -factor
