"""`sharpen explain`: every resolved value of a configuration, and where it came from.

In: a `ResolvedConfig`. Out: a table on a terminal, at most 100 columns wide; elsewhere one line for each setting, to be
searched. Where a setting says nothing, the value that acts and what decides it (`effective`). Overrides and notices
come at the end, and why the run would be refused, if it would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from sharpen.config.load import ResolvedConfig, value_leaves
from sharpen.errors import ConfigError

WIDTH = 100
Row = tuple[str, str, str]
"""Name within the section, value as YAML would have it, origin."""


def explain(resolved: ResolvedConfig, out: IO[str] | None = None) -> None:
    """Print all values in the configuration's own order, by section."""
    from sharpen.cli.effective import effective

    out = out or sys.stdout
    refused = ""
    try:
        acting = effective(resolved.config)
    except ConfigError as error:
        acting, refused = {}, f"this run would be refused: {error}"
    sections = dict(_sections(resolved, acting))
    if out.isatty():
        _print_table(sections, resolved.file, out)
    else:
        for section, rows in sections.items():
            for name, value, origin in rows:
                print(f"{section}{'.' if section else ''}{name} = {value}  [{origin}]", file=out)
    for line in filter(None, (*resolved.overrides, *resolved.notices, refused)):
        print(line, file=out)


def _sections(resolved: ResolvedConfig, acting: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, list[Row]]]:
    """The settings of the run itself first, then those of each section; `acting` where nothing is given."""
    values = {".".join(place): value for place, value in value_leaves(resolved.config).items()}
    shown = {key: (value, resolved.origins[key]) for key, value in values.items()}
    shown |= {key: found for key, found in acting.items() if values.get(key) is None and _has_room(key, values)}
    rows: dict[str, list[Row]] = {"": []}
    for key, (value, origin) in shown.items():
        section, _, name = key.partition(".") if "." in key else ("", "", key)
        rows.setdefault(section, []).append((name, json.dumps(value, ensure_ascii=False), origin))
    yield from rows.items()


def _has_room(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting is not a section that is given (`eval_dataset.path`)."""
    return not any(name.startswith(f"{key}.") for name in values)


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
