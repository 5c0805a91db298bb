"""Where a step's tensors are. PyTorch's meta device stands in for a GPU: its tensors have no contents, so whatever is
read from them, or computed with a tensor of the CPU, raises."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from toy_engines import make_model, prompt_of, request

from sharpen.engine.embedded.forward import FastForward, GenericForward, kv_layout
from sharpen.engine.embedded.kv import KVPool
from sharpen.engine.embedded.scheduler import Scheduler
from sharpen.engine.embedded.slots import SlotRequest
from sharpen.engine.embedded.stepper import Stepper
from sharpen.engine.families import inspect_model

META = torch.device("meta")
SAMPLING = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 3, "min_p": 0.01},
    {"top_logprobs": 2},
]


def make_stepper(family: str, deterministic: bool) -> Stepper:
    """With one job for each way of sampling."""
    model = make_model(family).to(META)
    shape = inspect_model(model, 256)
    pool = KVPool(
        layout=kv_layout(model, shape),
        dtype=torch.float32,
        device=META,
        max_slots=8,
        max_length=256,
        budget_bytes=1 << 24,
    )
    scheduler = Scheduler(pool)
    loop = asyncio.new_event_loop()
    for number, sampling in enumerate(SAMPLING):
        asked = request(prompt_of(20 + number, number), noise=number, **sampling)
        ids_T = asked.prompt_ids.astype(np.int32)
        job = SlotRequest(request=asked, future=loop.create_future(), order=number, max_new=8, ids_T=ids_T)
        scheduler.waiting.append(job)
    loop.close()
    return Stepper(
        forward=FastForward(model, shape, 256) if shape.fast else GenericForward(model),
        scheduler=scheduler,
        device=META,
        deterministic=deterministic,
        end_ids=[0],
        vocab_size=shape.vocab_size,
        version=0,
        decode_text=None,
    )


@pytest.mark.parametrize(("family", "deterministic"), [("qwen3", False), ("qwen3", True), ("gemma3", False)])
def test_the_first_thing_that_a_step_reads_from_its_device_are_the_sampled_ids(family, deterministic):
    """Prompts, then decoding.

    Break: `bool(logits_RV.isfinite().all())` in `sample`, or a mask of `SlotAttention` made on the CPU.
    """
    stepper = make_stepper(family, deterministic)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as caught:
            stepper.step()
        assert [entry.name for entry in caught.traceback if "embedded" in entry.path.parts][-1] == "_accept"
        table = stepper._scheduler.table
        table.kv_len_S[table.active_S] = table.num_ids_S[table.active_S] - 1
