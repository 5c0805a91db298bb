"""Weights on their way to an explorer: the newest, whole, and by a name that no other weights have."""

import pytest
import torch

from sharpen.errors import CheckpointError
from sharpen.placement.exchange.weights import PublishedWeights, WeightPublisher, read_note

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def test_the_explorer_gets_the_newest_weights_once(store):
    weights = PublishedWeights(store)
    assert weights.newer() is None
    publisher = WeightPublisher(store, step=0, version=0)
    publisher.publish(3, 1, TENSORS)
    publisher.publish(6, 2, {name: tensor + 1 for name, tensor in TENSORS.items()})
    found = weights.newer()
    assert found is not None
    assert torch.equal(found["a"], TENSORS["a"] + 1)
    assert found["b"].dtype == torch.bfloat16
    assert (weights.version, weights.step) == (6, 2)
    assert weights.newer() is None


def test_tied_weights_arrive_under_both_names(store):
    tied = torch.arange(4.0)
    WeightPublisher(store, step=0, version=0).publish(0, 0, {"head": tied, "embedding": tied})
    found = PublishedWeights(store).newer()
    assert found is not None
    assert torch.equal(found["head"], tied)
    assert torch.equal(found["embedding"], tied)


def test_the_newest_weights_stay_and_the_last_but_one_which_may_be_read(store):
    publisher = WeightPublisher(store, step=0, version=0)
    for step in range(5):
        publisher.publish(step, step, TENSORS)
    session = publisher.note.session
    assert store.names("weights") == [f"weights/{session}-{step}.safetensors" for step in (3, 4)]


def test_a_session_that_begins_again_takes_back_what_it_lost(store):
    """The first session published up to version 5; its checkpoint is of version 3. Red without the spans."""
    first = WeightPublisher(store, step=0, version=0)
    first.publish(5, 5, TENSORS)
    one = first.note.session
    second = WeightPublisher(store, step=3, version=3)
    second.publish(3, 3, TENSORS)
    note = read_note(store)
    assert note is not None
    assert [note.leads_here(one, version) for version in (0, 3, 4, 5)] == [True, True, False, False]
    assert note.leads_here(second.note.session, 9)
    assert note.leads_here("", 0)
    assert not note.leads_here("unknown", 0)


@pytest.mark.parametrize("both_began_at_once", [True, False])
def test_of_two_trainers_on_one_exchange_the_first_ends_and_the_note_stays(store, both_began_at_once):
    """Red before: each replaced the other's note, so that servers removed sessions that the other's weights had
    sampled, and both trained every batch."""
    first = WeightPublisher(store, step=0, version=0)
    if not both_began_at_once:
        first.publish(0, 0, TENSORS)
    second = WeightPublisher(store, step=0, version=0)
    if both_began_at_once:
        first.publish(0, 0, TENSORS)
        first, second = second, first
    else:
        second.publish(0, 0, TENSORS)
    for use in (lambda: first.publish(1, 1, TENSORS), lambda: first.trained(1)):
        with pytest.raises(CheckpointError, match="another trainer uses the same exchange") as found:
            use()
        assert store.where in str(found.value)
        assert "mode both" in str(found.value)
    assert first.note.trained == 0
    second.publish(1, 1, TENSORS)
    assert read_note(store) == second.note


def test_the_note_of_a_trainer_may_be_deleted(store):
    publisher = WeightPublisher(store, step=0, version=0)
    publisher.trained(1)
    store.remove("trainer.json")
    publisher.trained(2)
    assert read_note(store) == publisher.note


def test_equal_versions_of_two_sessions_are_different_weights(store):
    weights = PublishedWeights(store)
    WeightPublisher(store, step=0, version=0).publish(5, 5, TENSORS)
    assert weights.newer() is not None
    WeightPublisher(store, step=3, version=3).publish(5, 5, TENSORS)
    assert weights.newer() is not None


@pytest.mark.parametrize("trained", [1, 4])
def test_steps_without_new_weights_are_told(store, trained):
    publisher = WeightPublisher(store, step=0, version=0)
    publisher.publish(0, 0, TENSORS)
    publisher.trained(trained)
    note = read_note(store)
    assert note is not None
    assert (note.version, note.step, note.trained) == (0, 0, trained)
