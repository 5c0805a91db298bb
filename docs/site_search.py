"""Hooks of MkDocs: what the site's search finds first.

In: the pages as MkDocs renders them. Out: a weight for every page in the search's index, and an entry for each
setting, so that whoever looks for "learning rate" lands on the row of `algorithm.learning_rate`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

SETTINGS = "reference/configuration.md"
ROW = re.compile(r"<tr>\n<td><code>([\w.&;<>]+)</code></td>\n<td>(.*?)</td>\n<td>(.*?)</td>\n</tr>", re.DOTALL)
WEIGHTS = {
    SETTINGS: 4.0,
    "reference/commands.md": 3.0,
    "reference/algorithms.md": 2.0,
    "use/memory.md": 3.0,
    "reference/api.md": 0.5,
    "reference/spec.md": 0.2,
    "examples/": 0.4,
    "start/zh.md": 0.2,
    "CHANGELOG.md": 0.05,
    "CONTRIBUTING.md": 0.2,
}
"""By a page, or the folder it is in; other pages weigh 1."""

FIRST = ("algorithm.", "model.", "train_dataset.")
"""Sections whose settings come before those of the same name elsewhere."""

entries: list[dict[str, Any]] = []


def on_pre_build(config: Any) -> None:
    entries.clear()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> None:
    place = page.file.src_uri
    weight = WEIGHTS.get(place, WEIGHTS.get(place.split("/")[0] + "/", 1.0))
    page.meta.setdefault("search", {})["boost"] = weight


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Give each setting's row an address, and note it for the index."""
    if page.file.src_uri != SETTINGS:
        return html

    def noted(row: re.Match[str]) -> str:
        name, default, text = row.groups()
        if f'id="{name}"' in html:  # a section's own name: there is a heading
            return row.group()
        weight = WEIGHTS[SETTINGS] * (1.5 if name.startswith(FIRST) else 1.0)
        text = f"<p>{text}</p><p>Default: {default}</p>"
        entries.append({"location": f"{page.url}#{name}", "title": name, "text": text, "boost": weight})
        return row.group().replace("<tr>", f'<tr id="{name}">', 1)

    return ROW.sub(noted, html)


@event_priority(-50)  # after the search has written its index, before it is copied into a script for sites on the disk
def on_post_build(config: Any) -> None:
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] += entries
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
