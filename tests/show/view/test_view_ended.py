"""The pages of a run that ended early: what ended it stands before everything else, in the list too."""

import json
from pathlib import Path
from typing import Any

import pytest

from sharpen.show.view.folders import Folder


@pytest.mark.parametrize(
    ("kind", "said", "state"),
    [("RolloutError", "This run failed", "failed"), ("KeyboardInterrupt", "This run was stopped", "stopped")],
)
def test_what_ended_a_run_stands_first(live: Path, client: Any, kind: str, said: str, state: str) -> None:
    """Red when the page of a run that failed begins with what it could not learn."""
    error = {"kind": kind, "message": "check: <b>every</b> rollout failed\n  4 x timeout", "traceback": "in agent.py"}
    (live / "summary.json").write_text(json.dumps({"error": error, "verdict": None, "steps": 0}))
    (live / "metrics.jsonl").unlink()
    http = client(live)
    page = http.get(f"/run/{Folder.of(live).key}").text
    first = page.index(said)
    assert first < page.index("Does it learn?</h2>")
    assert "check: &lt;b&gt;every&lt;/b&gt; rollout failed\n  4 x timeout" in page
    assert "in agent.py" in page
    assert "is missing" not in page
    assert f"</span>{state}</span>" in page[:first]
    listed = http.get("/").text
    assert "check: &lt;b&gt;every&lt;/b&gt; rollout failed</p>" in listed
    assert f"</span>{state}</span>" in listed
