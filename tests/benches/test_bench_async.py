"""What the benchmark of asynchronous runs says of its trace, worked out by hand; and its tools' waits."""

import importlib
import statistics
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module("async_tools")
    for name in set(sys.modules) - before:
        if name in ("async_tools", "plain", "report", "agent"):
            del sys.modules[name]


def test_tools_force_the_engine_to_wait_only_while_every_rollout_is_inside_one(bench):
    """Two rollouts from 0 to 10 and from 2 to 8. The engine has requests from 1 to 3 and from 6 to 7; both rollouts are
    inside a tool from 4 to 6, the first one alone from 8 to 9."""
    trace = bench.Trace()
    spans = [
        ("rollout", 0, 10),
        ("rollout", 2, 8),
        ("request", 1, 3),
        ("request", 6, 7),
        ("wait", 3, 6),
        ("wait", 4, 6),
        ("wait", 8, 9),
    ]
    for kind, begin, end in spans:
        trace.events += [(float(begin), kind, 1), (float(end), kind, -1)]
    found = trace.idle()
    assert found["in_flight"] == 10.0
    assert found["idle"] == 10.0 - 3.0
    assert found["forced"] == 2.0 + 1.0
    assert found["rollout_seconds"] == 10.0 + 6.0
    assert found["request_seconds"] == 3.0


def test_waits_have_the_median_and_the_percentile_that_are_claimed(bench):
    waits = [bench.wait_s("question", rollout, call) for rollout in range(4000) for call in range(2)]
    assert statistics.median(waits) == pytest.approx(0.5, rel=0.05)
    assert statistics.quantiles(waits, n=20)[-1] == pytest.approx(3.0, rel=0.1)
    assert bench.wait_s("question", 3, 1) == bench.wait_s("question", 3, 1) != bench.wait_s("question", 3, 0)
