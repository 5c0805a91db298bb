"""Distillation in the trainer: as plain transformers compute it, however it is split; and it brings both together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import (
    FAMILIES,
    SIZES,
    VOCABULARY,
    Batch,
    hf_logprobs,
    make_experience,
    make_experiences,
    make_model,
    plain_copy,
    record,
)
from transformers import AutoModelForCausalLM, Qwen3Config

from sharpen.config.distill import DistillConfig
from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.teacher import OwnTeacher, Teacher, Teachers
from sharpen.learning.trainer.trainer import Trainer

ANY = Tolerance(mean=None, max=None)
FORMS = ("reverse_sampled", "forward", "reverse", "js")


def make_trainer(module, teacher, name="jsd", *, rate=1e-3, max_logits=1 << 25, loss=None, form=None, **config):
    algorithm = resolve(name, loss or LossConfig(), 2, distill=DistillConfig(divergence=form))
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype, max_logits=max_logits),
        algorithm=algorithm,
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, "eps": 1e-3, **config}),
        learning_rate=rate,
        planned_updates=1000,
        teachers=Teachers(
            {
                name: Teacher(TrainedModel(own, compute_dtype=own.dtype, max_logits=max_logits))
                for name, own in (teacher if isinstance(teacher, dict) else {"": teacher}).items()
            }
        ),
        tolerance=ANY,
    )


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}


def flat(experiences):
    """As drawn for an algorithm that looks at no reward: advantages of 0."""
    return [replace(one, advantages_T=np.zeros_like(one.advantages_T)) for one in experiences]


def teacher_of(family="qwen3", dtype=torch.float64, vocabulary=VOCABULARY, seed=5):
    torch.manual_seed(seed)
    config = FAMILIES[family]() if vocabulary == VOCABULARY else Qwen3Config(**SIZES | {"vocab_size": vocabulary})
    return AutoModelForCausalLM.from_config(config).to(dtype)


def plain_rows(model, experience):
    """Tempered logits at the loss tokens, shape (E, V), by the model's own forward pass."""
    targets = np.flatnonzero(experience.loss_mask_T)
    logits = model(input_ids=torch.from_numpy(experience.ids_T.astype(np.int64))[None], use_cache=False).logits[0]
    return logits[targets - 1] / torch.from_numpy(experience.temperatures_T[targets]).to(logits)[:, None]


def plain_loss(module, teacher, experiences, form, beta=0.5):
    """Sum of weight x divergence, or the policy gradient's loss, one sequence at a time."""
    total = 0.0
    for one in experiences:
        weights = torch.from_numpy(one.weights_T[one.loss_mask_T]).double()
        if form == "reverse_sampled":
            with torch.no_grad():
                advantages = hf_logprobs(teacher, one) - torch.from_numpy(one.logprobs_T[one.loss_mask_T])
            total = total - (weights * advantages.float().double() * hf_logprobs(module, one)).sum()
            continue
        s = plain_rows(module, one).softmax(-1)
        t = plain_rows(teacher, one).softmax(-1).detach()
        m = beta * t + (1 - beta) * s
        rows = {
            "forward": t * (t / s).log(),
            "reverse": s * (s / t).log(),
            "js": beta * t * (t / m).log() + (1 - beta) * s * (s / m).log(),
        }[form]
        total = total + (weights * rows.sum(-1)).sum()
    return total


@pytest.mark.parametrize("form", FORMS)
def test_the_first_update_is_adamw_on_the_plain_gradient(form):
    """Loss, gradient norm and weights, with temperatures 1 and 0.7, by transformers alone."""
    module, teacher = make_model("qwen3"), teacher_of("llama")
    twin, other = plain_copy(module), plain_copy(teacher)
    experiences = flat(record(twin, make_experiences()))
    loss = plain_loss(twin, other, experiences, form)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    decayed = [p for p in twin.parameters() if p.ndim >= 2]
    rest = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, eps=1e-3).step()
    name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
    trainer = make_trainer(module, teacher, name, form=form)
    metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    assert metrics.values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    if form != "reverse_sampled":
        assert metrics.values["distill_loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert metrics.values["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics.trained_tokens == sum(int(one.loss_mask_T.sum()) for one in experiences)
    for name, tensor in trainer.state_tensors().items():
        torch.testing.assert_close(tensor, dict(twin.named_parameters())[name].detach(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("form", ["forward", "js"])
def test_a_loss_is_the_sum_of_its_parts_however_many_updates_a_step_has(form):
    """Red when `distill_loss` is added up over the updates, where `loss` is their mean."""
    module, teacher = make_model("qwen3"), teacher_of()
    experiences = flat(record(plain_copy(module), make_experiences()))
    trainer = make_trainer(module, teacher, rate=0.0, form=form, loss=LossConfig(entropy_coef=0.01))
    once = trainer.train_step([Batch(experiences=tuple(experiences))]).values
    thrice = trainer.train_step([Batch(experiences=tuple(experiences))] * 3).values
    for values in (once, thrice):
        parts = [value for name, value in values.items() if name.endswith("_loss")]
        assert len(parts) == 3, values
        assert values["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert thrice["distill_loss"] == pytest.approx(once["distill_loss"], rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_an_update_does_not_depend_on_chunks_micro_batches_order_or_duplication(form):
    """Chunks of one row of logits; packs of one sequence; sequences reversed; each twice at half its weight.

    Break: drop `row_E` from the divergence that `_score_chunk` returns, or score the teacher without `compared.rows`.
    """
    name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
    experiences = flat(record(plain_copy(make_model("qwen3")), make_experiences()))
    halves = [replace(one, weights_T=one.weights_T / 2) for one in experiences]
    twice = [*halves, *(replace(one, rollout_id=f"again/{one.rollout_id}") for one in halves)]
    variants = [
        (experiences, {"max_tokens_per_micro_batch": 10_000}),
        (experiences, {"max_tokens_per_micro_batch": 10_000, "max_logits": 1}),
        (experiences, {"max_tokens_per_micro_batch": 1}),
        (experiences[::-1], {"max_logits": 700}),
        (twice, {}),
    ]
    results = []
    for batch, options in variants:
        trainer = make_trainer(make_model("qwen3"), teacher_of("llama"), name, form=form, **options)
        metrics = trainer.train_step([Batch(experiences=tuple(batch))])
        results.append((weights_of(trainer), metrics.values))
    for weights, values in results[1:]:
        for key, tensor in results[0][0].items():
            torch.testing.assert_close(weights[key], tensor, atol=1e-7, rtol=1e-6)
        for key in ("grad_norm", "distill_divergence", "loss"):
            assert values[key] == pytest.approx(results[0][1][key], abs=1e-6)


def test_logits_of_both_models_exist_a_chunk_at_a_time():
    """At most `max_logits` numbers of policy and teacher together; the backward pass computes them again."""
    seen = []

    def divergence(mine_RV, its_RV):
        seen.append(mine_RV.numel() + its_RV.numel())
        return Distill(divergence="js").divergences(mine_RV, its_RV)

    (packed,) = pack(make_experiences(), 10_000)
    policy = TrainedModel(make_model("qwen3"), compute_dtype=torch.float64, max_logits=600)
    teacher = TrainedModel(teacher_of("llama"), compute_dtype=torch.float64)
    scores = policy.score(packed, compared=teacher.compare(packed, divergence))
    assert max(seen) == 600
    num_chunks = len(seen)
    scores.divergence_E.sum().backward()
    assert len(seen) == 2 * num_chunks > 2
    assert max(seen) == 600


def test_bfloat16_stays_near_float32():
    """Both models computed in bfloat16 over fp32 weights."""
    module, teacher = make_model("qwen3", torch.float32), teacher_of("llama", torch.float32)
    (packed,) = pack(make_experiences(), 10_000)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        compared = Teacher(TrainedModel(teacher, compute_dtype=dtype)).compared(packed, Distill(divergence="js"))
        scores = TrainedModel(module, compute_dtype=dtype, max_logits=700).score(packed, compared=compared)
        scores.divergence_E.sum().backward()
        assert scores.divergence_E.dtype == torch.float32
        found[dtype] = scores.divergence_E.detach()
    torch.testing.assert_close(found[torch.bfloat16], found[torch.float32], atol=0.02, rtol=0.1)


def test_trap_10_the_teacher_is_tempered_as_the_tokens_were():
    """Temperatures 0.7 and 1.3; a teacher with the policy's own weights is at distance 0 from it at any temperature.

    Break: in `_score_chunk` leave the temperature out of `other_RV`.
    """
    module = make_model("qwen3")
    experiences = flat(record(plain_copy(module), make_experiences(temperatures=(0.7, 1.3))))
    for form in FORMS:
        name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
        trainer = make_trainer(make_model("qwen3"), make_model("qwen3"), name, form=form)
        values = trainer.train_step([Batch(experiences=tuple(experiences))]).values
        assert values["distill_divergence"] == pytest.approx(0.0, abs=1e-7)
        assert values["grad_norm"] == pytest.approx(0.0, abs=1e-5)  # recorded logprobs are float32


@pytest.mark.parametrize("form", ["js", "reverse_sampled"])
def test_each_sequence_is_scored_by_its_own_teacher(form):
    """Two groups that begin with the same prompt, each with a teacher: the gradient is the sum of what each teaches,
    and no pack has sequences of both.

    Break: pack without looking at `teacher`, or let `Teachers._of` take the first.
    """
    module, teachers = make_model("qwen3"), {"maths": teacher_of("llama"), "code": teacher_of("llama", seed=6)}
    experiences = flat(record(plain_copy(module), make_experiences(num_groups=2)))
    groups = sorted({one.group_id for one in experiences})
    of_group = dict(zip(groups, teachers, strict=True))
    experiences = [replace(one, teacher=of_group[one.group_id]) for one in experiences]
    twin = plain_copy(module)
    for name, teacher in teachers.items():
        plain_loss(twin, plain_copy(teacher), [one for one in experiences if one.teacher == name], form).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
    trainer = make_trainer(module, teachers, name, form=form, max_tokens_per_micro_batch=10_000)
    values = trainer.train_step([Batch(experiences=tuple(experiences))]).values
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert [one.teacher for one in pack(experiences, 10_000)] == ["maths", "code"]


def told_rows(model, one):
    """`plain_rows`, of the same tokens behind what the teacher is told."""
    ids = np.concatenate([one.told_P, one.ids_T[one.num_untold :]]).astype(np.int64)
    targets = np.flatnonzero(one.loss_mask_T)
    logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    read = logits[targets + len(one.told_P) - one.num_untold - 1]
    return read / torch.from_numpy(one.temperatures_T[targets]).to(logits)[:, None]


def told(experiences):
    """The same, with a teacher that is told something else for each."""
    return [
        replace(
            one,
            told_P=np.arange(3, 3 + 7 + number, dtype=np.int32),
            num_untold=int(np.flatnonzero(one.loss_mask_T)[0]),
        )
        for number, one in enumerate(experiences)
    ]


def plain_norm(twin, teacher, experiences, form):
    """The norm of the gradient of an update, one sequence at a time."""
    for one in experiences:
        weights = torch.from_numpy(one.weights_T[one.loss_mask_T]).double()
        t, s = told_rows(teacher, one).log_softmax(-1).detach(), plain_rows(twin, one).log_softmax(-1)
        if form == "forward":
            loss = (t.exp() * (t - s)).sum(-1)
        else:
            sampled = torch.from_numpy(one.ids_T[one.loss_mask_T].astype(np.int64))[:, None]
            gap = t.gather(1, sampled)[:, 0] - torch.from_numpy(one.logprobs_T[one.loss_mask_T])
            loss = -gap.float().double() * s.gather(1, sampled)[:, 0]
        (weights * loss).sum().backward()
    return torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0).item()


def train(trainer, experiences):
    return trainer.train_step([Batch(experiences=tuple(experiences))]).values


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", ["forward", "reverse_sampled"])
def test_a_teacher_is_told_more_than_the_policy_read(form, own):
    """The rollouts of a group are told different things, so that one state of the policy is several of the teacher;
    the first tokens are the same and those after the prompt are the recorded ones.

    Break: take the rows of `rows_of(pack)` for a pack with `told`, or leave `told_P` out of `as_told`.
    """
    module = make_model("qwen3")
    teacher = module if own else teacher_of("llama")
    experiences = flat(record(plain_copy(module), make_experiences(temperatures=(1.0, 0.7))))
    experiences = told(experiences)
    norm = plain_norm(plain_copy(module), plain_copy(teacher), experiences, form)
    policy = TrainedModel(module, compute_dtype=module.dtype)
    name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
    trainer = Trainer(
        policy,
        algorithm=resolve(name, LossConfig(), 2, distill=DistillConfig(divergence=form)),
        config=TrainerConfig(max_tokens_per_micro_batch=80),
        learning_rate=1e-3,
        planned_updates=10,
        teachers=Teachers(
            {"": OwnTeacher(policy) if own else Teacher(TrainedModel(teacher, compute_dtype=module.dtype))}
        ),
        tolerance=ANY,
    )
    values = train(trainer, experiences)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert values["grad_norm"] > 1e-3
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("form", ["forward", "reverse_sampled"])
def test_the_average_of_the_weights_teaches_after_an_update(form):
    """Of 0.75 of the weights before the first update and 0.25 of those after it, the second one's gradient is that of
    plain transformers; the policy is as it was. Going back takes the average along.

    Break: keep `1 - decay`, leave out `follow`, `_averaged` or `_kept`, or leave the averages out of `StepStart`.
    """
    module = make_model("qwen3")
    before = plain_copy(module)
    policy = TrainedModel(module, compute_dtype=module.dtype)
    name = "on_policy_distill" if form == "reverse_sampled" else "jsd"
    own = OwnTeacher(policy, 0.75)
    trainer = Trainer(
        policy,
        algorithm=resolve(name, LossConfig(), 2, distill=DistillConfig(divergence=form)),
        config=TrainerConfig(max_tokens_per_micro_batch=80),
        learning_rate=1e-2,
        planned_updates=10,
        teachers=Teachers({"": own}),
        tolerance=ANY,
    )
    train(trainer, told(flat(record(before, make_experiences(num_groups=1)))))
    twin, teacher = plain_copy(module), plain_copy(module)
    with torch.no_grad():
        for one, first, second in zip(teacher.parameters(), before.parameters(), twin.parameters(), strict=True):
            one.copy_(0.75 * first + 0.25 * second)
    experiences = told(flat(record(plain_copy(module), make_experiences(num_groups=1, seed=1))))
    norm = plain_norm(twin, teacher, experiences, form)
    assert train(trainer, experiences)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert norm > 1e-4
    assert not any(torch.equal(one, own.averages[name]) for name, one in module.named_parameters())


def test_going_back_to_the_start_of_a_step_takes_the_average_along():
    """Break: leave the averages out of `StepStart._live`."""
    module = make_model("qwen3")
    policy = TrainedModel(module, compute_dtype=module.dtype)
    own = OwnTeacher(policy, 0.75)
    trainer = Trainer(
        policy,
        algorithm=resolve("jsd", LossConfig(), 2, distill=DistillConfig(divergence="forward")),
        config=TrainerConfig(max_tokens_per_micro_batch=80, epochs=2),
        learning_rate=1e-2,
        planned_updates=10,
        teachers=Teachers({"": own}),
        tolerance=ANY,
    )
    start = {name: one.clone() for name, one in own.averages.items()}
    train(trainer, told(flat(record(plain_copy(module), make_experiences(num_groups=1)))))
    assert not any(torch.equal(one, own.averages[name]) for name, one in start.items())
    assert trainer.back_to(0)
    assert all(torch.equal(one, own.averages[name]) for name, one in start.items())
    assert all(torch.equal(one, start[name]) for name, one in module.named_parameters())


@pytest.mark.parametrize("rows", [VOCABULARY + 9, VOCABULARY - 5])
def test_embeddings_beyond_the_tokenizer_may_differ(rows):
    """The tokens are below 55. Both distributions are over the rows that both have, each normalized over those."""
    module, teacher = make_model("llama"), teacher_of(vocabulary=rows)
    experiences = [replace(one, ids_T=one.ids_T % 50) for one in make_experiences()]
    (packed,) = pack(experiences, 10_000)
    distill = Distill(divergence="js", beta=0.3)
    scores = TrainedModel(module, compute_dtype=torch.float64).score(
        packed, compared=Teacher(TrainedModel(teacher, compute_dtype=torch.float64)).compared(packed, distill)
    )
    common = min(rows, VOCABULARY)
    expected = {}
    for one in experiences:
        s, t = (plain_rows(plain_copy(model), one)[:, :common].log_softmax(-1) for model in (module, teacher))
        found = distill.divergences(s, t).tolist()
        expected |= {
            (one.rollout_id, place): d for place, d in zip(np.flatnonzero(one.loss_mask_T), found, strict=True)
        }
    for entry, divergence in enumerate(scores.divergence_E.tolist()):
        key = (packed.rollout_ids[packed.rollouts_E[entry]], int(packed.tokens_E[entry]))
        assert divergence == pytest.approx(expected[key], abs=1e-8)
    beyond = pack([make_experience("g/0", [3, 4, VOCABULARY - 1], [(1, 3)], advantage=0.0)], 100)
    if rows < VOCABULARY:
        with pytest.raises(TrainingError, match=f"sampled id {VOCABULARY - 1}.*{rows} embeddings"):
            Teacher(TrainedModel(teacher, compute_dtype=torch.float64)).logprobs(beyond[0])


@pytest.mark.parametrize("form", ["forward", "reverse", "js"])
def test_updates_on_fixed_states_bring_policy_and_teacher_together(form):
    """fp32, another architecture as teacher: after 80 updates next to nothing is left of the divergence."""
    module, teacher = make_model("qwen3", torch.float32), teacher_of("llama", torch.float32)
    experiences = flat(record(plain_copy(module), make_experiences(num_groups=1, group_size=2)))
    weight = 1.0 / sum(int(one.loss_mask_T.sum()) for one in experiences)
    experiences = [
        replace(one, weights_T=np.where(one.loss_mask_T, weight, 0).astype(np.float32)) for one in experiences
    ]
    before = {name: tensor.clone() for name, tensor in teacher.named_parameters()}
    trainer = make_trainer(module, teacher, form=form, rate=1e-2, eps=1e-8, weight_decay=0.0, max_grad_norm=100.0)
    found = [
        trainer.train_step([Batch(experiences=tuple(experiences))]).values["distill_divergence"] for _ in range(80)
    ]
    assert found[0] > 0.02
    assert found[-1] < 0.02 * found[0], found[::20]
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.named_parameters())


def test_the_sampled_form_brings_them_together_too():
    """Fresh samples at one state in each update; the true reverse KL there falls to a fifth."""
    module, teacher = make_model("qwen3", torch.float32), teacher_of("llama", torch.float32)
    trainer = make_trainer(module, teacher, "on_policy_distill", rate=5e-3, eps=1e-8, weight_decay=0.0)
    prompt, state = [7, 8, 9, 10], torch.tensor([[7, 8, 9, 10]])
    torch.manual_seed(0)

    def divergence():
        with torch.no_grad():
            s, t = (plain_copy(model)(input_ids=state).logits[0, -1:].log_softmax(-1) for model in (module, teacher))
        return s, float(Distill(divergence="reverse").divergences(s, t))

    _, first = divergence()
    for _ in range(60):
        policy, _ = divergence()
        ids = torch.multinomial(policy[0].exp(), 64, replacement=True).tolist()
        batch = [
            make_experience(f"g/{number}", [*prompt, id_], [(4, 5)], advantage=0.0, weight=1 / 64)
            for number, id_ in enumerate(ids)
        ]
        recorded = [
            replace(one, logprobs_T=np.array([0, 0, 0, 0, float(policy[0, id_])], np.float32))
            for one, id_ in zip(batch, ids, strict=True)
        ]
        trainer.train_step([Batch(experiences=tuple(recorded))])
    _, last = divergence()
    assert first > 0.1
    assert last < 0.2 * first, (first, last)


def test_rewards_and_teacher_together():
    """`loss.advantage` beside the sampled form: the recorded advantage and the teacher's add up, token by token."""
    module, teacher = make_model("qwen3"), teacher_of("llama")
    experiences = record(plain_copy(module), make_experiences())
    twin, other = plain_copy(module), plain_copy(teacher)
    plain_loss(twin, other, experiences, "reverse_sampled").backward()
    for one in experiences:
        factor = torch.from_numpy((one.weights_T * one.advantages_T)[one.loss_mask_T]).double()
        (-factor * hf_logprobs(twin, one)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    trainer = make_trainer(module, teacher, "on_policy_distill", loss=LossConfig(advantage="grpo"))
    values = trainer.train_step([Batch(experiences=tuple(experiences))]).values
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_checkpoint_of_another_teacher_is_refused(tmp_path):
    module = make_model("qwen3", torch.float32)
    module.config._name_or_path = str(tmp_path / "none")
    teacher = teacher_of("llama", torch.float32)
    make_trainer(module, teacher).save(tmp_path / "step", {"step": 1})
    same = make_trainer(make_model("qwen3", torch.float32), teacher_of("llama", torch.float32))
    assert same.restore(tmp_path / "step") == {"step": 1}
    other = make_trainer(make_model("qwen3", torch.float32), teacher_of("llama", torch.float32, seed=6))
    with pytest.raises(CheckpointError, match="a run with another teacher"):
        other.restore(tmp_path / "step")
    swapped = {"b": teacher_of("llama", torch.float32), "a": teacher_of("llama", torch.float32, seed=6)}
    with pytest.raises(CheckpointError, match=r"another teacher: continue with its distill\.teachers"):
        make_trainer(make_model("qwen3", torch.float32), swapped).restore(tmp_path / "step")
