"""Sessions on their way to the trainer: which are compared, which cannot be trained, and what survives a restart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sharpen.learning.schedule import Schedule
from sharpen.placement.exchange.batch import SESSIONS, ExploredBatch
from sharpen.placement.exchange.store import FolderStore
from sharpen.placement.exchange.weights import SessionSpan, TrainerNote, read_note
from sharpen.run.receiver import Inbox, Receiver
from sharpen.serve.learning import Sizes, choose, make_batch, teaches, too_old
from sharpen.serve.visit import Visit, _shifted
from sharpen.types import Call, CallStatus, Sampling, Task

SIZES = Sizes(batch_size=2, group_size=2)
NOTE = TrainerNote(
    session="now", version=4, step=4, trained=4, spans=(SessionSpan(session="old", last=2), SessionSpan(session="now"))
)


class Compared:
    """What a batch asks of an algorithm."""

    needs_ratio = True
    needs_reward = True
    group_relative = True
    needs_baseline = False
    std_threshold = None

    class shaping:
        @staticmethod
        def taking_part(rollouts):
            return rollouts

        @staticmethod
        def keeps(rewards):
            return True


def call(index: int = 0, **changes) -> Call:
    ids = np.arange(3, dtype=np.int32)
    made = Call(
        index=index,
        parent=None,
        prompt_ids_P=ids,
        sampled_ids_S=ids,
        logprobs_S=np.zeros(3, np.float32),
        versions_S=np.zeros(3, np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=({"role": "user", "content": "hi"},),
        tools=(),
        response={"role": "assistant", "content": "yes"},
    )
    return replace(made, **changes)


def visit(task: str, *calls: Call, reward: float = 1.0, weights=(("", 0),)) -> Visit:
    made = Visit.new(Task(id=task, index=0, row={"question": task}), 0)
    made.before, made.reward, made.ended, made.weights = calls or (call(),), reward, True, set(weights)
    return made


def test_the_oldest_sessions_of_a_task_are_a_group_and_the_first_whole_groups_a_batch():
    a, b, c = ([visit(task) for _ in range(3)] for task in "abc")
    assert choose([a[0], b[0], c[0], a[1]], SIZES) is None
    assert choose([a[0], b[0], c[0], a[1], a[2], c[1], b[1]], SIZES) == [[a[0], a[1]], [c[0], c[1]]]
    assert choose([a[0], a[1], a[2], b[0]], Sizes(batch_size=3, group_size=1)) == [[a[0]], [a[1]], [a[2]]]


def test_a_batch_names_its_sessions_and_all_weights_and_reads_back():
    chosen = [[visit("a", reward=1.0), visit("a", reward=0.0)], [visit("a"), visit("a", weights=[("old", 2)])]]
    made = make_batch(chosen, 7, Compared(), SIZES, generate_s=1.5)
    back = ExploredBatch.from_bytes(made.to_bytes())
    assert [group.id for group in back.rollouts.groups] == ["step_7/a", "step_7/a#2"]
    assert [one.id for one in back.rollouts.groups[0].rollouts] == ["step_7/a/0", "step_7/a/1"]
    assert back.sampled_by == (("", 0), ("old", 2))
    assert back.order[SESSIONS] == [one.id for members in chosen for one in members]
    assert back.rollouts.usable == 2


def test_what_cannot_be_trained_is_told():
    def reason(one: Visit, max_staleness: float = 10) -> str:
        return too_old(one, NOTE, max_staleness)

    assert reason(visit("a")) == ""
    assert reason(visit("a", weights=[("old", 2), ("now", 4)])) == ""
    assert "interrupted" in reason(visit("a", weights=[("old", 3)]))
    assert "max_staleness" in reason(visit("a", weights=[("now", 3)]), max_staleness=0)
    assert reason(visit("a", weights=[])) == ""
    assert teaches(visit("a"), needs_ratio=True)
    assert not teaches(visit("a", call(status=CallStatus.ABANDONED)), needs_ratio=True)
    assert not teaches(visit("a", call(sampling=Sampling(top_p=0.9))), needs_ratio=True)
    assert teaches(visit("a", call(sampling=Sampling(top_p=0.9))), needs_ratio=False)


def test_truncated_calls_and_unrated_ones_do_not_train():
    one = visit("a", call(0), call(1, sampling=Sampling(top_p=0.5)), call(2))
    kept = one.rollout("r", "g", 0, needs_ratio=True).calls
    assert [made.status for made in kept] == [CallStatus.USED, CallStatus.LEFT_OUT, CallStatus.USED]
    one.call_rewards = {2: 0.5}
    kept = one.rollout("r", "g", 0, needs_ratio=False).calls
    assert [made.status for made in kept] == [CallStatus.LEFT_OUT, CallStatus.LEFT_OUT, CallStatus.USED]


def test_a_session_survives_as_it_is():
    one = visit("a", call(0), call(1, parent=0), reward=0.25, weights=[("now", 3), ("", 0)])
    one.call_rewards, one.names = {1: 0.25}, {"ab" * 11: 1}
    back = Visit.from_bytes(one.to_bytes())
    for name in ("id", "key", "task", "opened", "used", "reward", "call_rewards", "weights", "names", "ended"):
        assert getattr(back, name) == getattr(one, name), name
    assert [made.parent for made in back.calls] == [None, 0]
    assert [made.sampled_ids_S.tolist() for made in back.calls] == [[0, 1, 2]] * 2


def test_calls_after_a_restart_have_their_place_among_all():
    moved = _shifted(call(1, parent=0, request=1), 3)
    assert (moved.index, moved.parent, moved.request) == (4, 3, 4)
    assert _shifted(call(0), 3).parent is None


class Trainer:
    """What a receiver asks of a trainer."""

    version = 3

    def state_tensors(self):
        return {"weight": torch.zeros(1)}


def test_a_trainer_refuses_a_batch_if_any_of_its_weights_is_gone(tmp_path: Path):
    store = FolderStore(tmp_path)
    inbox = Inbox(store=store, announcement=None)
    schedule = Schedule(style="fully_async", interval=1, offset=0, max_behind=99)
    receiver = Receiver(inbox, schedule, total_steps=9, display=None, trainer=Trainer(), trained=3)
    session = read_note(store).session

    def problem(*weights: tuple[str, int]) -> str:
        chosen = [[visit("a", weights=weights), visit("a")]]
        return receiver._problem(make_batch(chosen, 4, Compared(), SIZES, generate_s=0.0), 3)

    assert problem((session, 3)) == ""
    assert "interrupted" in problem((session, 3), ("gone", 2))
    receiver.close()
