"""Training steps of two processes are those of one: losses, metrics, weights; whatever the work and the model."""

import pytest
from group_toys import assert_same_numbers, assert_same_weights, group_of, make_plan, make_toy, one_process

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {}),
        ("llama", {"gradient_checkpointing": True, "num_minibatches": 2, "epochs": 2}),
        ("mistral", {"max_tokens_per_micro_batch": 2000}),
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
