"""Writes reference/models.md from the table of families: `python docs/make_models.py`.

In: `sharpen.models`. Out: the page, a row for each family.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sharpen.models.support import COLUMNS, YES, row_of
from sharpen.models.table import FAMILIES

PAGE = Path(__file__).with_name("reference") / "models.md"
INTRODUCTION = """\
# Models

<!-- Written by docs/make_models.py from src/sharpen/models; a test compares the two. -->

`sharpen models` prints this table; `sharpen models PATH` answers for one checkpoint, by its `config.json` alone (a
folder, or a name on the hub).

A family that is not in the table is served and trained if its configuration shows nothing that is missing; engine and
trainer compare it with transformers when they start, and refuse it if they compute something else.

A checkpoint with towers (images, sound) is trained as a text model: its towers are frozen, and are written back byte
for byte. `images` says whether requests may have them: they are read by the checkpoint's own processor, with the
embedded engine, and with vLLM unless the last column says no.

`vLLM` says what Sharpen does not refuse with vLLM as the engine ([what was compared with
transformers](../use/vllm.md#models-with-towers-with-experts-and-hybrid-ones)); whether vLLM serves the family is vLLM's
to say.
"""


def page() -> str:
    """Return the whole page."""
    table = [COLUMNS, *map(row_of, FAMILIES)]
    same = [place for place, _ in enumerate(COLUMNS) if {row[place] for row in table[1:]} == {YES}]
    said = f"Of every family, the answer is yes to: {', '.join(COLUMNS[place] for place in same)}.\n"
    rows = [[cell for place, cell in enumerate(row) if place not in same] for row in table]
    header, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([INTRODUCTION, said, header, f"|{'---|' * len(rows[0])}", *others, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
