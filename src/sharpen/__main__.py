"""`python -m sharpen`: the command `sharpen`, where its script is not on the path."""

from __future__ import annotations

import sys

from sharpen.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry())
