"""What the pre-flight check finds in an agent's own habits, and where it stops the run."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_serving import make_call, make_task

from sharpen.agent.rollout.check import UNCALLED, check_groups, differing
from sharpen.config.public import TunerModelConfig
from sharpen.types import Call, Group, Outcome, Rollout, Sampling

MODEL = TunerModelConfig(model_path="m", max_model_len=64)


def rollout(group: int, index: int, ended: float | Outcome, *calls: Call, **changes: Any) -> Rollout:
    failed = isinstance(ended, Outcome)
    values: dict[str, Any] = {
        "id": f"g{group}/{index}",
        "group_id": f"g{group}",
        "task_id": f"train/{group}",
        "index": index,
        "attempt": 0,
        "calls": calls or (make_call(),),
        "outcome": ended if failed else Outcome.OK,
        "reward": None if failed else ended,
        "error": f"broke as {ended.value}" if isinstance(ended, Outcome) else None,
        "seconds": 2.0,
    }
    return Rollout(**{**values, **changes})


def group(number: int, *rollouts: Rollout, attempts: tuple[Rollout, ...] = ()) -> Group:
    return Group(id=f"g{number}", task=make_task(number), version=0, rollouts=rollouts, attempts=attempts)


def test_the_agents_own_temperature_is_reported_with_its_effect() -> None:
    """As LlamaIndex does it: 0.1, whatever the run says."""
    low = make_call(sampling=Sampling(temperature=0.1))
    groups = [group(n, rollout(n, 0, float(n == 0), low), rollout(n, 1, 0.0, low)) for n in range(8)]
    report = check_groups(groups, model=MODEL)
    assert report.ready
    (finding,) = report.findings
    assert "temperature 0.1 itself in 16 of 16 calls, where model.temperature is 1: " in finding
    assert "(7 of 8 groups have equal rewards)" in finding
    assert "or set model.temperature to it" in finding
    mixed = [group(0, rollout(0, 0, 1.0, low, make_call(1)), rollout(0, 1, 0.0))]
    assert "temperature 0.1 itself in 1 of 3 calls, where model.temperature is 1: it is used" in str(
        check_groups(mixed, model=MODEL).findings
    )
    as_the_run = TunerModelConfig(model_path="m", max_model_len=64, temperature=0.1)
    assert check_groups(groups, model=as_the_run).findings == ()


@pytest.mark.parametrize(
    ("sampling", "said"), [({"top_p": 0.9}, "top_p 0.9"), ({"top_k": 20}, "top_k 20"), ({"min_p": 0.1}, "min_p 0.1")]
)
def test_the_agents_own_truncation_prevents_training(sampling: dict[str, Any], said: str) -> None:
    cut = make_call(sampling=Sampling(**sampling))
    report = check_groups([group(0, rollout(0, 0, 1.0, cut), rollout(0, 1, 0.0))], model=MODEL)
    assert not report.ready
    assert report.findings[0].startswith(f"the agent sets {said} itself in 1 of 2 calls (model.top_p is 1)")
    groups = [group(0, rollout(0, 0, 1.0, cut), rollout(0, 1, 0.0))]
    assert check_groups(groups, model=MODEL, needs_ratio=False).ready


def test_an_answer_that_a_cache_served_to_a_sibling_is_found() -> None:
    """Red when examples in the prompt are taken for it, or the sibling's answer is not recognized."""
    tool = {"id": "a", "function": {"name": "add", "arguments": "{}"}}
    example = {"role": "assistant", "content": "an example"}
    first = make_call(0, messages=(example,), response={"role": "assistant", "content": None, "tool_calls": [tool]})
    served = {"role": "assistant", "content": None, "tool_calls": [{**tool, "id": "b"}]}
    second = make_call(1, messages=(example, served), response={"role": "assistant", "content": "an example"})
    alone = make_call(0, messages=(example, served), response={"role": "assistant", "content": "5"})
    asked = group(0, rollout(0, 0, 1.0, first, second), rollout(0, 1, 0.0, first, second))
    assert check_groups([asked]).findings == ()
    cached = group(0, rollout(0, 0, 1.0, first, second), rollout(0, 1, 0.0, alone))
    (finding,) = check_groups([cached]).findings
    assert finding.startswith("1 of 2 rollouts (the first: g0/1) continue from an answer")
    assert "switch it off" in finding


def test_a_check_in_which_many_rollouts_called_no_model_is_not_ready() -> None:
    silent = [rollout(0, index, float(index % 2), calls=(), seconds=0.001) for index in range(1, 4)]
    report = check_groups([group(0, rollout(0, 0, 1.0), *silent)])
    assert not report.ready
    assert "3 of 4 rollouts made no model call, and took 0.001 s where the others took 2.00 s" in report.findings[0]


def test_a_check_in_which_every_first_attempt_failed_stops_the_run() -> None:
    """Also where a retry succeeded: it may have been drawn until it did. Servers that were late are forgiven."""
    error, down = Outcome.WORKFLOW_ERROR, Outcome.INFRASTRUCTURE
    failed = check_groups([group(0, *(rollout(0, index, error) for index in range(16)))])
    assert failed.all_failed == (
        "the first attempt of each of the 16 rollouts failed; by cause, with the first error of each:\n"
        "  16 x workflow_error: broke as workflow_error (if the model's answer caused it, name it in "
        "rollout.model_exceptions, or raise UnusableAnswerError)"
    )
    again = (rollout(0, 0, 1.0, attempt=1), rollout(0, 1, 0.0, attempt=1))
    firsts = (rollout(0, 0, error), rollout(0, 1, Outcome.TIMEOUT))
    saved = check_groups([group(0, *again, attempts=firsts)])
    assert "1 x timeout: broke as timeout" in saved.all_failed
    assert (saved.ready, saved.findings[0].startswith("the first attempt of each of the 2 rollouts failed")) == (
        False,
        True,
    )
    assert "2 of 2 rollouts replaced by a retry" not in str(saved.findings)  # with the answers that had failed
    assert check_groups([group(0, *again, attempts=firsts[:1])]).all_failed == ""
    late = (rollout(0, 0, down), rollout(0, 1, down))
    assert check_groups([group(0, *again, attempts=late)]).all_failed == ""
    assert "2 x infrastructure" in check_groups([group(0, *late)]).all_failed
    punished = rollout(0, 0, Outcome.UNUSABLE_ANSWER, reward=-1.0)
    assert check_groups([group(0, punished, rollout(0, 1, error))]).all_failed == ""


def test_the_best_and_the_worst_try_can_be_read() -> None:
    """What was asked and expected, what the model said, the reward: red where the report has numbers alone."""
    groups = [group(n, rollout(n, 0, 0.25 + n / 2), rollout(n, 1, Outcome.WORKFLOW_ERROR)) for n in range(2)]
    report = check_groups(groups, model=MODEL)
    assert report.best is not None
    assert report.worst is not None
    assert (report.best.rollout_id, report.best.reward) == ("g1/0", 0.75)
    assert (report.worst.rollout_id, report.worst.reward) == ("g0/0", 0.25)
    text = "\n".join(report.lines())
    field, value = next(iter(groups[1].task.row.items()))
    assert f"best try: reward 0.75 (g1/0)\n  {field}: {value}" in text
    assert "worst try: reward 0.25 (g0/0)" in text
    assert f"  said: {report.best.said}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.to_json()["worst"]["reward"] == 0.25
    failed = check_groups([group(0, rollout(0, 0, Outcome.WORKFLOW_ERROR))], model=MODEL)
    assert (failed.best, failed.worst) == (None, None)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([rollout(0, n, float(n % 2), calls=()) for n in range(4)], "0 of 1 tasks with differing rewards"),
        ([rollout(0, n, Outcome.TIMEOUT) for n in range(4)], "0 of 1 tasks with differing rewards"),
        ([rollout(0, 0, 1.0), rollout(0, 1, Outcome.TIMEOUT)], "0 of 1 tasks with differing rewards"),
        ([rollout(0, 0, 1.0), rollout(0, 1, 1.0), rollout(0, 2, 0.0, calls=())], "0 of 1 tasks with differing rewards"),
        ([rollout(0, 0, 0.1 + 0.2), rollout(0, 1, 0.3)], "0 of 1 tasks with differing rewards"),
        ([rollout(0, 0, 0.3), rollout(0, 1, 0.3 + 1e-6)], "1 of 1 tasks with differing rewards"),
        ([rollout(0, 0, 1.0)], "1 tasks with one rollout each"),
    ],
)
def test_only_tasks_whose_answered_rewards_differ_are_counted(members: list[Rollout], said: str) -> None:
    """Red when tasks that are not flat count as differing: those of failures, of one reward, of calls never made, of
    rounding all did."""
    report = check_groups([group(0, *members)])
    assert said in differing(report.statistics)
    assert said in " ".join(" ".join(report.lines()).split()) or "rewards     none" in report.lines()
    assert report.has_signal == said.startswith("1 of")


def test_a_check_in_which_no_rollout_called_the_model_says_so_and_not_more() -> None:
    report = check_groups([group(0, *(rollout(0, n, float(n % 2), calls=()) for n in range(4)))])
    assert (report.uncalled, report.ready, report.findings) == (True, False, (UNCALLED,))
    some = check_groups([group(0, rollout(0, 0, 1.0), rollout(0, 1, 0.0), rollout(0, 2, 1.0, calls=()))])
    assert not some.uncalled
    assert "1 of 3 rollouts made no model call" in some.findings[0]
    assert not check_groups([group(0, rollout(0, 0, Outcome.TIMEOUT, calls=()))]).uncalled, "it may call it next time"
