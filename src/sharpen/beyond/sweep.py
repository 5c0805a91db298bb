"""Searches settings with which a run gains most, by Optuna.

In: for each setting the values or the range to search, what trains. Out: the trials, the best first. Values are
proposed by Optuna's TPE with a fixed seed, so that the same command proposes the same again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from sharpen.beyond.several import Train, Trained
from sharpen.config.extras import install_command
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What is tried for a setting: `values`, or numbers from `low` to `high` (`log`: by orders of magnitude)."""

    setting: str
    values: tuple[Any, ...] = ()
    low: float = math.nan
    high: float = math.nan
    log: bool = False

    @property
    def example(self) -> Any:
        """One of the values, to check the setting with."""
        return self.values[0] if self.values else int(self.low) if self._whole else self.low

    @property
    def _whole(self) -> bool:
        return self.low.is_integer() and self.high.is_integer() and not self.log

    def suggest(self, trial: optuna.Trial) -> Any:
        """Return the trial's value."""
        if self.values:
            return trial.suggest_categorical(self.setting, self.values)
        if self._whole:
            return trial.suggest_int(self.setting, int(self.low), int(self.high))
        return trial.suggest_float(self.setting, self.low, self.high, log=self.log)


def parse_range(text: str) -> Range:
    """Parse `key=a,b,c` (values), `key=low:high` (numbers) or `key=low:high:log`. Raises `ConfigError`."""
    setting, equals, what = text.partition("=")
    if not equals or not setting.strip() or not what.strip():
        raise ConfigError(f"--vary {text!r}: it must be KEY=A,B,C or KEY=LOW:HIGH or KEY=LOW:HIGH:log")
    if setting.strip() == "name":
        raise ConfigError(f"--vary {text!r}: each trial has a name of its own, so that name cannot be varied")
    if ":" not in what:
        return Range(setting=setting.strip(), values=tuple(_value(text, part) for part in what.split(",")))
    parts = what.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
    except ValueError:
        raise ConfigError(f"--vary {text!r}: {parts[0]!r} and {parts[1]!r} must be numbers") from None
    log = parts[2:] == ["log"]
    if parts[2:] and not log:
        raise ConfigError(f"--vary {text!r}: after the two numbers comes nothing, or :log; got {parts[2]!r}")
    if not low < high or not math.isfinite(high - low) or (log and low <= 0):
        raise ConfigError(
            f"--vary {text!r}: the first number must be less than the second, both finite, and above 0 with :log"
        )
    return Range(setting=setting.strip(), low=low, high=high, log=log)


def _value(text: str, part: str) -> Any:
    """Read one of the values: as YAML, and `1e-6`, which is text there, as a number."""
    try:
        value = yaml.safe_load(part)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--vary {text!r}: the value {part!r} is not YAML") from error
    if not part.strip():
        raise ConfigError(f"--vary {text!r}: between two commas is nothing")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def sweep(ranges: Sequence[Range], train: Train, *, base: str, trials: int, seed: int) -> list[Trained]:
    """Run the trials, and return them, the one with the greatest gain first; those that failed are at the end. Raises
    `ConfigError` without Optuna."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError(f"a sweep needs Optuna: {install_command('sweep')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    done: list[Trained] = []
    for number in range(trials):
        trial = study.ask()
        trained = train(f"{base}-trial-{number}", {one.setting: one.suggest(trial) for one in ranges})
        done.append(trained)
        if trained.gain is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, trained.gain)
    return sorted(done, key=lambda one: -math.inf if one.gain is None else one.gain, reverse=True)
