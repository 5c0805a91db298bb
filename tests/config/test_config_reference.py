"""docs/reference/configuration.md says what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_page_is_up_to_date_and_every_setting_has_its_line():
    page = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    written = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert written == page, "run: python docs/make_configuration.py"
    undocumented = [row for row in page.splitlines() if row.startswith("| `") and row.endswith("|  |")]
    assert undocumented == []
