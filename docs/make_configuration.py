"""Writes reference/configuration.md from the configuration classes: `python docs/make_configuration.py`.

In: the fields of `RunConfig` and the line of documentation beneath each. Out: the page, every setting with its default.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sharpen.config.doors import PartName
from sharpen.config.explain import is_mapping, section_class
from sharpen.config.resuming import FIXED, MAY_CHANGE
from sharpen.config.run import RunConfig

PAGE = Path(__file__).with_name("reference") / "configuration.md"
INTRODUCTION = """\
# Configuration

<!-- Written by docs/make_configuration.py from src/sharpen/config; a test compares the two. -->

A run is configured by `sharpen run --config run.yaml`, by keyword arguments of `tune()`, or by both: arguments override
the file, as does `--set section.name=value`. An unknown setting is an error that names the nearest one. A relative path
in a file is taken from the file's folder if it exists there. `sharpen explain --config run.yaml` prints every value and
where it comes from (`loss.clip_high = 0.0004 [preset gspo]`); a run keeps them in `resolved.json`.

The smallest `run.yaml`:

```yaml
workflow: agent.py:run_agent
judge: agent.py:judge
train_dataset:
  path: tasks.jsonl
model:
  model_path: Qwen/Qwen3-0.6B
  max_model_len: 4096
```
"""

RESUMING = """\
## What may change when a run goes on

A fixed `name` goes on from its last checkpoint ([stop and resume](../use/resuming.md)). These settings may have
other values then:
"""
FIXED_ONES = "Any other is refused, with both values, before anything is written. So these stay as they are:\n"


def page() -> str:
    """The whole page: the run's own settings, then a table for each section."""
    sections: list[tuple[str, type[BaseModel]]] = []
    parts = [INTRODUCTION, "## The run\n", _table(RunConfig, "", sections)]
    for name, model in sections:
        parts += [f"## `{name}`\n", f"{_summary(model)}\n", _table(model, name, sections)]
    changing = [f"| {reason} | {', '.join(f'`{name}`' for name in names)} |" for reason, names in MAY_CHANGE.items()]
    fixed = [f"- {reason}" for reason in FIXED]
    return "\n".join(
        [*parts, RESUMING, "| may change | settings |", "|---|---|", *changing, "", FIXED_ONES, *fixed, ""]
    )


def _table(model: type[BaseModel], within: str, sections: list[tuple[str, type[BaseModel]]]) -> str:
    documented = _lines_beneath_fields(model)
    rows = ["| setting | default | |", "|---|---|---|"]
    extended = next((name for name, other in sections if model.__base__ is other), None)
    if extended is not None:
        rows.append(f"| `{within}.*` | the same | The settings of [`{extended}`](#{extended}), and these: |")
    for name, field in model.model_fields.items():
        if extended is not None and name not in model.__annotations__:
            continue
        dotted = f"{within}.{name}" if within else name
        section = section_class(field.annotation)
        text = documented.get(name, "")
        default = field.get_default(call_default_factory=True)
        if section is None:
            shown = "required" if default is PydanticUndefined else f"`{_yaml(default)}`"
            rows.append(f"| `{dotted}` | {shown} | {_with_choices(text, field)} |")
            continue
        first = next((known for known, other in sections if other is section), None)
        name_of_section = f"{dotted}.<name>" if is_mapping(field.annotation) else dotted
        if first is None:
            sections.append((name_of_section, section))
            first = name_of_section
        shown = (
            "required" if default is PydanticUndefined else "none" if not isinstance(default, BaseModel) else "below"
        )
        if shown == "below" and not text:
            continue  # its heading is below
        linked = f"Settings: [`{first}`](#{re.sub('[.<>]', '', first)})."
        rows.append(f"| `{name_of_section}` | {shown} | {text} {linked} |".replace("|  ", "| "))
    return "\n".join(rows) + "\n"


def _summary(model: type[BaseModel]) -> str:
    """The first paragraph of its documentation, in one line."""
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split())


def _with_choices(text: str, field: FieldInfo) -> str:
    """The text, and the choices where it does not name them all."""
    ours = [name for part in field.metadata for name in _ours(part)] or _ours_within(field.annotation)
    choices = [f"`{choice}`" for choice in ours or _choices(field.annotation)]
    said = all(choice in text for choice in choices)
    own = "[one of your own](../use/extending.md)"
    sentences = [text.replace("|", "\\|"), "" if said else f"One of {', '.join(choices)}", f"Or {own}" if ours else ""]
    return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences if sentence)


def _ours(metadata: object) -> tuple[str, ...]:
    """The names of our own parts, if it is the validator of a setting that names a part."""
    named = metadata.func if isinstance(metadata, AfterValidator) else None
    return named.ours if isinstance(named, PartName) else ()


def _ours_within(annotation: Any) -> list[str]:
    """The same of a setting that may be left out."""
    parts = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    return [name for part in parts for metadata in get_args(part)[1:] for name in _ours(metadata)]


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _yaml(value: object) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _lines_beneath_fields(model: type[BaseModel]) -> dict[str, str]:
    """Those of the class itself, and of the configuration classes that it extends."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith("sharpen."):
            found |= _own_lines(base)
    return found


def _own_lines(model: type[BaseModel]) -> dict[str, str]:
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        named = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
            found[statement.target.id] = re.sub(r"\(docs/(\w+/[\w-]+\.md)\)", r"([more](../\1))", text)  # type: ignore[union-attr]
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
