"""Whatever can be started has a suite that starts it: benchmarks, examples, commands of the documentation, targets."""

from __future__ import annotations

import re

import lines
from lines import ROOT

TARGETS = {
    "check": "the suite itself",
    "environments": "what the suites run in",
    "format": "a developer's; `check` says what it would do",
    "clean": "removes what was made",
    "release-check": "tests/benches/test_release_check.py",
    "help": "tests/package/test_make.py",
    "dist": "tests/package/test_wheel.py",
    "test": "part of `check`",
    "test-slow": "takes hours",
    "test-agentscope-slow": "takes minutes",
    "test-gpu": "needs a GPU",
    "test-documented-slow": "needs two environments more",
    "test-older-openai": "needs one environment more",
    "soak": "tests/soak/test_soak.py",
    "kills": "tests/interrupts/test_kills.py",
    "pages": "a developer's; tests compare each page that it writes",
    "chaos": "tests/chaos/test_chaos.py",
    "fuzz-gateway": "tests/gateway/test_fuzz_gateway.py",
}
"""Targets that CI does not name: why, or the test that runs the same script in small."""


def test_each_script_is_run() -> None:
    """Red when a benchmark or an example is added that nothing runs, or a page tells to start one that is not here."""
    known = lines.BENCHES.keys() | lines.EXAMPLES.keys() | lines.ELSEWHERE.keys() | lines.BY_HAND.keys()
    told = lines.documented().keys() | lines.made()
    assert len(told) > 20
    assert lines.scripts() | told == known


def test_what_is_run_elsewhere_is_named_there() -> None:
    """Red when the other test goes away, or no longer starts the script."""
    for script, place in {**lines.ELSEWHERE, **lines.BY_HAND}.items():
        assert script.rpartition("/")[2].removesuffix(".py") in (ROOT / place).read_text("utf-8"), (script, place)
    for script, place in lines.EXAMPLES.items():
        assert f'different("{script}")' in (ROOT / place).read_text("utf-8"), (script, place)
    assert lines.ENVIRONMENTS.keys() <= lines.BENCHES.keys()


def test_each_target_of_make_is_run() -> None:
    """Red when a target is added that neither CI nor a test runs."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    ran = {word for line in script.splitlines() if line.startswith("make ") for word in line.split()}
    left = {name for name in phony.split() if name not in ran and not name.startswith("bench")}
    left -= {"test-agentscope1", "test-agentscope2"}  # parts of test-agentscope
    assert left | {"check", "environments"} == TARGETS.keys()
    for reason in TARGETS.values():
        assert not reason.startswith("tests/") or (ROOT / reason).exists()
