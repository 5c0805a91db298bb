"""`sharpen algorithms`: every algorithm with its parts, formulas, defaults and source.

In: the command line. Out: the text of `algorithm_text`, only the names, or JSON.
"""

from __future__ import annotations

import argparse

from sharpen.cli.arguments import add_json, print_json


def add_algorithms(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--names", action="store_true", help="only the names, one per line")
    add_json(parser)


def run_algorithms(arguments: argparse.Namespace) -> int:
    """Print the algorithms."""
    from sharpen.cli.algorithm_text import algorithms_json, print_algorithms

    if arguments.json:
        found = algorithms_json()
        print_json(list(found) if arguments.names else found)
    else:
        print_algorithms(names_only=arguments.names)
    return 0
