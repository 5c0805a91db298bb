"""Every cause, planted in the numbers of a healthy run, is named first; what is just short of it is not named."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from diagnose_plants import GROUPS, MIXED, SIZE, STEPS, config, curves, group, groups, noisy, run_data
from hypothesis import given
from hypothesis import strategies as st

from sharpen.evidence.diagnose.data import RolloutRunData, digest, is_scale_free, repeated_share
from sharpen.evidence.diagnose.diagnosis import RULES, diagnose, scale_free
from sharpen.evidence.diagnose.series import StepRow, trend
from sharpen.learning.recipe import algorithm_of
from sharpen.types import Call, CallStatus, Outcome, Rollout, Sampling

FLAT = (0.0,) * SIZE
RIGHT = (1.0,) * SIZE


def names(data: RolloutRunData) -> list[str]:
    found = diagnose(data)
    for finding in found:
        assert finding.what
        assert finding.advice
        assert finding.evidence
        assert len(finding.examples) <= 3
        assert all(isinstance(value, float) for value in finding.evidence.values()), finding.evidence
    return [finding.name for finding in found]


def first(data: RolloutRunData):
    names(data)
    return diagnose(data)[0]


def test_a_healthy_run_has_no_findings():
    assert names(run_data()) == []


def test_a_solved_run_has_no_findings():
    """At the end nearly all groups are right, and the entropy is a hundredth of what it was."""
    metrics = curves(
        reward__mean=[min(0.99, value) for value in noisy(0.4, 1.4, 0.02)],
        reward__flat_groups=[min(11.0, value) for value in noisy(0.0, 20.0, 0.5)],
        trainer__entropy=[max(0.004, value) for value in noisy(0.6, -0.6, 0.01)],
    )
    last = tuple(seen for number in range(11) for seen in group(number, RIGHT)) + tuple(group(11, MIXED))
    assert names(run_data(metrics=metrics, last=last)) == []


def parts(**changes):
    """A run whose judge gives two parts: right answers fall as well-formed ones rise."""
    courses = {"judge__right": noisy(0.5, 0.2, 0.03, seed=7), "judge__format": noisy(0.3, 0.9, 0.03, seed=8)}
    rewards = (1.0, 0.5, 0.5, 0.0, 1.0, 0.0, 0.5, 0.0)
    measured = {"judge/right": (1, 0, 1, 0, 1, 0, 0, 0), "judge/format": (1, 1, 0, 0, 1, 0, 1, 0)}
    seen = groups(rewards, metrics=lambda index: {name: float(of[index]) for name, of in measured.items()})
    return {"metrics": curves(**{**courses, **changes}), "first": seen, "last": seen}


def test_a_part_of_the_reward_that_rises_while_another_falls_is_named():
    """Red on the code before: 'no cause found', though the reward rose and the answers got worse."""
    data = run_data(**parts())
    assert names(data) == ["parts_apart"]
    found = first(data)
    assert found.what.startswith("judge/format rises while judge/right falls")
    assert found.evidence["judge/right, first steps"] > found.evidence["judge/right, last steps"] + 0.15
    assert found.examples == ("step-0/train/0/1", "step-0/train/0/6", "step-1/train/1/1")


def test_parts_that_stay_or_rise_together_or_have_no_part_in_the_reward_are_no_finding():
    assert names(run_data(**parts(judge__right=noisy(0.5, 0.5, 0.03, seed=7)))) == []
    assert names(run_data(**parts(judge__right=noisy(0.2, 0.5, 0.03, seed=7)))) == []
    data = parts()
    other = groups(
        (1.0, 0.5, 0.5, 0.0, 1.0, 0.0, 0.5, 0.0), metrics=lambda i: {"judge/right": float(i), "judge/format": 1.0}
    )
    assert names(run_data(**{**data, "first": other, "last": other})) == []
    assert names(run_data(**{**data, "metrics": curves(workflow__turns=noisy(5.0, 2.0, 0.1, seed=7))})) == []


@pytest.mark.parametrize("num_steps", range(1, 41))
def test_no_prefix_of_a_real_run_that_learned_has_findings(num_steps):
    """The quickstart, 40 steps: 0.46 to 0.98, entropy 0.21 to 0.005, 14 of 16 groups without spread at the end."""
    found = groups(MIXED, 16)
    assert names(run_data(rows=recorded("quickstart_metrics.jsonl")[:num_steps], first=found, last=found)) == []


def recorded(name):
    """The steps of a run that was really made."""
    lines = [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]
    return tuple(StepRow(step=line.pop("step"), metrics=line) for line in lines)


@pytest.mark.parametrize(
    ("rate", "file", "sign"),
    [
        (1e-3, "quickstart_lr_1e-3_metrics.jsonl", "gradient norm"),  # 0.95 in step 16, then down to 0.6
        (3e-3, "quickstart_lr_3e-3_metrics.jsonl", "entropy"),  # 0.48, then nothing from the second step on
    ],
)
def test_the_quickstart_with_a_learning_rate_too_high(rate, file, sign):
    """Real runs: 30 steps of 8 tasks, beta2 0.999."""
    found = first(run_data(rows=recorded(file), config=config(algorithm={"learning_rate": rate})))
    assert found.name == "learning_rate_too_high"
    assert sign in found.what


def test_judge_failures():
    rewards = (1.0, 0.0, None, 1.0, 0.0, None, 1.0, 0.0)
    last = groups(rewards, error=lambda index: "KeyError: 'answer' (judge.py:3)" if rewards[index] is None else None)
    found = first(run_data(last=last))
    assert found.name == "judge_failures"
    assert found.evidence["share of attempts that failed"] == 0.25
    assert found.examples == ("step-0/train/0/2", "step-0/train/0/5", "step-1/train/1/2")
    assert found.quotes == ("KeyError: 'answer' (judge.py:3)",)
    assert names(run_data(outcomes={"ok": 960, "judge_error": 40})) == []


def test_excluded_rollouts_that_are_not_in_the_sample_are_shown_by_their_steps():
    metrics = curves(rollout__failures__timeout=[0.0] * 20 + [30.0] + [0.0] * 19)
    found = first(run_data(metrics=metrics, outcomes={"ok": 300, "timeout": 30}))
    assert found.name == "excluded_rollouts"
    assert "timeout" in found.what
    assert found.examples == ("step 21",)


def test_model_caused_failures_with_a_reward_are_not_excluded():
    outcomes = {"ok": 300, "call_limit": 100}
    assert names(run_data(outcomes=outcomes)) == ["excluded_rollouts"]
    scored = config(rollout={"failure_reward": 0.0})
    assert names(run_data(outcomes=outcomes, config=scored)) == []


def test_tool_parse_failures():
    metrics = curves(gateway__tool_parse_errors=noisy(0.4, 0.6, 0.02))
    last = groups(parse_errors=lambda index: index % 2)
    found = first(run_data(metrics=metrics, last=last))
    assert found.name == "tool_parse_failures"
    assert found.examples == ("step-0/train/0/1", "step-0/train/0/3", "step-0/train/0/5")
    assert "model.tool_call_parser ('auto')" in found.advice
    fewer = curves(gateway__tool_parse_errors=noisy(0.6, 0.02, 0.01))
    assert names(run_data(metrics=fewer)) == [], "the model has learnt it"


def test_truncation_that_costs_reward():
    rewards = (0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
    found = first(run_data(last=groups(rewards, cut=lambda index: index < 3)))
    assert found.name == "truncation"
    assert found.evidence["rollouts cut off"] == 0.375
    assert found.evidence["mean reward of those cut off"] == 0.0
    assert found.evidence["mean reward of the others"] == 0.8
    assert found.examples == ("step-0/train/0/0", "step-0/train/0/1", "step-0/train/0/2")


def test_truncation_that_costs_nothing_is_no_cause():
    """Whoever asks for eight tokens and rewards them cuts every answer off, and can learn all the same."""
    cut = groups(cut=True)
    assert names(run_data(first=cut, last=cut)) == []
    half = groups((1.0, 1.0, 0.0, 0.0) * 2, cut=lambda index: index % 2 == 0)
    assert names(run_data(last=half)) == []


def test_truncation_of_everything_where_nothing_is_learnt():
    data = run_data(metrics=curves(reward__mean=noisy(0.3, 0.3, 0.03)), last=groups(cut=True))
    assert names(data) == ["truncation"]


def test_empty_masks_by_their_reason():
    found = first(run_data(last=groups(untrained={"greedy": 2}, num_calls=2)))
    assert found.name == "empty_masks"
    assert "temperature 0" in found.what
    assert found.evidence["calls: greedy"] == 2.0 * GROUPS * SIZE
    assert names(run_data(last=groups(untrained={"greedy": 1}, num_calls=2))) == []
    none = first(run_data(last=groups(num_calls=0)))
    assert "no model call" in none.what


def test_steps_that_trained_no_token_though_rewards_differ():
    metrics = curves(batch__loss_tokens=[9000.0] * 30 + [float("nan")] * 10)
    found = first(run_data(metrics=metrics))
    assert found.name == "empty_masks"
    assert found.examples == ("step 31", "step 32", "step 33")
    solved = curves(batch__loss_tokens=[9000.0] * 30 + [0.0] * 10, reward__flat_groups=[3.0] * 30 + [12.0] * 10)
    assert "empty_masks" not in names(run_data(metrics=solved)), "groups without spread need no training"


def test_learning_rate_too_high():
    """The collapse that was seen in practice: learning rate 3e-4 with beta2 0.999, reward to zero."""
    metrics = curves(
        reward__mean=noisy(0.3, 0.7, 0.03, steps=15) + [0.3] + [0.0] * 24,
        reward__flat_groups=[3.0] * 15 + [8.0] + [12.0] * 24,
        trainer__grad_norm=[0.4] * 15 + [9.0] + [0.0] * 24,
        trainer__entropy=noisy(0.6, 0.3, 0.01, steps=15) + [3.0] * 25,
    )
    data = run_data(metrics=metrics, last=groups(FLAT), config=config(algorithm={"learning_rate": 3e-4}))
    found = first(data)
    assert found.name == "learning_rate_too_high"
    assert "entropy" in found.what
    assert "gradient norm" in found.what
    assert "0.0003" in found.what
    assert found.evidence["largest gradient norm after"] == 9.0
    assert "0.0001" in found.advice
    assert "beta2 to 0.95" in found.advice
    peak, fallen = (int(step.removeprefix("step ")) for step in found.examples)
    assert 8 <= peak <= 15
    assert fallen == 17


def test_a_collapse_after_steps_without_a_gradient():
    """Steps whose groups are all flat have no gradient and no entropy: the numbers around the peak are of its step."""
    absent = [math.nan] * 12
    metrics = curves(
        reward__mean=noisy(0.1, 0.1, 0.01, steps=12) + noisy(0.1, 0.8, 0.01, steps=14) + [0.3] + [0.12] * 13,
        reward__flat_groups=[12.0] * 12 + [3.0] * 14 + [8.0] * 14,
        trainer__grad_norm=absent + [0.4] * 14 + [9.0, 8.0] + [0.4] * 12,
        trainer__entropy=absent + [0.6] * 14 + [0.1] * 14,
    )
    found = first(run_data(metrics=metrics, config=config(algorithm={"learning_rate": 3e-4})))
    assert found.name == "learning_rate_too_high"
    assert found.evidence["gradient norm until then"] == 0.4
    assert found.evidence["largest gradient norm after"] == 9.0
    assert found.evidence["entropy until then"] == pytest.approx(0.6)


def test_a_reward_that_falls_without_a_broken_policy_is_not_the_learning_rate():
    metrics = curves(reward__mean=noisy(0.7, 0.7, 0.03, steps=20) + [0.05] * 20)
    assert "learning_rate_too_high" not in names(run_data(metrics=metrics))
    plateau = curves(reward__mean=noisy(0.7, 0.5, 0.03), trainer__entropy=noisy(0.6, 0.1, 0.01))
    assert "learning_rate_too_high" not in names(run_data(metrics=plateau))


def test_learning_rate_too_low():
    still = curves(
        reward__mean=noisy(0.4, 0.4, 0.05, seed=7),
        trainer__entropy=noisy(0.6, 0.6, 0.01, seed=8),
        rollout__sampled_tokens=noisy(100.0, 100.0, 5.0, seed=9),
        trainer__kl_reference=[1e-7] * STEPS,
    )
    found = first(run_data(metrics=still))
    assert found.name == "learning_rate_too_low"
    assert "1e-06" in found.what
    assert found.advice.startswith("Raise algorithm.learning_rate to 1e-05")
    moves = {**still, "trainer__entropy": noisy(0.6, 0.55, 0.01, seed=8)}
    assert names(run_data(metrics=moves)) == [], "the entropy moves"
    away = {**still, "trainer__kl_reference": noisy(0.0, 0.02, 1e-4)}
    assert names(run_data(metrics=away)) == [], "the model moves"
    short = {name: values[:11] for name, values in still.items()}
    assert names(run_data(metrics=short)) == [], "too early to tell"


def test_all_wrong():
    metrics = curves(reward__mean=[0.0] * STEPS, reward__flat_groups=[12.0] * STEPS)
    found = first(run_data(metrics=metrics, first=groups(FLAT), last=groups(FLAT)))
    assert found.name == "all_wrong"
    assert found.examples == ("step-0/train/0/0", "step-1/train/1/0", "step-2/train/2/0")
    assert names(run_data(metrics=metrics, first=groups(FLAT), last=groups(FLAT))) == ["all_wrong"]


def test_all_wrong_is_seen_in_the_first_step_and_with_negative_rewards():
    metrics = curves(steps=1, reward__mean=[-0.98], reward__flat_groups=[11.0])
    some = tuple(seen for number in range(11) for seen in group(number, (-1.0,) * SIZE))
    some += tuple(group(11, (-1.0, 1.0)))
    assert names(run_data(metrics=metrics, first=some, last=some)) == ["all_wrong"]


def test_all_right():
    metrics = curves(reward__mean=[1.0] * STEPS, reward__flat_groups=[12.0] * STEPS)
    found = first(run_data(metrics=metrics, first=groups(RIGHT), last=groups(RIGHT)))
    assert found.name == "all_right"
    learnt = run_data(metrics=metrics, first=groups(MIXED), last=groups(RIGHT))
    assert names(learnt) == []


def test_zero_variance():
    """Half of the tasks always solved, half never, and nothing in between."""
    metrics = curves(reward__mean=noisy(0.5, 0.5, 0.02), reward__flat_groups=[11.0] * STEPS)
    mixed = tuple(seen for number in range(12) for seen in group(number, RIGHT if number % 2 else FLAT))
    found = first(run_data(metrics=metrics, first=mixed, last=mixed))
    assert found.name == "zero_variance"
    assert found.evidence["of them at the least reward"] == 0.5
    one_value = curves(reward__mean=[0.2] * STEPS, reward__flat_groups=[12.0] * STEPS)
    every = groups((0.2,) * SIZE)
    assert names(run_data(metrics=one_value, first=every, last=every)) == ["zero_variance"]


def test_rewards_of_huge_size():
    rewards = (5000.0, 0.0, 1.0, 2.0)
    found = first(run_data(scale_free=False, last=groups(rewards)))
    assert found.name == "reward_scale"
    assert found.evidence["largest reward"] == 5000.0
    assert found.examples[0] == "step-0/train/0/0"
    assert "reward_scale" not in names(run_data(scale_free=True, last=groups(rewards)))
    assert "reward_scale" in names(run_data(scale_free=True, last=groups((5e6, 0.0))))


def test_rewards_of_tiny_spread_without_std_normalization():
    metrics = curves(reward__mean=noisy(1e-3, 1.4e-3, 1e-5), reward__std=[1e-4] * STEPS)
    tiny = groups((1e-3, 1.2e-3, 1.1e-3, 1.4e-3))
    assert first(run_data(metrics=metrics, scale_free=False, first=tiny, last=tiny)).name == "reward_scale"
    assert names(run_data(metrics=metrics, scale_free=True, first=tiny, last=tiny)) == []


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("grpo", True), ("dr_grpo", False), ("reinforce", False), ("raft", True)]
)
def test_whether_advantages_keep_the_scale_of_rewards_is_measured(algorithm, expected):
    assert scale_free(algorithm_of(config(algorithm={"algorithm_type": algorithm}))) is expected


def test_normalization_that_is_switched_off_counts():
    assert scale_free(algorithm_of(config(loss={"std_normalize": False}))) is False
    assert is_scale_free(lambda rewards: rewards * 0.0)


def test_kl_blow_up_against_the_reference():
    metrics = curves(
        reward__mean=noisy(0.3, 0.5, 0.02, steps=20) + noisy(0.5, 0.45, 0.02, steps=20),
        trainer__kl_reference=noisy(0.002, 0.05, 1e-4, steps=28) + noisy(0.1, 4.0, 0.1, steps=12),
    )
    found = first(run_data(metrics=metrics))
    assert found.name == "kl_blow_up"
    assert found.examples[0] in {"step 38", "step 39", "step 40"}
    rising = {**metrics, "reward__mean": noisy(0.3, 0.7, 0.01)}
    assert names(run_data(metrics=rising)) == [], "the reward rises with it"


def test_kl_blow_up_within_a_step():
    assert first(run_data(metrics=curves(trainer__kl_old=noisy(0.01, 0.4, 0.01)))).name == "kl_blow_up"


def test_entropy_collapse():
    metrics = curves(
        reward__mean=noisy(0.3, 0.5, 0.02, steps=12) + noisy(0.5, 0.5, 0.02, steps=28),
        reward__flat_groups=[3.0] * 12 + [11.0] * 28,
        trainer__entropy=noisy(0.6, 0.05, 0.01, steps=12) + [0.002] * 28,
    )
    last = tuple(
        seen for number in range(12) for seen in group(number, RIGHT if number % 2 else FLAT, fingerprint=str(number))
    )
    found = first(run_data(metrics=metrics, last=last))
    assert found.name == "entropy_collapse"
    assert found.evidence["same tokens within a group, last"] == 1.0
    assert found.examples == ("step-0/train/0/0", "step-1/train/1/0", "step-2/train/2/0")
    assert names(run_data(metrics=metrics, last=last)) == ["entropy_collapse"], "flat groups follow from it"


@pytest.mark.parametrize(("start", "end", "words"), [(100.0, 900.0, "longer"), (300.0, 40.0, "shorter")])
def test_length_drift(start, end, words):
    metrics = curves(
        reward__mean=noisy(0.4, 0.4, 0.03),
        rollout__sampled_tokens=noisy(start, end, 5.0),
        reward__flat_groups=[3.0] * 40,
    )
    found = first(run_data(metrics=metrics, last=groups(num_tokens=lambda index: 100 + index)))
    assert found.name == "length_drift"
    assert words in found.what
    assert found.examples[0].endswith("/7" if words == "longer" else "/0")
    rising = {**metrics, "reward__mean": noisy(0.2, 0.7, 0.03)}
    assert names(run_data(metrics=rising)) == [], "longer answers that earn more are wanted"


def test_clip_fraction():
    metrics = curves(trainer__clip_fraction=noisy(0.05, 0.5, 0.01))
    found = first(run_data(metrics=metrics))
    assert found.name == "clip_fraction"
    assert "step 4" in found.examples[0] or "step 3" in found.examples[0]
    gspo = config(algorithm={"algorithm_type": "gspo"})
    assert names(run_data(metrics=curves(trainer__clip_fraction=[0.35] * STEPS), config=gspo)) == []


def test_repetitions_while_the_reward_rises():
    found = first(run_data(last=groups(repeated=lambda index: 0.3 + 0.05 * index)))
    assert found.name == "degenerate_text"
    assert "repetitions" in found.what
    assert found.examples[0].endswith("/7")
    flat = curves(reward__mean=noisy(0.4, 0.4, 0.03))
    assert names(run_data(metrics=flat, last=groups(repeated=0.5))) == [], "the reward does not pay for it"
    assert names(run_data(first=groups(repeated=0.45), last=groups(repeated=0.5))) == [], "it was so from the beginning"


def test_one_text_that_takes_over_while_the_reward_rises():
    found = first(run_data(last=groups(fingerprint=lambda index: "same" if index < 6 else str(index))))
    assert found.name == "degenerate_text"
    assert "75%" in found.what
    assert found.examples == ("step-0/train/0/0", "step-0/train/0/1", "step-0/train/0/2")


def test_every_rule_stays_quiet_without_any_step():
    empty = run_data(rows=(), first=(), last=(), outcomes={})
    assert [rule(empty) for rule in RULES] == [None] * len(RULES)


def test_repeated_share_by_hand():
    """1 2 3 4 1 2 3 4 1: six 4-grams, 1234 and 2341 come twice; a call too short has none."""
    ids = np.array([1, 2, 3, 4, 1, 2, 3, 4, 1], np.int32)
    assert repeated_share([ids]) == pytest.approx(2 / 6)
    assert repeated_share([ids, ids]) == pytest.approx(4 / 12), "calls are not compared with each other"
    assert repeated_share([ids[:3]]) is None
    long = np.arange(300, dtype=np.int32) % 100
    assert repeated_share([long]) == 0.0, "100 tokens apart is no repetition"


def test_a_digest_says_what_became_of_the_calls():
    def call(index, **changes):
        values = {
            "prompt_ids_P": np.array([1], np.int32),
            "sampled_ids_S": np.array([2, 3], np.int32),
            "logprobs_S": np.zeros(2, np.float32),
            "versions_S": np.zeros(2, np.int32),
            "sampling": Sampling(),
            "finish_reason": "stop",
            "status": CallStatus.USED,
        }
        return Call(index=index, parent=None, messages=(), tools=(), response={}, **values | changes)

    calls = (
        call(0),
        call(1, sampling=Sampling(temperature=0.0)),
        call(2, status=CallStatus.ABANDONED, finish_reason="length"),
        call(3, sampled_ids_S=np.zeros(0, np.int32)),
    )
    values = {"id": "g/0", "group_id": "g", "task_id": "t", "index": 0, "attempt": 0, "reward": 1.0}
    rollout = Rollout(calls=calls, outcome=Outcome.OK, metrics={"gateway/tool_parse_errors": 2.0}, **values)
    seen = digest(rollout)
    assert seen.untrained == Counter(greedy=1, abandoned=1, empty=1)
    assert (seen.num_trainable, seen.num_tokens, seen.parse_errors, seen.cut) == (1, 6, 2, False)
    again = Rollout(calls=(call(0), call(1)), outcome=Outcome.CONTEXT_OVERFLOW, **values | {"reward": None})
    assert digest(again).cut
    assert digest(again).fingerprint != seen.fingerprint


@given(st.lists(st.floats(0.0, 1.0), min_size=6, max_size=60), st.floats(0.1, 100.0), st.floats(-5.0, 5.0))
def test_trends_do_not_depend_on_unit_and_origin(values, unit, origin):
    plain, scaled = trend(values), trend([unit * value + origin for value in values])
    assert plain is not None
    assert scaled is not None
    assert scaled.late - scaled.early == pytest.approx(unit * (plain.late - plain.early), abs=1e-6)
    if plain.noise > 1e-3:
        assert scaled.z == pytest.approx(plain.z, abs=1e-3 * max(1.0, abs(plain.z)))
