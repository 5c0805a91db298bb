"""Activations on the host: nothing of a layer's input stays on the GPU between the passes, and gradients are equal."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from trainer_toys import make_experiences, make_model

from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offloads", [False, True])
def test_inputs_of_layers_leave_the_gpu(offloads):
    policy = TrainedModel(
        make_model("qwen3", torch.float32).cuda(),
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=True,
        offload_activations=offloads,
    )
    held: list[StorageWeakRef] = []
    layer = policy.module.model.layers[1]
    layer.register_forward_pre_hook(lambda _, args: held.append(StorageWeakRef(args[0].untyped_storage())))
    (packed,) = pack(make_experiences(num_groups=1), 10_000)
    logprobs_E = policy.score(packed).logprobs_E
    assert [ref.expired() for ref in held] == [offloads]
    logprobs_E.sum().backward()
    assert all(parameter.grad is not None for _, parameter in policy.parameters())
