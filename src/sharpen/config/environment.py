"""The environment that the user's code finds.

In: a run's configuration. Out: `os.environ` with the variables of `rollout.env_vars`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from sharpen.config.run import RunConfig


@contextlib.contextmanager
def environment(config: RunConfig) -> Iterator[None]:
    """Set the variables of `rollout.env_vars`, and restore the former ones at the end of the block."""
    names = config.rollout.env_vars
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
