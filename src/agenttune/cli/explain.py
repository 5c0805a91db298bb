"""`agenttune explain`: every resolved value of a configuration, and where it came from.

In: a `Resolved`. Out: a table on a terminal, at most 100 columns wide; elsewhere one line for each setting, to be
searched. Overrides and notices come at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import IO

from agenttune.config.load import Resolved, value_leaves

WIDTH = 100
Row = tuple[str, str, str]
"""Name within the section, value as YAML would have it, origin."""


def explain(resolved: Resolved, out: IO[str] | None = None) -> None:
    """Print all values in the configuration's own order, by section."""
    out = out or sys.stdout
    sections = dict(_sections(resolved))
    if out.isatty():
        _print_table(sections, resolved.file, out)
    else:
        for section, rows in sections.items():
            for name, value, origin in rows:
                print(f"{section}{'.' if section else ''}{name} = {value}  [{origin}]", file=out)
    for line in (*resolved.overrides, *resolved.notices):
        print(line, file=out)


def _sections(resolved: Resolved) -> Iterator[tuple[str, list[Row]]]:
    """The settings of the run itself first, then those of each section."""
    rows: dict[str, list[Row]] = {"": []}
    for place, value in value_leaves(resolved.config).items():
        section, name = (place[0], ".".join(place[1:])) if len(place) > 1 else ("", place[0])
        origin = resolved.origins[".".join(place)]
        rows.setdefault(section, []).append((name, json.dumps(value, ensure_ascii=False), origin))
    yield from rows.items()


def _print_table(sections: dict[str, list[Row]], file: str, out: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out)
    console.width = min(console.width, WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("setting", overflow="fold", max_width=25)
    table.add_column("value", overflow="fold", max_width=20)
    table.add_column(f"from ({file})" if file else "from", overflow="fold")
    for section, rows in sections.items():
        if section:
            table.add_row(Text(section, style="bold"), "", "")
        for name, value, origin in rows:
            style = "dim" if origin == "default" else ""
            shown = origin.removeprefix(f"{file}: ") if file else origin
            cells = (f"  {name}" if section else name, value, shown)
            table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)
