"""Figures over groups, by hand; the bound on what is excluded; the pre-flight check."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scripted_serving import make_call, make_task

from sharpen.agent.rollout.check import check_groups
from sharpen.agent.rollout.statistics import check_excluded, is_flat, own_metrics, summarize
from sharpen.errors import RolloutError
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Sampling

Reward = float | Outcome


def test_metrics_have_the_name_of_who_gave_them():
    """Of one name from both, neither replaces the other; what only looks like another's is told apart."""
    found = own_metrics({"turns": 2.0, "judge/turns": 3.0, "workflow/judge/x": 4.0, "gateway/forks": 1.0, "a/b": 5.0})
    assert found == {"judge/turns": 3.0, "workflow/a/b": 5.0, "workflow/judge/x": 4.0, "workflow/turns": 2.0}


def make_rollout(group: int, index: int, reward: Reward, attempt: int = 0, **changes: Any) -> Rollout:
    failed = isinstance(reward, Outcome)
    values: dict[str, Any] = {
        "id": f"g{group}/{index}",
        "group_id": f"g{group}",
        "task_id": f"train/{group}",
        "index": index,
        "attempt": attempt,
        "calls": (make_call(0, 3), make_call(1, 2)),
        "outcome": reward if failed else Outcome.OK,
        "reward": None if failed else reward,
        "error": f"first {reward.value}" if isinstance(reward, Outcome) else None,
        "seconds": 2.0,
    }
    return Rollout(**{**values, **changes})


def make_group(number: int, rewards: list[Reward], attempts: tuple[Rollout, ...] = (), **changes: Any) -> Group:
    rollouts = tuple(make_rollout(number, index, reward, **changes) for index, reward in enumerate(rewards))
    return Group(id=f"g{number}", task=make_task(number), version=0, rollouts=rollouts, attempts=attempts)


def test_figures_by_hand() -> None:
    groups = [
        make_group(0, [1.0, 0.0, 1.0], metrics={"turns": 2.0}),
        make_group(1, [1.0, 1.0, Outcome.TIMEOUT], attempts=(make_rollout(1, 2, Outcome.JUDGE_ERROR),)),
        make_group(2, [Outcome.TIMEOUT, Outcome.TIMEOUT, 0.0], calls=()),
    ]
    found = summarize(groups)
    assert (found.num_groups, found.num_rollouts, found.num_excluded, found.num_flat_groups) == (3, 9, 3, 1)
    assert found.reward_mean == pytest.approx(4 / 6)
    assert found.reward_std == pytest.approx(math.sqrt(2 / 9))
    assert found.failures == {Outcome.TIMEOUT: 3}
    assert found.retries == {Outcome.JUDGE_ERROR: 1}
    assert found.first_errors == {Outcome.TIMEOUT: "first timeout", Outcome.JUDGE_ERROR: "first judge_error"}
    assert found.excluded_by_task == pytest.approx({"train/1": 1 / 3, "train/2": 2 / 3})
    assert found.mean_calls == pytest.approx(12 / 9)
    assert found.mean_sampled_tokens == pytest.approx(30 / 9)
    assert (found.mean_seconds, found.truncated_share, found.num_without_calls) == (2.0, 0.0, 1)
    assert found.user_metrics == {"turns": 2.0}
    metrics = found.metrics()
    assert metrics["rollout/excluded_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/worst_task_excluded_share"] == pytest.approx(2 / 3)
    assert metrics["rollout/failures/timeout"] == 3.0
    assert metrics["workflow/turns"] == 2.0
    assert found.notes() == [
        "3 of 9 rollouts excluded (3 timeout)",
        "1 of 9 rollouts made no model call: they teach nothing",
    ]


def test_trap_21_failed_rollouts_are_in_no_reward_figure() -> None:
    """Red when `summarize` (statistics.py) takes a missing reward for 0."""
    assert summarize([make_group(0, [1.0, 1.0, Outcome.INFRASTRUCTURE, Outcome.JUDGE_ERROR])]).reward_mean == 1.0
    assert is_flat(make_group(0, [1.0, 1.0, Outcome.TIMEOUT]))
    assert not is_flat(make_group(0, [1.0, Outcome.TIMEOUT]))
    nothing = summarize([make_group(0, [Outcome.TIMEOUT])])
    assert math.isnan(nothing.reward_mean)
    assert "reward/mean" not in nothing.metrics()


def test_trap_20_flat_groups_are_counted_and_shown() -> None:
    """Red when `is_flat` (statistics.py) looks at one reward value only (say 0)."""
    found = summarize([make_group(0, [1.0, 1.0]), make_group(1, [0.0, 0.0]), make_group(2, [0.0, 1.0])])
    assert found.metrics()["reward/flat_groups"] == 2.0
    assert (found.num_flat_groups, found.notes()) == (2, [])
    assert summarize([make_group(0, [0.5, 0.5])]).notes() == [
        "rewards are equal within every group: nothing to learn from"
    ]
    assert summarize([make_group(0, [0.0, 1.0])]).notes() == []


def test_trap_28_the_excluded_share_is_bounded() -> None:
    """Red when `check_excluded` (statistics.py) does not raise."""
    groups = [make_group(0, [1.0, Outcome.TIMEOUT, Outcome.JUDGE_ERROR, Outcome.JUDGE_ERROR])]
    check_excluded(groups, 0.75)
    with pytest.raises(RolloutError) as caught:
        check_excluded(groups, 0.74)
    assert str(caught.value) == (
        "3 of 4 rollouts have no reward (rollout.max_excluded_share is 0.74); by cause, with the first error of each:\n"
        "  2 x judge_error: first judge_error\n"
        "  1 x timeout: first timeout\n"
        "if the model's answer caused it, name it in rollout.model_exceptions, or raise UnusableAnswerError"
    )


def test_a_good_check_is_ready() -> None:
    report = check_groups([make_group(0, [1.0, 0.0, 1.0, 0.0]), make_group(1, [1.0, 1.0, 1.0, 1.0])])
    assert (report.ready, report.has_signal, report.findings) == (True, True, ())
    assert report.tasks[0].spread == 0.5
    assert report.lengths == (5, 5, 5)
    *lines, verdict = report.lines()
    assert verdict == "ready"
    assert lines[: lines.index("")] == [  # then the best try and the worst
        "task     spread  rewards",
        "train/0   0.500  1 0 1 0",
        "train/1   0.000  1 1 1 1",
        "rewards     mean 0.750, spread 0.433; 1 of 2 tasks with differing rewards",
        "lengths     5 to 5 sampled tokens a rollout (median 5), 2.0 calls",
        "truncated   none of calls stopped at their token limit",
        "time        2.00 s a rollout (median)",
        "failures    none",
    ]
    assert replace(report, step_s=12.0).pace == "2.00 s a rollout (median), 12 s for a step's at this pace"


def offered_tools(finish_reason: str) -> tuple[Call, ...]:
    return (make_call(tools=({"type": "function"},), finish_reason=finish_reason),)


@pytest.mark.parametrize(
    ("groups", "finding"),
    [
        ([make_group(0, [0.0] * 4)], "every reward is the same (0): nothing can be learnt; all answers may be wrong"),
        ([make_group(0, [1.0] * 4)], "the judge accepts anything"),
        ([make_group(0, [0.5] * 4)], "the judge seems to be constant"),
        ([make_group(0, [0.0] * 4), make_group(1, [1.0] * 4)], "never within one"),
        ([make_group(0, [1.0, 0.0, Outcome.TIMEOUT, Outcome.TIMEOUT])], "2 of 4 rollouts failed: 2 x timeout (first"),
        ([make_group(0, [Outcome.WORKFLOW_ERROR] * 4)], "4 of 4 rollouts failed"),
        ([make_group(0, [1.0, 0.0], calls=())], "no rollout called the model"),
    ],
)
def test_problems_that_prevent_training(groups: list[Group], finding: str) -> None:
    report = check_groups(groups)
    assert not report.ready
    assert finding in " ".join(report.findings)
    assert all(len(line) <= 80 for line in report.lines())
    assert report.lines()[-1].startswith("not ready")


def test_remarks_do_not_stop_the_run() -> None:
    report = check_groups([make_group(0, [1.0, 0.0, 1.0, 0.0, Outcome.TIMEOUT], calls=offered_tools("length"))])
    assert report.ready
    assert [finding[:40] for finding in report.findings] == [
        "1 of 5 rollouts failed: 1 x timeout (fir",
        "100% of the calls stopped at their token",
        "tools were offered, but no answer called",
    ]
    assert all(len(line) <= 80 for line in report.lines())
    retried = make_group(0, [1.0, 0.0], attempts=(make_rollout(0, 1, Outcome.JUDGE_ERROR),))
    assert "1 attempts failed and were repeated: judge_error: first judge_error" in check_groups([retried]).findings
    assert not check_groups([]).ready


GREEDY = Sampling(temperature=0.0)


def test_an_agent_at_temperature_0_is_not_ready() -> None:
    """It was 'ready', and no token of its runs ever carried loss."""
    report = check_groups(
        [make_group(0, [1.0, 0.0], calls=(make_call(sampling=GREEDY), make_call(1, sampling=GREEDY)))]
    )
    assert not report.ready
    assert not report.trains
    assert report.findings[0].startswith("all 4 calls were sampled at temperature 0")
    left_out = make_call(1, status=CallStatus.LEFT_OUT)
    neither = check_groups([make_group(0, [1.0, 0.0], calls=(make_call(sampling=GREEDY), left_out))])
    assert not neither.ready
    assert neither.findings[0].startswith("none of the 4 calls can be trained (2 were sampled at temperature 0")


def test_calls_that_the_workflow_left_out_are_its_choice() -> None:
    """With other answers it may leave them in: the run goes on, and says in each step what was trained."""
    left_out = make_call(status=CallStatus.LEFT_OUT)
    report = check_groups([make_group(0, [1.0, 0.0], calls=(left_out,))])
    assert (report.ready, report.trains) == (False, True)
    assert report.findings[0].startswith("the workflow left all 2 calls out of training")
    unused = make_call(status=CallStatus.UNUSED)
    assert not check_groups([make_group(0, [1.0, 0.0], calls=(unused,))]).trains


def test_greedy_calls_among_others_are_remarked_on() -> None:
    report = check_groups([make_group(0, [1.0, 0.0], calls=(make_call(), make_call(1, sampling=GREEDY)))])
    assert report.ready
    assert report.trains
    assert report.findings == ("2 of 4 calls were sampled at temperature 0: they are context only, and never trained",)
