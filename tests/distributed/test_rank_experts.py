"""A mixture of experts on two ranks, which each hold a share of every layer's experts, trains as in one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from expert_toys import copy_of, make_experts
from group_toys import Toy, assert_same_numbers, assert_same_weights, group_of, make_plan, one_process
from trainer_toys import make_experiences

from sharpen.config.trainer import LoraConfig
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.models.routing import Routing, to_array

pytestmark = pytest.mark.distributed


def with_other_experts(module):
    """Rollouts with experts that the model would not choose, and the logprobs that these give."""
    model = copy_of(module)
    routing, found = Routing(model), []
    for one in make_experiences():
        ids = torch.from_numpy(one.ids_T.astype(np.int64))
        with torch.no_grad(), routing.recording() as recorded:
            model(input_ids=ids[None, :-1], use_cache=False)
            routes_NLK = to_array((recorded.routes_NLK + 3) % 8, routing.shape)
        found.append(replace(one, routes_NLK=routes_NLK))
    trained, scored = TrainedModel(copy_of(module), compute_dtype=torch.float32), []
    for one in found:
        with torch.no_grad():
            logprobs_E = trained.score(pack([one], 1000)[0]).logprobs_E
        logprobs_T = one.logprobs_T.copy()
        logprobs_T[one.loss_mask_T] = logprobs_E.numpy()
        scored.append(replace(one, logprobs_T=logprobs_T))
    return scored


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"gradient_checkpointing": True}),
        ("qwen3_moe", {"gradient_checkpointing": True, "balance_coef": 0.5}),
        ("qwen3_moe", {"gradient_checkpointing": True, "lora": LoraConfig(rank=2, experts=True)}),
        ("llama4_text", {"gradient_checkpointing": True}),
    ],
)
def test_same_losses_and_weights_as_one_process(tmp_path, family, config):
    """The balance loss is of the whole update on each rank. Red when a layer that is gathered again for the backward
    pass chooses experts by itself."""
    module = make_experts(family)
    module.save_pretrained(tmp_path / "model")
    toy = Toy(folder=tmp_path / "model", experiences=with_other_experts(module))
    plan = make_plan(toy, **config)
    one, group = one_process(plan), group_of(plan)
    assert_same_weights(one, group, absolute=0.0)
    first = one.train_step(toy.batches())
    assert first.values["logprob_gap_max"] < 1e-4
    assert_same_numbers(first, group.train_step(toy.batches()))
    assert_same_weights(one, group)
