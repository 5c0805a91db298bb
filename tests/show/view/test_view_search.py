"""Search: words, filters, orders, pieces of text."""

from statistics import fmean

import pytest
from shop_runs import Maker, make_run

from sharpen.learning.experience.reading import read_groups
from sharpen.show.view.data.search import PAGE, SearchQuery, match_of, search_page, snippet
from sharpen.show.view.folders import Folder


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A run, one of whose rollouts speaks Chinese."""
    said = {"step-0/train/0/1": "我们的库存表很好 Änderung", "step-0/train/0/2": "it's a C++ `x-y` (really)"}
    return make_run(tmp_path_factory.mktemp("runs") / "shop", Maker(said=said, seed=6))


@pytest.fixture
def search(shop, library):
    index = library(shop).index(Folder.of(shop), wait_s=120)

    def run(thumbs=None, **query):
        page = search_page(index, SearchQuery.of({name: str(value) for name, value in query.items()}), thumbs or {})
        assert not page.problem
        return page

    return run


@pytest.fixture(scope="module")
def groups(shop):
    return list(read_groups(shop / "run.db"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("库存", True),
        ("库存表很好", True),
        ("存库", False),
        ("änderung", True),
        ("anderung", True),
        ("änder*", True),
        ("änder", False),
        ('"我们的"', True),
    ],
)
def test_words_of_any_language(search, text, found):
    ids = [hit.id for hit in search(text=text).hits]
    assert ids == (["step-0/train/0/1"] if found else [])


@pytest.mark.parametrize("text", ["c++", "it's", "x-y", "(really)", '"C++ x-y"', "really c++"])
def test_signs_are_not_a_language_of_queries(search, text):
    assert [hit.id for hit in search(text=text).hits] == ["step-0/train/0/2"]


@pytest.mark.parametrize(
    "text",
    ['"', 'say"x', 'a"b"c"', "NEAR(", "a OR", "*", "col:x", "^", '" OR 1=1 --', "a AND NOT b", "\x00", "{", '""" "'],
)
def test_no_text_is_an_error(search, text):
    search(text=text)


def test_all_words_must_occur(search):
    assert search(text="shelf 库存").total == 1
    assert search(text="shelf zzz").total == 0
    assert match_of('a "b c" d*') == '"a" AND "b c" AND "d"*'


def test_filters_find_what_the_journal_holds(search, groups):
    every = [(group, one) for group in groups for one in (*group.rollouts, *group.attempts)]
    right = {one.id for _, one in every if one.reward == 1.0}
    found = search(place="training", reward_low=1, order="oldest")
    assert {hit.id for hit in found.hits} == right
    assert found.total == len(right)
    failed = [one.id for _, one in every if one.outcome != "ok"]
    assert failed, "the run has failures to find"
    assert sorted(hit.id for hit in search(place="training", outcome="failed").hits) == sorted(failed)
    assert search(tool="look_up", place="training").total == len(every)
    assert search(tool="other").total == 0
    of_step = {hit.id for hit in search(place="training", step_low=2, step_high=2).hits}
    assert of_step == {one.id for group, one in every if group.id.startswith("step-1/")}
    longest = max(sum(len(call.sampled_ids_S) for call in one.calls) for _, one in every)
    assert {hit.tokens for hit in search(place="training", tokens_low=longest).hits} == {longest}
    assert {hit.task for hit in search(task="test/3").hits} == {"test/3"}


def test_orders(search):
    for order, value in (("reward", "reward"), ("longest", "tokens"), ("slowest", "seconds"), ("calls", "calls")):
        values = [getattr(hit, value) for hit in search(order=order).hits if getattr(hit, value) is not None]
        assert values == sorted(values, reverse=True), order
    rewards = [hit.reward for hit in search(order="lowest").hits if hit.reward is not None]
    assert rewards == sorted(rewards)


def test_the_highest_reward_that_rose_lately(search, groups):
    """Of the last quarter of the steps, from tasks whose mean reward rose since before, most risen first."""
    steps = {group.id: int(group.id.split("/")[0].removeprefix("step-")) + 1 for group in groups}
    last, first = max(steps.values()), min(steps.values())
    since = last - round((last - first) * 0.25)

    def mean(group):
        return fmean(one.reward for one in group.scored)

    early = [group for group in groups if steps[group.id] < since and group.scored]
    everywhere = fmean(map(mean, early))
    rise = {}
    for task in {group.task.id for group in groups if steps[group.id] >= since}:
        before = [mean(group) for group in early if group.task.id == task]
        late = [mean(group) for group in groups if steps[group.id] >= since and group.task.id == task]
        rise[task] = fmean(late) - (fmean(before) if before else everywhere)
    hits = search(order="rising").hits
    assert hits
    assert all(hit.rise == pytest.approx(rise[hit.task]) and hit.rise > 0 and hit.step >= since for hit in hits)
    assert [hit.rise for hit in hits] == sorted((hit.rise for hit in hits), reverse=True)
    assert {hit.task for hit in hits} == {task for task, value in rise.items() if value > 1e-9}


def test_thumbs(search):
    noted = {"t2": "up", "t3": "down", "e1": "up"}
    assert [hit.name for hit in search(noted, noted="up").hits] == ["t2", "e1"]
    assert {hit.name for hit in search(noted, noted="any").hits} == set(noted)


def test_pages(search):
    everything = search(order="oldest")
    assert everything.num_pages == -(-everything.total // PAGE)
    names = [hit.name for page in range(1, everything.num_pages + 1) for hit in search(order="oldest", page=page).hits]
    assert len(names) == len(set(names)) == everything.total
    assert search(page=10**6).hits == ()


@pytest.mark.parametrize(
    "given", [{"page": "x"}, {"page": "-3"}, {"reward_low": "nan!"}, {"order": "evil; DROP"}, {"step_low": "1e99"}]
)
def test_an_address_that_makes_no_sense_is_read_as_far_as_it_does(search, given):
    assert search(**given).total == search().total


def test_facets_count(search, groups):
    facets = search().facets
    every = [one for group in groups for one in (*group.rollouts, *group.attempts)]
    assert dict(facets.places)["training"] == len(every)
    assert dict(facets.tools)["look_up"] == search().total
    assert facets.moments == ("before", "step-3", "after")
    assert facets.steps == (1, 6)
    assert facets.rewards == (0.0, 1.0)


def test_hits_show_where_the_words_are(search):
    (hit,) = search(text="库存").hits
    assert ("库存", True) in hit.snippet
    assert snippet("one Two three", "two") == (("one ", False), ("Two", True), (" three", False))
    assert snippet("x" * 500 + " two", "two")[0] == ("… ", False)
    assert snippet("one", "two") == ()
    assert "\x1b" not in "".join(part for part, _ in snippet("a \x1b[31m two", "two"))
