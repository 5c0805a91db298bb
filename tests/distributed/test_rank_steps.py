"""Training steps of two processes are those of one: losses, metrics, weights; whatever the work and the model."""

from dataclasses import replace

import numpy as np
import pytest
from group_toys import assert_same_numbers, assert_same_weights, group_of, make_plan, make_toy, one_process

from sharpen.config.trainer import LoraConfig
from sharpen.errors import TrainingError
from sharpen.learning.trainer.work import Minibatch

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}),
        ("llama", {"gradient_checkpointing": True, "num_minibatches": 2, "epochs": 2}),
        ("mistral", {"max_tokens_per_micro_batch": 2000}),
        ("bamba", {"gradient_checkpointing": True}),
    ],
)
def test_same_losses_and_weights_as_one_process(tmp_path, family, config):
    """Three steps with a KL reference: tied and untied, a sliding window, several updates a step, fewer packs than
    ranks (at 2000 tokens all rollouts are one pack, which is divided so that both ranks have one).

    Red when gradients are averaged over the ranks (`set_gradient_divide_factor` in `sharding.shard` left out).
    """
    toy = make_toy(tmp_path / "model", family)
    plan = make_plan(toy, loss={"kl": "k3", "kl_coef": 0.1}, **config)
    one = one_process(plan)
    batches = toy.batches(config.get("num_minibatches", 1))
    group = group_of(plan)
    assert group.version == 0
    assert_same_weights(one, group, absolute=0.0)
    for _ in range(3):
        assert_same_numbers(one.train_step(batches), group.train_step(batches))
        assert_same_weights(one, group)
    assert group.version == one.version == 3 * len(batches) * config.get("epochs", 1)


@pytest.mark.parametrize("kind", [{}, {"algorithm": "ppo"}, {"lora": LoraConfig(rank=3)}])
def test_a_step_that_all_ranks_fail_alike_is_undone_in_each(tmp_path, kind):
    """In its second update, before and after there are moments; then it trains as if nothing had been.

    Red when `back_to` (group.py) asks one rank alone, or `_live` (step_start.py) takes whole tensors for parts."""
    toy = make_toy(tmp_path / "model")
    plan = make_plan(toy, num_minibatches=2, **kind)
    disturbed, halves = group_of(plan), toy.batches(2)
    first = halves[1].experiences[0]
    infinite = replace(first, weights_T=np.where(first.loss_mask_T, np.inf, 0).astype(np.float32))
    broken = [halves[0], Minibatch(experiences=[infinite, *halves[1].experiences[1:]])]
    for number in range(2):
        with pytest.raises(TrainingError):
            disturbed.train_step(broken)
        assert disturbed.version == 2 * number + 1
        assert disturbed.back_to(2 * number)
        assert disturbed.version == 2 * number
        assert not disturbed.back_to(7)
        disturbed.train_step(halves)
    disturbed.save(tmp_path / "disturbed", {})
    quiet = group_of(plan)
    for _ in range(2):
        quiet.train_step(halves)
    quiet.save(tmp_path / "quiet", {})
    files = [path.relative_to(tmp_path / "quiet") for path in (tmp_path / "quiet").rglob("*.safetensors")]
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "disturbed" / file).read_bytes() == (tmp_path / "quiet" / file).read_bytes(), file
