"""A recurrent layer computed in pieces, each from the state behind the one before, equals one computed at once."""

import pytest
import torch
from hybrid_toys import HYBRIDS, make_hybrid
from trainer_toys import make_model

from sharpen.models.recurrent import join_states, mixers_of, replace_forward, row_of

CONTINUED = [family for family in HYBRIDS if family != "jamba"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_each_family_has_one_mixer_but_falcon_which_has_one_in_each_layer(family):
    mixers = mixers_of(make_hybrid(family))
    assert [mixer.layer_index for mixer in mixers] == ([0, 1] if family == "falcon_h1" else [0])


def test_an_attention_model_has_no_mixer():
    assert mixers_of(make_model("qwen3")) == []


@pytest.mark.parametrize("family", CONTINUED)
def test_pieces_give_what_the_whole_gives(family):
    """Pieces longer and shorter than the convolution, and a last one of a single token.

    Break: in `_Carrier.update_conv_state` return `conv_states` alone, or in `run` leave out `_limited_step`.
    """
    mixer = mixers_of(make_hybrid(family))[0]
    assert mixer.continues
    hidden_BTC = torch.randn(2, 12, 32)
    with torch.no_grad():
        expected_BTC, _ = mixer.run(hidden_BTC, {})
        own_BTC = mixer.forward(hidden_BTC)
        torch.testing.assert_close(expected_BTC, own_BTC[0] if isinstance(own_BTC, tuple) else own_BTC)
        states, parts = {}, []
        for piece_BTC in hidden_BTC.split([2, 6, 2, 1, 1], dim=1):
            part_BTC, states = mixer.run(piece_BTC, states)
            parts.append(part_BTC)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected_BTC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CONTINUED)
def test_the_gradient_goes_back_through_the_state(family):
    """Break: hand out detached states in `_Carrier`."""
    mixer = mixers_of(make_hybrid(family))[0]
    hidden_BTC = torch.randn(1, 9, 32, requires_grad=True)
    weights_BTC = torch.randn(1, 9, 32)
    weights_BTC[:, :5] = 0  # so that the first piece matters through its state alone
    (expected_BTC,) = torch.autograd.grad((mixer.run(hidden_BTC, {})[0] * weights_BTC).sum(), hidden_BTC)
    _, states = mixer.run(hidden_BTC[:, :5], {})
    output_BTC, _ = mixer.run(hidden_BTC[:, 5:], states)
    (grad_BTC,) = torch.autograd.grad((output_BTC * weights_BTC[:, 5:]).sum(), hidden_BTC)
    assert expected_BTC[:, :5].abs().max() > 1e-3
    torch.testing.assert_close(grad_BTC, expected_BTC, atol=1e-5, rtol=1e-4)


def test_mamba_1_cannot_go_on_from_a_state():
    assert not mixers_of(make_hybrid("jamba"))[0].continues


def test_states_are_joined_and_taken_apart_by_sequence():
    mixer = mixers_of(make_hybrid("granitemoehybrid"))[0]
    hidden_BTC = torch.randn(3, 8, 32)
    with torch.no_grad():
        expected_BTC, _ = mixer.run(hidden_BTC, {})
        _, states = mixer.run(hidden_BTC[:, :5], {})
        swapped = join_states([row_of(states, 2), row_of(states, 0)])
        output_BTC, _ = mixer.run(hidden_BTC[[2, 0], 5:], swapped)
    torch.testing.assert_close(output_BTC, expected_BTC[[2, 0], 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba"])
def test_a_forward_pass_with_the_keyword_is_ours_and_every_other_its_own(family):
    """Jamba's layers do not pass keyword arguments on to their mixers."""
    model = make_hybrid(family)
    (mixer,) = mixers_of(model)
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    seen = []

    def compute(mixer, hidden_1NC, value):
        seen.append(value)
        return mixer.run(hidden_1NC, {})[0]

    with torch.no_grad():
        expected = model(input_ids=ids_BT, use_cache=False).logits
        replace_forward(mixer, "tree", compute)
        torch.testing.assert_close(model(input_ids=ids_BT, use_cache=False).logits, expected)
        assert seen == []
        torch.testing.assert_close(model(input_ids=ids_BT, use_cache=False, tree="a tree").logits, expected)
        assert seen == ["a tree"]
        torch.testing.assert_close(model(input_ids=ids_BT, use_cache=False).logits, expected)
        assert seen == ["a tree"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_step_moves_the_states_it_is_given(family):
    """Several single tokens in place, in views of larger tensors, give what the whole gives, and the other rows stay.

    Break: in `Mixer.step` do not copy `after` back, or let `recording` be True and nothing be copied.
    """
    mixer = mixers_of(make_hybrid(family))[0]
    hidden_BTC = torch.randn(2, 9, 32)
    with torch.inference_mode():
        expected_BTC, last = mixer.run(hidden_BTC, {})
        _, states = mixer.run(hidden_BTC[:, :5], {})
        pool = {key: torch.cat([state, torch.ones_like(state[:1])]) for key, state in states.items()}
        first = {key: tensor[:2] for key, tensor in pool.items()}
        steps = [mixer.step(hidden_BTC[:, [t]], first) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected_BTC[:, 5:], atol=1e-5, rtol=1e-5)
    for key, tensor in pool.items():
        torch.testing.assert_close(tensor[:2], last[key], atol=1e-5, rtol=1e-5)
        assert (tensor[2] == 1).all()
