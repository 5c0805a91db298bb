"""Whether two mathematical expressions say the same: plain numbers exactly, everything else by the library math-verify.

In: an answer and the truth, as text or LaTeX. Out: a truth value. math-verify runs in a process of its own with a time
limit, since expressions that a model writes can keep it busy for ever (say 9^{9^{9^9}}).
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import logging
import re
import selectors
import subprocess
import sys
import threading
from dataclasses import dataclass
from fractions import Fraction

from sharpen.config.extras import install_command
from sharpen.errors import ConfigError

log = logging.getLogger("sharpen.rewards")

LIMIT_S = 3.0
"""Time for one comparison; then the expressions count as different."""
START_LIMIT_S = 120.0
"""Time for the process to load its libraries."""

_SPACES = re.compile(r"\\[,;: ]|\\(?:left|right)(?![A-Za-z])|~|\s+")
_DELIMITERS = re.compile(r"^(?:\$\$?(.*?)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\])$", re.DOTALL)
_UNIT = re.compile(r"(?:\\(?:text|mathrm|mbox|textrm)\{([^{}]*)\}(?:\^\{?\d\}?)?|(\\?%)|\^\{?(\\circ)\}?)$")
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(rf"([-+]?)(?:({_INTEGER})(\.\d*)?|(\.\d+))$")
_RATIO = re.compile(rf"([-+]?)(?:\\[dt]?frac\{{({_INTEGER})\}}\{{({_INTEGER})\}}|({_INTEGER})/({_INTEGER}))$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An exact number with its unit, as written (None without one)."""

    value: Fraction
    unit: str | None

    @property
    def percent(self) -> bool:
        """Whether it is a percentage."""
        return self.unit is not None and self.unit.endswith("%")


def equal(answer: str, truth: str) -> bool:
    """Whether they say the same.

    Two plain numbers (integers, decimals, fractions; with thousands separators, currency or a unit) are compared
    exactly, without math-verify: a unit on one side only does not count, different units do, and 50% is 50 as well as
    0.5. Raises `ConfigError` if math-verify is not installed.
    """
    require_math_verify()
    written, true = bare(answer), bare(truth)
    if not written or not true:
        return False
    if written == true:
        return True
    numbers = number_in(written), number_in(true)
    if numbers[0] is not None and numbers[1] is not None:
        return _same(numbers[0], numbers[1])
    return _verified(written, true)


def says(text: str, truth: str) -> bool:
    """Whether a text is equal to the truth, or is a sentence in which math-verify reads an answer that is (`72 clips`).

    Raises `ConfigError` if math-verify is not installed.
    """
    return equal(text, truth) or bool(text.strip() and bare(truth) and _verified(text, bare(truth), prose=True))


@functools.cache
def require_math_verify() -> None:
    """Raise `ConfigError` if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"mathematical rewards need the package math-verify: {install_command('math')}")


def bare(text: str) -> str:
    """An expression without math delimiters, currency, spacing commands and a final full stop."""
    text = text.strip()
    if match := _DELIMITERS.match(text):
        text = next(group for group in match.groups() if group is not None)
    text = text.replace("\\$", "").replace("$", "").replace("−", "-")
    text = text.replace("\\!", "").replace("{,}", ",")
    return _SPACES.sub(" ", text).strip().removesuffix(".").strip()


def number_in(text: str) -> Number | None:
    """The number that a bare expression is; None if it is anything else."""
    unit = None
    if match := _UNIT.search(text):
        unit = (match[0] if match[1] is None else f"{match[1].strip()}{match[0].rpartition('}')[2]}").strip()
        text = text[: match.start()]
    text = text.replace(" ", "") if re.fullmatch(r"[-+]?\s*\S+\s*", text) else text
    if match := _NUMBER.match(text):
        digits = (match[2] or "").replace(",", "") + (match[3] or match[4] or "")
        return Number(value=Fraction(match[1] + digits.rstrip(".")), unit=unit)
    if match := _RATIO.match(text):
        above, below = (int((match[i] or match[i + 2]).replace(",", "")) for i in (2, 3))
        if below:
            return Number(value=Fraction(above, below) * (-1 if match[1] == "-" else 1), unit=unit)
    return None


def _same(left: Number, right: Number) -> bool:
    if left.unit is not None and right.unit is not None and left.unit.lstrip("\\") != right.unit.lstrip("\\"):
        return False
    if left.percent != right.percent and left.value in (right.value * 100, right.value / 100):
        return (left.value > right.value) == left.percent or left.value == 0
    return left.value == right.value


@functools.lru_cache(maxsize=4096)
def _verified(answer: str, truth: str, prose: bool = False) -> bool:
    return _process.ask(answer, truth, prose)


class _Process:
    """math-verify in a process of its own: started when it is needed, again after a comparison that took too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False

    def ask(self, answer: str, truth: str, prose: bool = False) -> bool:
        """Whether math-verify finds them equal within the time limit; `prose`: the answer is a text to find one in.

        Raises `RuntimeError` if it cannot run.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            reply = self._exchange({"answer": answer, "truth": truth, "prose": prose})
            if reply is None:
                self.end()
                if not self._warned:
                    self._warned = True
                    log.warning("comparing %r takes longer than %g s: not equal", answer[:80], LIMIT_S)
                return False
            return bool(reply["equal"])

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sharpen.compat.trinity.equality_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._line(START_LIMIT_S) is None:
            self.end()
            raise RuntimeError("the process that compares expressions with math-verify did not start: see its message")

    def _exchange(self, question: dict[str, str | bool]) -> dict[str, bool] | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        line = self._line(LIMIT_S)
        return None if line is None else dict(json.loads(line))

    def _line(self, limit_s: float) -> bytes | None:
        """The next line, which comes whole; None if it does not come in time, or the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline() or None


_process = _Process()
atexit.register(_process.end)
