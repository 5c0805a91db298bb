"""What runs the attempts of a run on this machine: this process, or processes of their own.

In: the user's functions, `rollout.isolation`. Out: an `AttemptRunner`.
"""

from __future__ import annotations

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import AttemptRunner, InProcess
from sharpen.config.run import RolloutConfig


def attempt_runner(functions: UserFunctions, config: RolloutConfig) -> AttemptRunner:
    """Return the runner. Raises `ConfigError` if the functions cannot be sent to other processes."""
    if config.isolation == "none":
        return InProcess(functions, config.timeout_s)
    from sharpen.placement.isolated.pool import ProcessPool

    return ProcessPool(functions, config)
