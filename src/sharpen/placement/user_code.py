"""The user's functions on their way to another process: a rollout worker of Ray, or one of this machine.

In: `UserFunctions`, checked in this process. Out: `UserCode`, which travels, and gives the functions there.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.config.functions import FILE_MODULE, prepare
from sharpen.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The pickled functions, and what their modules need to be found: the `paths` of imports. What must have been
    called before is in the environment (`config.functions.prepare`)."""

    functions: bytes
    paths: Sequence[str]

    @classmethod
    def of(cls, functions: UserFunctions, cloudpickle: Any) -> UserCode:
        """Pickle the functions with the package `cloudpickle`, or Ray's. Raises `ConfigError` if that fails."""
        return cls(
            functions=_pickled(functions, cloudpickle),
            paths=[os.path.abspath(path) for path in sys.path],
        )

    def load(self) -> UserFunctions:
        """Return the functions. Raises `ConfigError` if they cannot be loaded in this process."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        prepare()
        try:
            functions: UserFunctions = pickle.loads(self.functions)
        except (Exception, SystemExit) as error:  # unpickling imports the user's modules
            raise ConfigError(
                f"the workflow or the judge cannot be loaded in a rollout worker: {type(error).__name__}: {error}; the "
                "code must be importable in another process, with Ray on every machine of the cluster "
                "(docs/use/isolation.md, docs/use/ray.md)"
            ) from error
        return functions


def _pickled(functions: UserFunctions, cloudpickle: Any) -> bytes:
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):  # loaded from a file, so another process cannot import it by name
            cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(functions))
    except Exception as error:  # pickling runs code of the user's objects
        raise ConfigError(
            f"the workflow or the judge cannot be sent to a rollout worker: {type(error).__name__}: {error}; make what "
            "cannot be pickled (connections, locks, clients) inside the function"
        ) from error
