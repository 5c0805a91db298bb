"""Write down the facts of another project's YAML files: their keys and values, and nothing else of them.

    python tests/as_it_is/rewrite.py EXAMPLES_FOLDER "PROJECT VERSION (where it is)" OUTPUT_FOLDER

In: a folder with YAML files. Out: the same files with a line that says where they come from, keys in order, numbers as
they were written (`1e-6` is text in YAML 1.1 and a number in OmegaConf: which one is up to the reader), without
comments, and a length in place of each long text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

LONGEST = 120
"""Characters of a text that is kept."""
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?$")


class _AsWritten(str):
    """A number in the characters that the file has for it."""


class _Dumper(yaml.SafeDumper):
    """Writes numbers as they were written."""

    def represent_as_written(self, text: _AsWritten) -> yaml.ScalarNode:
        """A scalar without quotes, whatever kind YAML 1.1 takes it for."""
        return self.represent_scalar(self.resolve(yaml.ScalarNode, str(text), (True, False)), str(text))


_Dumper.add_representer(_AsWritten, _Dumper.represent_as_written)


def rewritten(text: str) -> str:
    """The facts of a YAML file."""
    value = _value(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.dump(value, Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=110)


def _value(node: yaml.Node | None) -> object:
    if isinstance(node, yaml.MappingNode):
        return {str(_value(key)): _value(inner) for key, inner in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(inner) for inner in node.value]
    if node is None:
        return None
    if node.style is None and _NUMBER.match(node.value):
        return _AsWritten(node.value)
    value = yaml.SafeLoader("").construct_object(node)
    if isinstance(value, str) and len(value) > LONGEST:
        return f"<a text of {len(value)} characters>"
    return value


def main(source: Path, origin: str, output: Path) -> None:
    """Rewrite every YAML file below `source` to the same place below `output`."""
    for path in sorted(source.rglob("*.yaml")):
        name = path.relative_to(source)
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        header = f"# Facts of {source.name}/{name} of {origin}\n"
        target.write_text(header + rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
