"""`sharpen view [RUN ...]`: a local web page over run directories.

In: runs, or folders with runs. Out: a server on this machine's loopback, and a browser that it is opened in, until
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

from sharpen.cli.arguments import add_price, add_root, port, say
from sharpen.errors import ConfigError


def add_view(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run's directory or name, or a folder with runs (default: all of --root)",
    )
    add_root(parser)
    add_address(parser)
    add_price(parser, ": runs are shown with money")


def run_view(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises `ConfigError` for a run or a folder that is not there, or a port that is taken."""
    from sharpen.show.view.library import Library
    from sharpen.show.view.server import serve

    roots = [_folder(name, arguments.root) for name in arguments.runs] or [arguments.root]
    if not roots[0].is_dir():
        raise ConfigError(f"there is no folder {roots[0]}: name a run's directory, or --root, where runs are")

    with contextlib.closing(Library(roots)) as library:
        serve(library, port=arguments.port, opened=opening("view", arguments), price_per_hour=arguments.price_per_hour)
    return 0


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a server of pages for this machine."""
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port of 127.0.0.1 (default: any free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def opening(what: str, arguments: argparse.Namespace) -> Callable[[str], None]:
    """Return what prints the address of a server of pages, and opens it in a browser."""

    def opened(address: str) -> None:
        say(f"{what}: {address}  (Ctrl-C ends it)")
        if _has_desktop() and not arguments.no_browser:
            webbrowser.open(address)

    return opened


def _folder(name: str, root: Path) -> Path:
    """Return the folder with this path, or the directory of the run with this name."""
    from sharpen.run.found import find_run

    return Path(name) if Path(name).is_dir() else find_run(name, root)


def _has_desktop() -> bool:
    """Whether a browser would open in a window; one of the terminal's would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
