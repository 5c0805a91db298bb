"""A teacher with other tokens in the trainer: each token of a chunk learns from the whole chunk's term, worked out by
hand; with the policy's own tokens it is the teacher of today, bit for bit; and no pack changes anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_toys import (
    SIZES,
    Batch,
    hf_logprobs,
    make_experience,
    make_experiences,
    make_model,
    plain_copy,
    record,
    reread,
)
from transformers import AutoModelForCausalLM, Qwen3Config

from sharpen.config.distill import DistillConfig
from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import TrainingError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.credit import assign
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.reread import Readings
from sharpen.learning.trainer.teacher import Teacher, Teachers
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Part
from sharpen.types import Experience, Reread

ITS_VOCABULARY = 90


def make_trainer(module: Any, teachers: dict[str, tuple[Any, bool]], **config: Any) -> Trainer:
    """`teachers` are models by name, each with whether it reads anew."""
    algorithm = resolve("on_policy_distill", LossConfig(), 2, distill=DistillConfig())
    return Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=algorithm,
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, "eps": 1e-3, **config}),
        learning_rate=1e-3,
        planned_updates=1000,
        teachers=Teachers(
            {
                name: Teacher(TrainedModel(own, compute_dtype=own.dtype), reads_anew=anew)
                for name, (own, anew) in teachers.items()
            }
        ),
        tolerance=Tolerance(mean=None, max=None),
    )


def other_model(vocabulary: int = ITS_VOCABULARY) -> Any:
    """A teacher with more ids than the policy has."""
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"vocab_size": vocabulary})).double()


def flat(experiences: list[Experience]) -> list[Experience]:
    return [replace(one, advantages_T=np.zeros_like(one.advantages_T)) for one in experiences]


def reread_rollouts(module: Any) -> list[Experience]:
    draw = np.random.default_rng(2)
    return [reread(one, draw, ITS_VOCABULARY) for one in flat(record(plain_copy(module), make_experiences()))]


def read_alone(teacher: Any, one: Experience, call: int) -> torch.Tensor:
    """The teacher's logprobs of its tokens of a call, by transformers alone."""
    read = one.rereads[call]
    ids = torch.tensor([*read.prompt_ids_P.tolist(), *read.answer_ids_R.tolist()])
    with torch.no_grad():
        logits = teacher(input_ids=ids[None], use_cache=False).logits[0]
    temperature = float(one.temperatures_T[one.calls_T == call][0])
    start = len(read.prompt_ids_P)
    return (logits[start - 1 : -1] / temperature).log_softmax(-1).gather(1, ids[start:, None])[:, 0]


def plain_advantages(teacher: Any, one: Experience) -> torch.Tensor:
    """For each token of each call: the chunk's sum of the teacher's logprobs, less the sum of the recorded ones."""
    found = []
    for call, read in one.rereads.items():
        said, own = read_alone(teacher, one, call), torch.from_numpy(one.logprobs_T[one.calls_T == call]).double()
        for chunk in read.chunks_S.tolist():
            found.append(
                said[torch.from_numpy(read.chunks_R == chunk)].sum()
                - own[torch.from_numpy(read.chunks_S == chunk)].sum()
            )
    return torch.stack(found)


def test_the_first_update_is_adamw_on_the_plain_gradient() -> None:
    """By transformers alone, one call at a time: temperatures 1 and 0.7, two calls in a sequence."""
    module, teacher = make_model("qwen3"), other_model()
    twin = plain_copy(module)
    experiences, loss, apart, count = reread_rollouts(module), torch.zeros(()).double(), 0.0, 0
    for one in experiences:
        advantages = plain_advantages(teacher, one)
        weights = torch.from_numpy(one.weights_T[one.loss_mask_T]).double()
        loss = loss - (weights * advantages.float().double() * hf_logprobs(twin, one)).sum()
        for call, read in one.rereads.items():
            apart += float(
                torch.from_numpy(one.logprobs_T[one.calls_T == call]).double().sum()
                - read_alone(teacher, one, call).sum()
            )
            count += len(read.chunks_S)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    metrics = make_trainer(module, {"": (teacher, True)}).train_step([Batch(experiences=tuple(experiences))]).values
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["distill_divergence"] == pytest.approx(apart / count, rel=1e-5)


def test_a_chunk_by_hand() -> None:
    """Tokens 1, 2 | 3 with logprobs -1, -2 | -0.5; the teacher's -0.25, -0.5, -0.25 | -2: terms 2, 2 and -1.5, on
    advantages of 1; and 1/3 (-2 + 1.5) nats of divergence a token.

    Break: give each token its share of the term, or its own logprob in place of the chunk's.
    """
    one = make_experience("g/0", [7, 1, 2, 3], [(1, 4)], advantage=1.0)
    one.logprobs_T[1:] = [-1.0, -2.0, -0.5]
    read = Reread(
        prompt_ids_P=np.array([9], np.int32),
        answer_ids_R=np.array([4, 5, 6, 8], np.int32),
        chunks_S=np.array([0, 0, 1], np.int32),
        chunks_R=np.array([0, 0, 0, 1], np.int32),
    )
    one = replace(one, rereads={0: read})
    readings = Readings([one])
    (its,) = pack(readings.sequences, 100)
    assert its.targets_E.tolist() == [4, 5, 6, 8]
    readings.add([(its, torch.tensor([-0.25, -0.5, -0.25, -2.0]))])
    (own,) = pack([one], 100)
    part = Part(pack=own)
    part.teacher_E, part.chunks_E = readings.of(own)
    algorithm = resolve("on_policy_distill", LossConfig(advantage="grpo"), 2, distill=DistillConfig())
    credit = assign([part], algorithm)
    assert part.pack.advantages_E.tolist() == [3.0, 3.0, -0.5]
    assert credit.metrics["distill_divergence"] == pytest.approx((-2.0 + 1.5) / 3)
    halved = resolve("on_policy_distill", LossConfig(advantage="grpo"), 2, distill=DistillConfig(coef=0.5))
    part.pack = own
    assert assign([part], halved).metrics == credit.metrics
    assert part.pack.advantages_E.tolist() == [2.0, 2.0, 0.25]


def test_a_critic_adds_a_chunk_up_once() -> None:
    """Its return is the sum of the chunks' terms: the reward of each chunk's last token.

    Break: let `assign` give each token of a chunk its term as a reward.
    """
    one = make_experience("g/0", [7, 1, 2, 3], [(1, 4)], advantage=0.0)
    one.logprobs_T[1:] = [-1.0, -2.0, -0.5]
    (own,) = pack([one], 100)
    part = Part(pack=own, teacher_E=torch.tensor([-1.0, -1.0, -2.0]), chunks_E=np.array([0, 0, 1]))
    part.values_E = torch.zeros(3)
    settings = LossConfig(advantage="gae", advantage_args={"lam": 1.0, "whiten": False})
    algorithm = resolve("on_policy_distill", settings, 2, distill=DistillConfig())
    assign([part], algorithm)
    assert part.returns_E is not None
    assert part.returns_E.tolist() == [pytest.approx(0.5), pytest.approx(0.5), pytest.approx(-1.5)]


def as_itself(one: Experience) -> Experience:
    """The sequence reread by a teacher that has the same tokens and the same prompts."""
    rereads = {}
    for call in dict.fromkeys(one.calls_T[one.loss_mask_T].tolist()):
        at = np.flatnonzero(one.calls_T == call)
        each = np.arange(len(at), dtype=np.int32)
        rereads[call] = Reread(
            prompt_ids_P=one.ids_T[: at[0]], answer_ids_R=one.ids_T[at], chunks_S=each, chunks_R=each
        )
    return replace(one, rereads=rereads)


def test_with_equal_tokens_it_is_the_teacher_that_reads_the_same() -> None:
    """A teacher of the policy's own tokens, forced to read anew: the same weights after three updates."""
    weights = []
    for anew in (False, True):
        module, teacher = make_model("qwen3"), make_model("qwen3", seed=5)
        trainer = make_trainer(module, {"": (teacher, anew)})
        experiences = flat(record(plain_copy(module), make_experiences()))
        batch = Batch(experiences=tuple(map(as_itself, experiences) if anew else experiences))
        values = [trainer.train_step([batch]).values for _ in range(3)]
        weights.append((values, {name: one.clone() for name, one in trainer.state_tensors().items()}))
    (known, own), (found, its) = weights
    for one, other in zip(known, found, strict=True):
        assert other["distill_divergence"] == pytest.approx(one["distill_divergence"], rel=1e-6)
    for name, tensor in own.items():
        torch.testing.assert_close(its[name], tensor, atol=1e-9, rtol=1e-7)


def test_an_update_does_not_depend_on_packs_or_order() -> None:
    weights = []
    for limit, turned in ((4096, False), (40, False), (80, True)):
        module = make_model("qwen3")
        trainer = make_trainer(module, {"": (other_model(), True)}, max_tokens_per_micro_batch=limit)
        experiences = reread_rollouts(module)
        trainer.train_step([Batch(experiences=tuple(experiences[::-1] if turned else experiences))])
        weights.append({name: one.clone() for name, one in trainer.state_tensors().items()})
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, atol=1e-7, rtol=1e-6)


def test_teachers_of_both_kinds() -> None:
    """Each sequence by its own teacher; the ids of one that reads anew may be beyond the policy's."""
    module = make_model("qwen3")
    same, other = make_model("qwen3", seed=5), other_model()
    named = [replace(one, teacher="code" if n % 2 else "maths") for n, one in enumerate(reread_rollouts(module))]
    expected = torch.zeros(()).double()
    twin = plain_copy(module)
    for one in named:
        if one.teacher == "code":
            advantages = plain_advantages(other, one)
        else:
            with torch.no_grad():
                advantages = hf_logprobs(same, one) - torch.from_numpy(one.logprobs_T[one.loss_mask_T])
        weights = torch.from_numpy(one.weights_T[one.loss_mask_T]).double()
        expected = expected - (weights * advantages.float().double() * hf_logprobs(twin, one)).sum()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    trainer = make_trainer(module, {"maths": (same, False), "code": (other, True)})
    given = [replace(one, rereads={}) if one.teacher == "maths" else one for one in named]
    found = trainer.train_step([Batch(experiences=tuple(given))]).values
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_teacher_may_have_fewer_ids_than_the_policy_samples() -> None:
    """Red when it is given the policy's, also if its answer is not used."""
    module, draw = make_model("qwen3"), np.random.default_rng(0)
    experiences = flat(record(plain_copy(module), make_experiences()))
    assert max(int(one.ids_T.max()) for one in experiences) > 40
    trainer = make_trainer(module, {"": (other_model(40), True)})
    batch = Batch(experiences=tuple(reread(one, draw, 40) for one in experiences))
    assert trainer.train_step([batch]).values["grad_norm"] > 0


def test_what_was_not_reread_is_never_scored_by_its_ids() -> None:
    module = make_model("qwen3")
    experiences = flat(record(plain_copy(module), make_experiences()))
    trainer = make_trainer(module, {"": (other_model(), True)})
    with pytest.raises(AssertionError, match="has no text for its teacher"):
        trainer.train_step([Batch(experiences=tuple(experiences))])
    beyond = [reread(one, np.random.default_rng(0), ITS_VOCABULARY) for one in experiences]
    beyond[0].rereads[0].answer_ids_R[0] = ITS_VOCABULARY
    with pytest.raises(TrainingError, match=rf"{ITS_VOCABULARY} embeddings of the teacher"):
        trainer.train_step([Batch(experiences=tuple(beyond))])
