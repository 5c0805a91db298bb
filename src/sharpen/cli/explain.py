"""`sharpen explain`: every resolved value of a configuration, and its origin.

In: a `ResolvedConfig`. Out: a table on a terminal, as wide as it; elsewhere one line for each setting, for
searching. For settings that are not given it shows the effective value and its origin (`effective`). Overrides, notices
and the formats of a model that is here follow at the end, and the reason if the run would be refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from sharpen.cli.arguments import add_config, add_json, print_json, resolve_config, say
from sharpen.cli.page import open_console, print_wrapped
from sharpen.errors import ConfigError, ModelError
from sharpen.screen import text_width

if TYPE_CHECKING:
    from sharpen.config.load import ResolvedConfig

Row = tuple[str, str, str]
"""Name within the section, value as in YAML, origin."""


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser)
    add_json(parser)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the settings of each stage of the file."""
    from sharpen.compat.files import load_stages
    from sharpen.compat.trinity.registry import check_names

    answers = []
    for file in load_stages(arguments.config, stage=arguments.stage):
        resolved = resolve_config(arguments, {}, file)
        if not arguments.json:  # before a name that there is not ends it
            explain(resolved)
        refusals = [f"this run would be refused: {refusal}" for refusal in check_names(resolved.config)]
        if arguments.json:
            answers.append({"stage": file.name, **_answer(resolved, refusals)})
        else:
            say("".join(f"{refusal}\n" for refusal in refusals), end="")
    if arguments.json:
        print_json(answers[0] if len(answers) == 1 else answers)
    return 0


def _answer(resolved: ResolvedConfig, refusals: list[str]) -> dict[str, Any]:
    """Return what `explain` prints, as JSON: the value and the origin of each setting by its dotted name."""
    defaults, formats, refused = _decided(resolved)
    settings = {
        f"{section}{'.' if section else ''}{name}": {"value": json.loads(value), "origin": origin}
        for section, rows in _sections(resolved, defaults)
        for name, value, origin in rows
    }
    lines = [*filter(None, (*resolved.overrides, *resolved.notices, *formats, refused)), *refusals]
    return {"settings": settings, "lines": lines}


def _decided(resolved: ResolvedConfig) -> tuple[Mapping[str, tuple[Any, str]], tuple[str, ...], str]:
    """Return the effective values, the model's formats, and the reason if the run would be refused."""
    from sharpen.cli.effective import effective
    from sharpen.placement.model_formats import local_formats

    try:
        return effective(resolved.config), local_formats(resolved.config.model), ""
    except (ConfigError, ModelError) as error:
        return {}, (), f"this run would be refused: {error}"


def explain(resolved: ResolvedConfig, out: IO[str] | None = None) -> None:
    """Print all values in the configuration's own order, by section."""
    out = out or sys.stdout
    defaults, formats, refused = _decided(resolved)
    sections = dict(_sections(resolved, defaults))
    if out.isatty():
        _print_table(sections, resolved.file, out)
    else:
        for section, rows in sections.items():
            for name, value, origin in rows:
                say(f"{section}{'.' if section else ''}{name} = {value}  [{origin}]", file=out)
    console = open_console(out)
    for line in filter(None, (*resolved.overrides, *resolved.notices, *formats, refused)):
        if out.isatty():
            print_wrapped(console, line)
        else:
            say(line, file=out)


def _sections(resolved: ResolvedConfig, defaults: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the settings of the run itself, then those of each section; `defaults` fills in what is not given."""
    from sharpen.config.load import shown_settings

    values = shown_settings(resolved.config)
    shown = {key: (value, resolved.origins[key]) for key, value in values.items()}
    shown |= {
        key: default
        for key, default in defaults.items()
        if values.get(key) is None and not _is_given_section(key, values)
    }
    rows: dict[str, list[Row]] = {"": []}
    for key, (value, origin) in shown.items():
        section, _, name = key.partition(".") if "." in key else ("", "", key)
        rows.setdefault(section, []).append((name, json.dumps(value, ensure_ascii=False), origin))
    yield from rows.items()


def _is_given_section(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key is a section with given settings (`eval_dataset.path`)."""
    return any(name.startswith(f"{key}.") for name in values)


def _print_table(sections: dict[str, list[Row]], file: str, out: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sharpen.agent.transcript import clean

    console = Console(file=out, width=text_width(out))
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
            table.add_row(*(Text(clean(cell), style=style) for cell in cells))
    console.print(table)
