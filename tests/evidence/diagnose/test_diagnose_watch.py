"""The diagnosis of a run in motion: one line when a cause lasts, silence otherwise, bounded cost."""

import time
import tracemalloc

import numpy as np
from diagnose_plants import config, curves, noisy, rows

from sharpen.evidence.diagnose.diagnosis import PATIENCE, REMIND_STEPS, Watch
from sharpen.learning.recipe import recipe_of
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Sampling, Task

SIZE = 8


def rollout(group, index, reward):
    ids = np.array([hash((group, index, place)) % 5000 for place in range(40)], np.int32)
    call = Call(
        index=0,
        parent=None,
        prompt_ids_P=np.array([1, 2], np.int32),
        sampled_ids_S=ids,
        logprobs_S=np.zeros(40, np.float32),
        versions_S=np.zeros(40, np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=(),
        tools=(),
        response={},
    )
    return Rollout(
        id=f"{group}/{index}",
        group_id=group,
        task_id=group,
        index=index,
        attempt=0,
        calls=(call,),
        outcome=Outcome.OK,
        reward=reward,
    )


def groups(step, rewards, count=4):
    found = []
    for number in range(count):
        name = f"step-{step}/train/{number}"
        members = tuple(rollout(name, index, reward) for index, reward in enumerate(rewards))
        found.append(Group(id=name, task=Task(id=name, index=number, row={}), version=step, rollouts=members))
    return found


MIXED, FLAT = (1.0, 0.0) * 4, (0.0,) * SIZE


def said(watch, metrics, rewards):
    """What the watch says, by step."""
    lines = {row.step: watch.add(row.step, row.metrics, groups(row.step, rewards)) for row in rows(metrics)}
    return {step: line for step, line in lines.items() if line is not None}


def test_a_healthy_run_is_left_in_peace():
    assert said(Watch(recipe_of(config())), curves(), MIXED) == {}


def test_a_lasting_cause_is_said_after_some_steps_and_again_much_later():
    metrics = curves(steps=70, reward__mean=[0.0] * 70, reward__flat_groups=[12.0] * 70)
    lines = said(Watch(recipe_of(config())), metrics, FLAT)
    assert list(lines) == [PATIENCE, PATIENCE + REMIND_STEPS]
    assert lines[PATIENCE].startswith("diagnosis: In 100% of the groups every rollout has the least reward")
    assert lines[PATIENCE].endswith("(all_wrong)")
    assert "\n" not in lines[PATIENCE]


def test_a_cause_that_does_not_last_is_not_said():
    watch = Watch(recipe_of(config()))
    clipped = curves(trainer__clip_fraction=[0.01] * 10 + [0.9] * 2 + [0.01] * 28)
    assert said(watch, clipped, MIXED) == {}


def test_a_collapse_late_in_a_long_run_is_seen_soon():
    steps = 300
    metrics = curves(
        steps=steps,
        reward__mean=[*noisy(0.3, 0.8, 0.02, steps=250), *[0.0] * 50],
        trainer__entropy=[*noisy(0.6, 0.3, 0.005, steps=250), *[4.0] * 50],
    )
    lines = said(Watch(recipe_of(config())), metrics, MIXED)
    assert any("learning_rate_too_high" in line for line in lines.values())
    assert 250 < min(lines) < 290


def test_a_step_costs_little_and_memory_is_bounded():
    watch, metrics = Watch(recipe_of(config())), rows(curves(steps=200))
    some = groups(0, MIXED, count=16)
    for row in metrics[:130]:
        watch.add(row.step, row.metrics, some)
    began = time.thread_time()
    for row in metrics[130:160]:
        watch.add(row.step, row.metrics, some)
    seconds = (time.thread_time() - began) / 30
    tracemalloc.start()
    for row in metrics[160:]:
        watch.add(row.step, row.metrics, some)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1, seconds  # 128 rollouts a step; about 10 ms on a free core
    assert peak < 4e6, peak
