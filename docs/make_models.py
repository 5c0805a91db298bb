"""Writes reference/models.md from the table of families: `python docs/make_models.py`.

In: `sharpen.models`. Out: the page, a row for each family.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sharpen.models.support import COLUMNS, row_of
from sharpen.models.table import FAMILIES

PAGE = Path(__file__).with_name("reference") / "models.md"
INTRODUCTION = """\
# Models

<!-- Written by docs/make_models.py from src/sharpen/models; a test compares the two. -->

The families of models that Sharpen knows. `sharpen models` prints this table; `sharpen models PATH` answers for one
checkpoint, by its `config.json` alone (a folder, or a name on the hub). `make test-models` takes a tiny random model
of every family through engine, trainer, a certified step and its checkpoint.

A family that is not in the table is served and trained if its configuration shows nothing that is missing; engine and
trainer compare it with transformers when they start, and refuse it if they compute something else. What is missing is
named, before a weight is read.

A checkpoint with towers (images, sound) is trained as a text model: its towers are frozen, and are written back byte
for byte, with all else that transformers does not load. `images` says whether they are read in requests: by the
checkpoint's own processor, with the embedded engine, and with vLLM unless the last column says no.

`vLLM` says what Sharpen does not refuse with vLLM as the engine, there or on a CPU ([what was compared with
transformers](../use/vllm.md#models-with-towers-with-experts-and-hybrid-ones)); whether vLLM serves the family is vLLM's
to say.
"""


def page() -> str:
    """Return the whole page."""
    header = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    rows = [f"| {' | '.join(row_of(family))} |" for family in FAMILIES]
    return "\n".join([INTRODUCTION, *header, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
