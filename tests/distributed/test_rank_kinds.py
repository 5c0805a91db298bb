"""What algorithms compute beside the policy: reference, critic, teacher, an expert's rows, entropies, adapters. Two
processes come to the numbers of one.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from group_toys import assert_same_numbers, assert_same_weights, group_of, make_plan, make_toy, one_process
from trainer_toys import SIZES, make_experience, make_model, reread
from transformers import AutoModelForCausalLM, Qwen3Config

from sharpen.config.distill import DistillConfig
from sharpen.config.run import ExpertConfig, LossConfig
from sharpen.config.trainer import CriticConfig
from sharpen.errors import ParityError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.supervised import resolve_supervised
from sharpen.learning.trainer.work import Minibatch

pytestmark = pytest.mark.distributed


def both(plan, batches, *, steps=2, relative=1e-6, absolute=2e-6, **arguments):
    """Train in one process and in two; the metrics of the last step."""
    one = one_process(plan)
    group = group_of(plan)
    for step in range(steps):
        named = {name: value + step for name, value in arguments.items()}
        found, expected = group.train_step(batches, **named), one.train_step(batches, **named)
        assert_same_numbers(expected, found, relative=relative)
        assert_same_weights(one, group, absolute=absolute)
    return expected.values


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
def test_adapters_with_a_reference(tmp_path, dtype, stored):
    """Adapters of rank 1, whose A only the first process has a part of. The reference is the policy with them switched
    off, and is computed first: they must be trained all the same. Of files in bfloat16 embeddings stay in it, and are
    shared out with a norm in fp32."""
    toy = make_toy(tmp_path / "model")
    make_model("qwen3", getattr(torch, stored)).save_pretrained(toy.folder)
    lora = {"rank": 1, "alpha": 2}
    plan = make_plan(toy, loss={"kl": "k3", "kl_coef": 0.1}, lora=lora, dtype=dtype, rate=1e-2)
    values = both(
        plan,
        toy.batches(),
        relative=1e-6 if dtype == "float32" else 0.02,
        absolute=2e-6 if dtype == "float32" else 0.01,
    )
    assert values["kl_loss"] > 1e-6


def test_what_the_environment_answered(tmp_path):
    """Its mean is over the tokens of all ranks."""
    toy = make_toy(tmp_path / "model")
    toy.experiences[:] = [
        replace(one, shown_T=~one.loss_mask_T & (np.arange(len(one.ids_T)) >= (20 if number % 2 else 22)))
        for number, one in enumerate(toy.experiences)
    ]
    values = both(make_plan(toy, loss={"kl": "none", "echo": 0.5}), toy.batches(2))
    assert values["echo_loss"] > 0.1


def test_bfloat16_over_fp32_weights(tmp_path):
    """Weights stay fp32 and move by less than bfloat16 could say; a layer's own are rounded when they are gathered, so
    that the numbers are near, not equal. The reference's linear layers, an untied output layer too, are rounded before
    they are shared out."""
    toy = make_toy(tmp_path / "model", "llama")
    plan = make_plan(toy, dtype="bfloat16", rate=1e-5, loss={"kl": "k3", "kl_coef": 0.1})
    both(plan, toy.batches(2), relative=0.02, absolute=4e-5)


def test_a_critic(tmp_path):
    """An untied model, whose output layer the critic does not use, in two minibatches and two epochs."""
    toy = make_toy(tmp_path / "model", "llama")
    plan = make_plan(toy, algorithm="ppo", epochs=2)
    plan = replace(plan, critic=CriticConfig(learning_rate=1e-2))
    values = both(plan, toy.batches(2), steps=2)
    assert values["value_loss"] > 0.0


@pytest.mark.parametrize(("name", "dtype"), [("jsd", "float32"), ("on_policy_distill", "float32"), ("jsd", "bfloat16")])
def test_a_teacher(tmp_path, name, dtype):
    """Over the vocabulary, where the policy is compared with the teacher's output layer, and by the sampled tokens. In
    bfloat16 the teacher's linear layers are rounded before they are shared out."""
    toy = make_toy(tmp_path / "model")
    make_model("qwen3", torch.float32, seed=5).save_pretrained(tmp_path / "teacher")
    plan = make_plan(toy, dtype=dtype, rate=1e-5 if dtype == "bfloat16" else 1e-3)
    algorithm = resolve(name, LossConfig(), 2, distill=DistillConfig(teacher_path=str(tmp_path / "teacher")))
    plan = replace(plan, algorithm=algorithm, teachers={"": str(tmp_path / "teacher")})
    near = {"relative": 0.02, "absolute": 4e-5} if dtype == "bfloat16" else {}
    values = both(plan, toy.batches(), **near)
    assert values["distill_divergence"] != 0.0


@pytest.mark.parametrize("name", ["jsd", "on_policy_distill"])
def test_several_teachers(tmp_path, name):
    """The two processes have packs of different teachers at the same time. Red (it waits for ever) when each makes the
    pass of its own teacher only."""
    toy = make_toy(tmp_path / "model")
    teachers = {"maths": str(tmp_path / "maths"), "code": str(tmp_path / "code")}
    for seed, folder in enumerate(teachers.values(), start=5):
        make_model("qwen3", torch.float32, seed=seed).save_pretrained(folder)
    settings = DistillConfig(teachers=teachers, teacher_key="domain")
    plan = make_plan(toy, rate=1e-3, max_tokens_per_micro_batch=80)
    plan = replace(plan, algorithm=resolve(name, LossConfig(), 2, distill=settings), teachers=teachers)
    batches = [
        Minibatch(
            experiences=[
                replace(one, teacher="maths" if number < 3 else "code") for number, one in enumerate(batch.experiences)
            ]
        )
        for batch in toy.batches()
    ]
    assert both(plan, batches)["distill_divergence"] != 0.0


def test_a_teacher_with_other_tokens_beside_one_with_the_same(tmp_path):
    """The packs of the one are of its own ids, more than the policy has; both processes come to the same chunks."""
    toy = make_toy(tmp_path / "model")
    teachers = {"maths": str(tmp_path / "maths"), "code": str(tmp_path / "code")}
    make_model("qwen3", torch.float32, seed=5).save_pretrained(teachers["maths"])
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"vocab_size": 90})).save_pretrained(teachers["code"])
    settings = DistillConfig(teachers=teachers, teacher_key="domain")
    plan = make_plan(toy, rate=1e-3, max_tokens_per_micro_batch=80)
    algorithm = resolve("on_policy_distill", LossConfig(), 2, distill=settings)
    plan = replace(plan, algorithm=algorithm, teachers=teachers, read_anew=frozenset({"code"}))
    draw = np.random.default_rng(1)
    named = [
        replace(one, teacher="maths") if number < 3 else replace(reread(one, draw, 90), teacher="code")
        for number, one in enumerate(one for batch in toy.batches() for one in batch.experiences)
    ]
    assert both(plan, [Minibatch(experiences=named)])["distill_divergence"] != 0.0


def test_tokens_left_out_of_an_update(tmp_path):
    """Of two epochs the second leaves tokens out, which depends on those of the other process."""
    toy = make_toy(tmp_path / "model")
    settings = {"rate": 1e-2, "epochs": 2, "max_tokens_per_micro_batch": 80}
    plan = make_plan(toy, algorithm="m2po", loss={"policy_loss_args": {"threshold": 1e-4}}, **settings)
    values = both(plan, toy.batches(), steps=1)
    assert values["m2_masked_fraction"] > 0.0


def test_pairs_with_a_kl_term(tmp_path):
    """Four pairs in packs of one each: the mean over all tokens knows those of the other process."""
    toy = make_toy(tmp_path / "model")
    rng = np.random.default_rng(3)
    answers = []
    for number in range(4):
        for side in (1.0, -1.0):
            ids = rng.integers(3, 60, 12 + 3 * number).tolist()
            answers.append(make_experience(f"pair/{number}", ids, [(7, len(ids))], advantage=side, weight=0.02))
            answers[-1] = replace(answers[-1], group_id=f"pair/{number}")
    algorithm = resolve_supervised("dpo", LossConfig(kl="k2", kl_coef=0.5))
    plan = replace(make_plan(toy, rate=1e-2, max_tokens_per_micro_batch=40), algorithm=algorithm)
    values = both(plan, [Minibatch(experiences=answers)])
    assert values["kl_loss"] > 1e-6


def test_an_expert_and_clipping_by_entropy(tmp_path):
    """Two rows of an expert, in one pack, beside rollouts whose advantages are clipped over the whole step."""
    toy = make_toy(tmp_path / "model")
    rng = np.random.default_rng(3)
    rows = []
    for number in range(2):
        ids = rng.integers(3, 60, 12 + number).tolist()
        row = make_experience(f"expert/{number}", ids, [(7, len(ids))], advantage=1.0, weight=0.1)
        rows.append(replace(row, logprobs_T=0 * row.logprobs_T, versions_T=np.full(len(ids), -1, np.int32)))
    expert = resolve("mix", LossConfig(), 8, expert=ExpertConfig(dataset={"path": "rows"}, mu=0.3))
    clips = resolve("grpo", LossConfig(kl="none", advantage="clipv", advantage_args={"mu": 0.5}), 8)
    algorithm = replace(clips, expert=expert.expert)
    plan = replace(make_plan(toy), algorithm=algorithm)
    values = both(plan, [Minibatch(experiences=toy.experiences, experts=rows)], step=1)
    assert values["expert_loss"] > 0.0
    assert values["entropy_clip_fraction"] > 0.0


def test_rounding_is_measured_before_the_model_is_divided(tmp_path):
    """Each rank has its share of the probe, and all of them the whole figure: that of one process. An engine that
    serves another model is refused by all alike."""
    toy = make_toy(tmp_path / "model")
    plan = replace(make_plan(toy, dtype="bfloat16"), probe=toy.experiences)
    alone, group = one_process(plan).rounding, group_of(plan).rounding
    assert alone.num_tokens > 50
    for name, value in alone.to_json().items():
        assert group.to_json()[name] == (value if isinstance(value, str) else pytest.approx(value, rel=0.01)), name
    other = make_toy(tmp_path / "other", seed=1)
    with pytest.raises(ParityError, match="trainer and engine differ at policy version 0"):
        group_of(replace(plan, probe=[replace(one, logprobs_T=one.logprobs_T - 1) for one in other.experiences]))
    assert group_of(plan).rounding == group  # the ranks are still in use
