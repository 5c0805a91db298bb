"""Rollouts whose text the run has dropped, on the pages."""

import pytest

from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups, step_of_group
from sharpen.show.view.folders import Folder


@pytest.fixture
def found(copied, client, library):
    """A client of a run without the text of its first step, its address, and the last key of a rollout of that step."""
    with Journal(copied / "run.db") as journal:
        journal.trim(1)
    library(copied).index(Folder.of(copied), wait_s=120)
    groups = [group for group in read_groups(copied / "run.db") if step_of_group(group.id) == 1]
    return client(copied), f"/run/{Folder.of(copied).key}", sum(len(g.rollouts) + len(g.attempts) for g in groups)


def test_a_rollout_without_text_says_so_and_has_its_tokens(found):
    http, address, last = found
    page = http.get(f"{address}/rollout/t{last}?format=json").json()
    assert page["trimmed"] is True
    assert page["calls"][0]["messages"] == []
    assert "journal.keep_steps" in http.get(f"{address}/rollout/t{last}").text
    assert len(http.get(f"{address}/rollout/t{last}/tokens.json?call=0").json()["tokens"]) > 0
    later = http.get(f"{address}/rollout/t{last + 1}")
    assert "journal.keep_steps" not in later.text


def test_lists_say_it_in_place_of_the_answer(found):
    http, address, _ = found
    assert "journal.keep_steps" in http.get(f"{address}/step/1").text
    assert "journal.keep_steps" not in http.get(f"{address}/step/2").text
