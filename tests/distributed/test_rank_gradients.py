"""The gradients of two ranks are those of a plain loop, found by the probe as in one process."""

import numpy as np
import pytest
from expert_toys import make_experts
from group_toys import assert_same_weights, group_of, make_plan, make_toy, one_process

from sharpen.config.load import resolve
from sharpen.config.trainer import LoraConfig
from sharpen.evidence.certificate.gradient_probe import probe_gradients

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("multi_step_grpo", {}),
        ("multi_step_grpo", {"dtype": "bfloat16", "gradient_checkpointing": True}),
        ("multi_step_grpo", {"lora": LoraConfig(rank=3)}),
        ("ppo", {}),
        ("reinforce", {"dtype": "bfloat16"}),
    ],
)
def test_two_ranks_compute_the_gradients_of_a_plain_loop(algorithm, given, tmp_path):
    """Red when gradients are averaged over the ranks (`set_gradient_divide_factor` in `sharding.shard` left out)."""
    toy = make_toy(tmp_path / "model")
    if algorithm == "reinforce":  # by a mixture of experts
        make_experts("qwen3_moe").save_pretrained(toy.folder)
    plan = make_plan(toy, algorithm=algorithm, **given)
    settings = {f"trainer.{name}": one for name, one in plan.config.model_dump(exclude_unset=True).items()}
    config = resolve(
        None,
        {
            "model.model_path": str(toy.folder),
            "model.max_model_len": 64,
            "train_dataset.path": "tasks.jsonl",
            "algorithm.algorithm_type": algorithm,
            **settings,
        },
    ).config
    group, one = group_of(plan), one_process(plan)
    found = probe_gradients(config, toy.folder, group)
    assert not found.not_probed
    assert not found.problem, found.line
    assert found.gaps
    assert group.version == 0
    assert_same_weights(one, group, absolute=0.0)
    own = one.gradients(toy.experiences)
    both = group.gradients(toy.experiences)
    assert own.policy.keys() == both.policy.keys()
    for name, gradient in own.policy.items():
        np.testing.assert_allclose(both.policy[name], gradient, atol=0.05 if "dtype" in given else 2e-6, err_msg=name)
