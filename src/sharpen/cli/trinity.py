"""The command `trinity`, for scripts that say `trinity run --config FILE`.

In: the command line. Out: an exit code. Where Trinity-RFT itself is installed the command is its own, whichever of both
was installed last; else `trinity run` is `sharpen run`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

from sharpen.cli.arguments import say
from sharpen.cli.main import BAD_INPUT
from sharpen.cli.main import main as sharpen
from sharpen.machine import start_anew_filling_gaps

THEIRS = "trinity-rft"
_SPELLINGS = {"-c": "--config", "--plugin_dir": "--plugin-dir"}


def main(argv: Sequence[str] | None = None, command: Callable[[], Any] | None = None) -> int:
    """Run Trinity-RFT's own command (`command`; None looks for it), or ours in its place."""
    command = command or _own_command()
    if command is not None:
        return int(command() or 0)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] != ["run"]:
        known = f"`trinity {arguments[0]}`" if arguments else "`trinity` without a command"
        say(
            f"sharpen: {known} is Trinity-RFT's, which is not installed; here `trinity run --config FILE` is "
            "`sharpen run` (the other commands: sharpen --help)",
            file=sys.stderr,
        )
        return BAD_INPUT
    if argv is None:
        start_anew_filling_gaps()
    return sharpen([_SPELLINGS.get(argument, argument) for argument in arguments])


def _own_command() -> Callable[[], Any] | None:
    try:
        found = distribution(THEIRS).entry_points
    except PackageNotFoundError:
        return None
    script: EntryPoint | None = next((one for one in found if one.name == "trinity"), None)
    return None if script is None else script.load()
