"""Divergences from a teacher: by hand with three tokens, by plain loops in fp64, and by their properties; settings."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import DistillConfig, LossConfig, SamplingConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.algorithm.distill import Distill, jensen_shannon, kl, sampled_advantages
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.resolve import resolve
from sharpen.types import Task

STUDENT, TEACHER = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_kl_by_hand() -> None:
    # KL(student || teacher) = 1/2 log 2 + 1/4 log 1 + 1/4 log 1/2 = log(2) / 4; the same the other way round here.
    expected = tensor(math.log(2) / 4)
    torch.testing.assert_close(Distill(divergence="reverse").divergences(logs(STUDENT), logs(TEACHER)), expected)
    torch.testing.assert_close(Distill(divergence="forward").divergences(logs(STUDENT), logs(TEACHER)), expected)
    # With (1/2, 1/4, 1/4) and (1/8, 1/8, 3/4) the directions differ.
    student, teacher = logs(STUDENT), logs([0.125, 0.125, 0.75])
    reverse = 0.5 * math.log(4) + 0.25 * math.log(2) + 0.25 * math.log(1 / 3)
    forward = 0.125 * math.log(1 / 4) + 0.125 * math.log(1 / 2) + 0.75 * math.log(3)
    torch.testing.assert_close(Distill(divergence="reverse").divergences(student, teacher), tensor(reverse))
    torch.testing.assert_close(Distill(divergence="forward").divergences(student, teacher), tensor(forward))


def test_jensen_shannon_by_hand() -> None:
    # m = (3/8, 1/4, 3/8): KL(teacher || m) = KL(student || m) = 1/4 log(2/3) + 1/2 log(4/3).
    half = 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)
    torch.testing.assert_close(jensen_shannon(logs(STUDENT), logs(TEACHER), 0.5), tensor(half))
    # β 1/4: m = 1/4 teacher + 3/4 student = (7/16, 1/4, 5/16).
    of_teacher = 0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5)
    of_student = 0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)
    expected = tensor(0.25 * of_teacher + 0.75 * of_student)
    torch.testing.assert_close(jensen_shannon(logs(STUDENT), logs(TEACHER), 0.25), expected)
    torch.testing.assert_close(Distill(divergence="js", beta=0.25).divergences(logs(STUDENT), logs(TEACHER)), expected)


def test_gradients_by_hand() -> None:
    """With respect to the logits of the student: forward KL pulls by `student - teacher`, reverse KL by
    `student (log student - log teacher - KL)`. Red when `divergences` mixes up the two directions."""
    student, teacher = torch.tensor([STUDENT], dtype=torch.float64), torch.tensor([TEACHER], dtype=torch.float64)
    ratio = (student / teacher).log()
    expected = {"forward": student - teacher, "reverse": student * (ratio - (student * ratio).sum())}
    for divergence, gradient in expected.items():
        logits = logs(STUDENT).requires_grad_()
        found = Distill(divergence=divergence).divergences(logits.log_softmax(-1), logs(TEACHER))  # type: ignore[arg-type]
        found.sum().backward()
        torch.testing.assert_close(logits.grad, gradient)


def test_sampled_advantages_by_hand() -> None:
    # The teacher gives twice the probability, the same, half of it; coefficient 3.
    sampled = tensor(math.log(0.25), math.log(0.5), math.log(0.5))
    teacher = tensor(math.log(0.5), math.log(0.5), math.log(0.25))
    found = sampled_advantages(Distill(divergence="reverse_sampled", coef=3.0), teacher, sampled)
    torch.testing.assert_close(found, tensor(3 * math.log(2), 0.0, -3 * math.log(2)))


LOGITS = st.lists(st.floats(-8, 8), min_size=4, max_size=4)
BETA = st.floats(0.01, 0.99)


def row(logits: list[float]) -> torch.Tensor:
    return torch.tensor([logits], dtype=torch.float64).log_softmax(-1)


@given(LOGITS, LOGITS, BETA)
def test_divergences_equal_plain_loops(student: list[float], teacher: list[float], beta: float) -> None:
    s, t = ([math.exp(x) / sum(map(math.exp, logits)) for x in logits] for logits in (student, teacher))
    m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]

    def plain_kl(p: list[float], q: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    expected = {
        "forward": plain_kl(t, s),
        "reverse": plain_kl(s, t),
        "js": beta * plain_kl(t, m) + (1 - beta) * plain_kl(s, m),
    }
    for name, value in expected.items():
        found = Distill(divergence=name, beta=beta).divergences(row(student), row(teacher))  # type: ignore[arg-type]
        assert float(found) == pytest.approx(value, abs=1e-10)


@given(LOGITS, LOGITS, BETA, st.permutations(range(4)))
def test_jensen_shannon_is_bounded_symmetric_and_blind_to_the_order_of_the_vocabulary(
    student: list[float], teacher: list[float], beta: float, order: list[int]
) -> None:
    s, t = row(student), row(teacher)
    found = float(jensen_shannon(s, t, beta))
    assert -1e-12 <= found <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-12
    assert float(jensen_shannon(s, t, 0.5)) <= math.log(2) + 1e-12
    assert float(jensen_shannon(t, s, 1 - beta)) == pytest.approx(found, abs=1e-12)  # roles and weight swapped
    assert float(jensen_shannon(s[:, order], t[:, order], beta)) == pytest.approx(found, abs=1e-12)
    assert float(jensen_shannon(s, s, beta)) == pytest.approx(0.0, abs=1e-12)


@given(LOGITS, LOGITS)
def test_jensen_shannon_becomes_forward_and_reverse_kl_at_its_ends(student: list[float], teacher: list[float]) -> None:
    """As GKD says. Red when teacher and student change places in the mixture, as at the ends of Trinity's."""
    s, t, small = row([x / 4 for x in student]), row([x / 4 for x in teacher]), 1e-7
    assert float(jensen_shannon(s, t, small)) / small == pytest.approx(float(kl(t, s)), abs=1e-4)
    assert float(jensen_shannon(s, t, 1 - small)) / small == pytest.approx(float(kl(s, t)), abs=1e-4)


@given(LOGITS, LOGITS)
def test_the_sampled_form_has_the_gradient_of_reverse_kl_in_the_mean(
    student: list[float], teacher: list[float]
) -> None:
    """The mean over the student's samples of `-A log π`, A without gradient, has the gradient of KL(π || teacher)."""
    t = row(teacher)
    gradients = []
    for sampled in (True, False):
        logits = torch.tensor([student], dtype=torch.float64, requires_grad=True)
        s = logits.log_softmax(-1)
        if sampled:
            advantages = sampled_advantages(Distill(divergence="reverse_sampled"), t, s.detach())
            loss = -(s.detach().exp() * advantages * s).sum()
        else:
            loss = kl(s, t).sum()
        loss.backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_presets_and_their_settings() -> None:
    sampled, jsd = (resolve(name, LossConfig(), 1, distill=DistillConfig()) for name in ("on_policy_distill", "jsd"))
    assert sampled.distill == Distill(divergence="reverse_sampled", coef=1.0)
    assert jsd.distill == Distill(divergence="js", coef=1.0, beta=0.5)
    assert (sampled.needs_ratio, jsd.needs_ratio) == (True, True)
    assert (sampled.scores_tokens, jsd.scores_tokens) == (True, False)
    for algorithm in (sampled, jsd):
        assert algorithm.needs_teacher
        assert algorithm.trains_zero_advantages
        assert not algorithm.needs_reward
        assert not algorithm.group_relative
    assert not any(preset.needs_teacher or not preset.needs_reward for preset in PRESETS.values() if not preset.distill)
    found = resolve("jsd", LossConfig(), 1, distill=DistillConfig(divergence="forward", coef=0.5)).distill
    assert found == Distill(divergence="forward", coef=0.5)
    with_rewards = resolve("on_policy_distill", LossConfig(advantage="grpo"), 2, distill=DistillConfig())
    assert with_rewards.needs_reward
    assert with_rewards.group_relative


def test_a_task_names_its_teacher() -> None:
    """By the text of the field; a task without, or with another name, is refused."""
    several = DistillConfig(teachers={"maths": "a", "3": "b"}, teacher_key="domain")
    found = resolve("jsd", LossConfig(), 1, distill=several).distill
    assert found == Distill(divergence="js", teachers=("maths", "3"), teacher_key="domain")
    task = Task(id="train/0", index=0, row={"domain": "maths"})
    assert found.teacher_of(task) == "maths"
    assert found.teacher_of(replace(task, row={"domain": 3})) == "3"
    assert Distill(divergence="js").teacher_of(task) == ""
    for row, shown in (({}, "None"), ({"domain": "law"}, "'law'")):
        with pytest.raises(DatasetError, match=rf"task train/0 has {shown} there.*\(maths, 3\)"):
            found.teacher_of(replace(task, row=row))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teachers": {"a": "x"}}, "teachers and teacher_key go together"),
        ({"teacher_key": "domain"}, "teachers and teacher_key go together"),
        ({"teachers": {"a": "x"}, "teacher_key": "d", "teacher_path": "y"}, "give one of them"),
        ({"teachers": {"": "x"}, "teacher_key": "d"}, "an empty name"),
    ],
)
def test_several_teachers_are_whole(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**settings)


@pytest.mark.parametrize(
    ("name", "loss", "sampling", "distill", "message"),
    [
        ("grpo", {}, {}, {"teacher_path": "x"}, "'grpo' has no teacher"),
        ("grpo", {"advantage": "none"}, {}, {}, "'grpo' has no teacher"),
        ("jsd", {}, {}, {"divergence": "reverse", "beta": 0.3}, "only js has a mixture"),
        ("on_policy_distill", {}, {}, {"beta": 0.3}, "distill.divergence is 'reverse_sampled'"),
        ("jsd", {"std_threshold": 0.1}, {}, {}, "loss.std_threshold is 0.1, but 'jsd' learns only from its teacher"),
        ("jsd", {}, {"reward_low": 0.1}, {}, "sampling.reward_low is 0.1"),
        ("on_policy_distill", {}, {"max_refill": 1.0}, {}, "sampling.max_refill is 1.0"),
        ("on_policy_distill", {"clip_low": 0.1}, {}, {"divergence": "js"}, "loss.clip_low is 0.1"),
        ("jsd", {"policy_loss": "ppo"}, {}, {}, "loss.policy_loss is ppo"),
    ],
)
def test_settings_without_effect_are_refused(name, loss, sampling, distill, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, LossConfig(**loss), 8, sampling=SamplingConfig(**sampling), distill=DistillConfig(**distill))
