"""Merging calls into sequences: ids, masks and logprobs are the calls' own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from experience_builders import call_trees, make_call, make_rollout, two_turns
from hypothesis import given, settings

from sharpen.errors import CallError, SamplingError
from sharpen.learning.experience.merge import merge
from sharpen.types import Call, CallStatus, Picture, PictureSpan, Sampling, Supports


def test_two_turns_become_one_sequence() -> None:
    (experience,) = merge(two_turns())
    assert experience.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert experience.loss_mask_T.tolist() == [False, False, False, True, True, False, False, True]
    assert experience.logprobs_T.tolist() == [0, 0, 0, -0.5, -1.0, 0, 0, -0.5]
    assert experience.versions_T.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert experience.calls_T.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert experience.temperatures_T.tolist() == [1.0] * 8
    assert not experience.advantages_T.any()
    assert not experience.weights_T.any()
    assert (experience.rollout_id, experience.group_id, experience.task_id) == ("g/0", "g", "task-g")


def test_temperatures_are_those_of_the_calls() -> None:
    calls = [
        make_call(0, [1], [2], sampling=Sampling(temperature=0.5)),
        make_call(1, [1, 2, 3], [4], parent=0, sampling=Sampling(temperature=2.0)),
    ]
    (experience,) = merge(make_rollout(calls))
    assert experience.temperatures_T.tolist() == [1.0, 0.5, 1.0, 2.0]


def test_a_call_without_parent_starts_a_new_sequence() -> None:
    first, second = merge(two_turns(merged=False))
    assert first.ids_T.tolist() == [1, 2, 3, 4, 5]
    assert second.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert second.loss_mask_T.tolist() == [False] * 7 + [True]


def test_a_fork_trains_the_shared_call_once() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [1, 2, 3], [4], parent=0), make_call(2, [1, 2, 5], [6], parent=0)]
    first, second = merge(make_rollout(calls))
    assert first.ids_T.tolist() == [1, 2, 3, 4]
    assert first.calls_T.tolist() == [-1, 0, -1, 1]
    assert second.ids_T.tolist() == [1, 2, 5, 6]
    assert second.calls_T.tolist() == [-1, -1, -1, 2]
    assert second.logprobs_T.tolist() == [0, 0, 0, -0.5]


def test_what_the_environment_answered_is_in_one_sequence() -> None:
    """The tool's 3 and 5, after the shared call; 7 after a greedy call, whose own 6 is the model's. Red when the tokens
    of all calls of a path count: 3 would be in two sequences."""
    calls = [
        make_call(0, [1], [2]),
        make_call(1, [1, 2, 3], [4], parent=0),
        make_call(2, [1, 2, 3, 4, 5], [6], parent=1, sampling=Sampling(temperature=0.0)),
        make_call(3, [1, 2, 3, 4, 5, 6, 7], [8], parent=2),
        make_call(4, [1, 2, 3, 4, 9], [10], parent=1),
    ]
    first, second = merge(make_rollout(calls))
    assert first.shown_T is not None
    assert second.shown_T is not None
    assert first.ids_T[first.shown_T].tolist() == [3, 7]
    assert second.ids_T[second.shown_T].tolist() == [9]
    (alone,) = merge(make_rollout(calls[:1]))
    assert alone.shown_T is not None
    assert not alone.shown_T.any()


def test_choices_of_one_request_are_sequences_of_their_own() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [1], [3])]
    assert [experience.ids_T.tolist() for experience in merge(make_rollout(calls))] == [[1, 2], [1, 3]]


def test_greedy_calls_are_context() -> None:
    calls = [
        make_call(0, [1], [2], sampling=Sampling(temperature=0.0)),
        make_call(1, [1, 2, 3], [4], parent=0),
        make_call(2, [1, 2, 3, 4, 5], [6], parent=1, sampling=Sampling(temperature=0.0)),
    ]
    (experience,) = merge(make_rollout(calls))
    assert experience.ids_T.tolist() == [1, 2, 3, 4], "a tail without loss is not computed"
    assert experience.calls_T.tolist() == [-1, -1, -1, 1]


def test_a_rollout_of_greedy_calls_has_no_sequence() -> None:
    assert merge(make_rollout([make_call(0, [1], [2], sampling=Sampling(temperature=0.0))])) == []


def test_trap_27_abandoned_calls_are_not_trained() -> None:
    """Neither by itself nor as what a later call continues. Red when `merge` does not ask `Call.trainable`, where it
    cuts a path's tail or in `carrying`."""
    calls = [make_call(0, [1], [2], status=CallStatus.ABANDONED), make_call(1, [1], [3])]
    (experience,) = merge(make_rollout(calls))
    assert experience.ids_T.tolist() == [1, 3]
    calls = [make_call(0, [1], [2], status=CallStatus.ABANDONED), make_call(1, [1, 2, 3], [4], parent=0)]
    (experience,) = merge(make_rollout(calls))
    assert experience.loss_mask_T.tolist() == [False, False, False, True]


def test_trap_07_an_end_token_that_the_template_added_carries_no_loss() -> None:
    """The first call was cut at its token limit; the next prompt closes its turn with an end token (9).

    Red when `_sequence` marks everything up to the next prompt.
    """
    calls = [make_call(0, [1], [2, 3], finish_reason="length"), make_call(1, [1, 2, 3, 9, 5], [6, 9], parent=0)]
    (experience,) = merge(make_rollout(calls))
    assert experience.ids_T[experience.loss_mask_T].tolist() == [2, 3, 6, 9]


def merged_calls(calls: list[Call]) -> dict[int, list[int]]:
    """By call: the ids that carry loss, over all sequences."""
    found: dict[int, list[int]] = {}
    for experience in merge(make_rollout(calls)):
        for index, token in zip(experience.calls_T.tolist(), experience.ids_T.tolist(), strict=True):
            if index >= 0:
                found.setdefault(index, []).append(token)
    return found


@settings(max_examples=150, deadline=None)
@given(call_trees())
def test_trap_01_trained_ids_are_the_sampled_ids(calls: list[Call]) -> None:
    """Every trainable call's ids, exactly once, in order. Red when `covered` is not kept (forks train twice)."""
    expected = {call.index: call.sampled_ids_S.tolist() for call in calls if call.trainable}
    assert merged_calls(calls) == expected


@settings(max_examples=150, deadline=None)
@given(call_trees())
def test_trap_04_every_sequence_is_the_engines_own_prompt_and_sample(calls: list[Call]) -> None:
    """The ids before a loss token are those that the engine sampled it after. Red when a separator is dropped."""
    for experience in merge(make_rollout(calls)):
        for index in np.unique(experience.calls_T[experience.loss_mask_T]):
            call = calls[index]
            end = len(call.prompt_ids_P) + len(call.sampled_ids_S)
            history = [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]
            assert experience.ids_T[:end].tolist() == history


@settings(max_examples=150, deadline=None)
@given(call_trees())
def test_trap_06_loss_is_on_sampled_tokens_only(calls: list[Call]) -> None:
    """Red when the mask of `_sequence` starts one token early."""
    for experience in merge(make_rollout(calls)):
        mask_T = experience.loss_mask_T
        assert mask_T.any()
        assert (mask_T == (experience.calls_T >= 0)).all()
        assert (experience.versions_T[~mask_T] == -1).all()
        assert (experience.logprobs_T[~mask_T] == 0).all()
        assert (experience.temperatures_T[~mask_T] == 1).all()
        for index in np.unique(experience.calls_T[mask_T]):
            of_call_T = experience.calls_T == index
            np.testing.assert_array_equal(np.flatnonzero(of_call_T)[0], len(calls[index].prompt_ids_P))
            np.testing.assert_array_equal(experience.logprobs_T[of_call_T], calls[index].logprobs_S.astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_trap_15_a_logprob_that_is_not_finite_is_refused(value: float) -> None:
    """Red when `_check_call` replaces it by a number."""
    call = make_call(0, [1], [2, 3], logprobs_S=np.array([-1.0, value], dtype=np.float32))
    with pytest.raises(CallError, match="call 0 of rollout g/0: the logprob of sampled token 1 is"):
        merge(make_rollout([call]))


def test_trap_15_missing_logprobs_are_refused() -> None:
    """Red when `_check_call` does not compare lengths (numpy would broadcast the one)."""
    call = make_call(0, [1], [2, 3], logprobs_S=np.array([-1.0], dtype=np.float32))
    with pytest.raises(CallError, match="2 sampled tokens, but 1 logprobs"):
        merge(make_rollout([call]))


def test_trap_11_a_truncated_distribution_is_refused_with_the_setting() -> None:
    """Red when `merge` does not look at `Call.has_ratio`."""
    rollout = make_rollout([make_call(0, [1], [2], sampling=Sampling(top_p=0.9, top_k=20, min_p=0.1))])
    with pytest.raises(SamplingError, match=r"call 0 of rollout g/0 was sampled with top_p=0\.9, top_k=20, min_p=0\.1"):
        merge(rollout)
    greedy = make_call(0, [1], [2], sampling=Sampling(temperature=0.0, top_p=0.9))
    assert merge(make_rollout([greedy])) == []


def test_without_a_ratio_truncated_calls_are_merged_and_marked() -> None:
    calls = [
        make_call(0, [1], [2, 3], sampling=Sampling(top_k=20)),
        make_call(1, [1, 2, 3, 9], [4], parent=0),
    ]
    (merged,) = merge(make_rollout(calls), needs_ratio=False)
    assert merged.truncated_calls == (0,)
    assert merged.truncated_T.tolist() == [False, True, True, False, False]


def test_a_recorded_support_goes_with_its_call() -> None:
    """Red when `merge` takes supports of calls without loss, or marks a call that has them."""
    supports = Supports(vocab_size=30, sizes_S=np.array([1, 1], np.int32), packed=b"\2\3")
    calls = [
        make_call(0, [1], [2, 3], sampling=Sampling(top_k=20), supports=supports),
        make_call(1, [1, 2, 3, 9], [4], parent=0),
    ]
    (merged,) = merge(make_rollout(calls))
    assert merged.supports == {0: supports}
    assert not merged.truncated_T.any()


def test_a_parent_whose_ids_differ_is_refused() -> None:
    calls = [make_call(0, [1], [2]), make_call(1, [1, 9, 3], [4], parent=0)]
    with pytest.raises(CallError, match="names call 0 as its parent, but its prompt does not start"):
        merge(make_rollout(calls))
    with pytest.raises(CallError, match="not earlier"):
        merge(make_rollout([make_call(0, [1], [2], parent=0)]))


def _seeing(index: int, prompt: list[int], sampled: list[int], *seen: tuple[bytes, int], **fields: Any) -> Call:
    """A call with images of one token each, by their content and place."""
    spans = tuple(PictureSpan(picture=Picture.of(data), start=start, length=1) for data, start in seen)
    return replace(make_call(index, prompt, sampled, **fields), pictures=spans)


def test_a_sequence_has_the_images_of_its_last_call() -> None:
    first = _seeing(0, [9, 1], [2], (b"a", 0))
    second = _seeing(1, [9, 1, 2, 9], [4], (b"a", 0), (b"b", 3), parent=0)
    (experience,) = merge(make_rollout([first, second]))
    assert experience.pictures == second.pictures


@pytest.mark.parametrize("seen", [[], [(b"b", 0)], [(b"a", 0), (b"a", 1)]])
def test_a_child_must_begin_with_the_images_of_its_parent(seen: list[tuple[bytes, int]]) -> None:
    """Their token ids are the same."""
    calls = [_seeing(0, [9, 9], [2], (b"a", 0)), _seeing(1, [9, 9, 2, 9], [4], *seen, parent=0)]
    with pytest.raises(CallError, match="does not start with that call's images"):
        merge(make_rollout(calls))
