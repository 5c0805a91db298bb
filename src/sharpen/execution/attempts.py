"""What runs the attempts of a run on this machine: this process, or processes of their own.

In: the user's functions, `rollout.isolation`. Out: an `AttemptRunner`.
"""

from __future__ import annotations

from sharpen.config.run import RolloutConfig
from sharpen.rollout.attempt import UserFunctions
from sharpen.rollout.in_process import AttemptRunner, InProcess


def attempt_runner(functions: UserFunctions, config: RolloutConfig) -> AttemptRunner:
    """Return the runner. Raises `ConfigError` if the functions cannot be sent to other processes."""
    if config.isolation == "none":
        return InProcess(functions, config.timeout_s)
    from sharpen.execution.isolated.pool import ProcessPool

    return ProcessPool(functions, config)
