"""Routers of mixtures of experts: what they choose is recorded, and replayed exactly, for every family (TRAPS 30)."""

import pytest
import torch
from expert_toys import EXPERTS, make_experts
from trainer_toys import make_model

from sharpen.models.routing import Routing, routing_of

IDS = torch.arange(3, 43)[None]


def logits(model, routing, routes):
    with routing.replaying(routes):
        return model(input_ids=IDS, use_cache=False).logits


def record(model, routing):
    with torch.no_grad(), routing.recording() as recorded:
        own = model(input_ids=IDS, use_cache=False).logits
        routing.check_all_chose()
        return own, recorded.routes_NLK


@pytest.mark.parametrize("family", EXPERTS)
def test_recorded_experts_give_the_same_logits_bit_for_bit_and_others_do_not(family):
    model = make_experts(family)
    routing = Routing(model)
    own, routes_NLK = record(model, routing)
    assert routes_NLK.shape == (40, routing.shape.num_layers, routing.shape.top_k)
    with torch.no_grad():
        assert torch.equal(logits(model, routing, routes_NLK), own)
        other = logits(model, routing, (routes_NLK + 1) % routing.shape.num_experts)
        assert (other - own).abs().max() > 1e-3
        assert torch.equal(logits(model, routing, None), own)


@pytest.mark.parametrize("family", EXPERTS)
def test_gradients_reach_the_router_through_the_weights_of_replayed_experts(family):
    """Compared with finite differences. Experts compute in float64, most routers' softmax in float32."""
    model = make_experts(family, torch.float64)
    model.set_experts_implementation("eager")
    routing = Routing(model)
    routes_NLK = (record(model, routing)[1] + 1) % routing.shape.num_experts
    weights = [
        parameter for name, parameter in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))
    ]
    direction = torch.randn_like(weights[-1], generator=torch.Generator().manual_seed(0))

    def loss():
        return 1e3 * logits(model, routing, routes_NLK).square().mean()

    loss().backward()
    slope = float((weights[-1].grad * direction).sum())
    with torch.no_grad():
        weights[-1].add_(2e-3 * direction)
        above = loss()
        weights[-1].sub_(4e-3 * direction)
        below = loss()
    assert float(above - below) / 4e-3 == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_a_checkpointed_layer_chooses_the_same_experts_when_it_is_computed_again():
    """Break: leave `checkpoint_contexts` out."""
    gradients = []
    for checkpointing in (False, True):
        model = make_experts("qwen3_moe")
        routing = Routing(model)
        routes_NLK = (record(model, routing)[1] + 1) % 8
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": routing.checkpoint_contexts})
            model.train()
        logits(model, routing, routes_NLK).square().mean().backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_dense_model_has_no_routing():
    assert routing_of(make_model("qwen3")) is None
