"""The command `sharpen`, also as `python -m sharpen`: what comes before any of it is loaded.

In: the command line. Out: an exit code. What trains starts anew once, with an allocator that fills gaps.
"""

from __future__ import annotations

import sys

from sharpen.machine import start_anew_filling_gaps


def main() -> int:
    """Run the command line in this process, or in one of the same number in its place."""
    if sys.argv[1:2] == ["run"]:
        start_anew_filling_gaps()
    from sharpen.cli.main import entry

    return entry()


if __name__ == "__main__":
    sys.exit(main())
