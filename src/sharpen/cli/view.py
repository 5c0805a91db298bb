"""`sharpen view [DIR ...]`: a local web page over run directories.

In: folders with runs. Out: a server on this machine's loopback, and a browser that it is opened in, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from pathlib import Path

from sharpen.cli.arguments import ROOT
from sharpen.errors import ConfigError


def add_view(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "dirs", nargs="*", type=Path, metavar="DIR", help=f"a run's folder, or one with runs in it (default: {ROOT})"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of 127.0.0.1 (default: any free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument(
        "--price-per-hour", type=float, metavar="X", help="what the machine costs an hour: runs are shown with money"
    )


def run_view(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises `ConfigError` for a folder that is not there, or a port that is taken."""
    from sharpen.view.library import Library
    from sharpen.view.server import serve

    roots = arguments.dirs or [ROOT]
    if missing := [str(root) for root in roots if not root.is_dir()]:
        raise ConfigError(f"no such folder: {', '.join(missing)}; name a run's folder, or one with runs in it")

    def opened(address: str) -> None:
        print(f"view: {address}  (Ctrl-C ends it)", flush=True)
        if _has_desktop() and not arguments.no_browser:
            webbrowser.open(address)

    with contextlib.closing(Library(roots)) as library:
        serve(library, port=arguments.port, opened=opened, price_per_hour=arguments.price_per_hour)
    return 0


def _has_desktop() -> bool:
    """Whether a browser would open in a window; one of the terminal's would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
