"""Training without rollouts: what is taught, token by token; its loss and gradient; whole runs of sft, cpt and dpo."""

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.algorithm.supervised import SUPERVISED, cross_entropy, dpo, margins, resolve_supervised
from sharpen.certificate.checks import broken_sentences
from sharpen.cli.main import main
from sharpen.config.run import LossConfig, SupervisedConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CertificateError, ConfigError, DatasetError
from sharpen.gateway.render import Renderer
from sharpen.supervised.batches import split, weighted
from sharpen.supervised.checks import check_step
from sharpen.supervised.lessons import Tutor
from sharpen.trainer.model import TrainedModel
from sharpen.trainer.trainer import Trainer
from sharpen.trainer.work import Minibatch
from sharpen.types import Task

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Work out.", "parameters": {}}}
SEEN = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression":"2+2"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "assistant", "content": "#### 4"},
]


def tutor(folder: Path, data: str = "conversations", *, max_model_len: int = 256, **fields) -> Tutor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Tutor(
        tokenizer=tokenizer,
        renderer=None if data == "texts" else Renderer(tokenizer),
        end_ids=frozenset([tokenizer.eos_token_id]),
        max_model_len=max_model_len,
        data=data,  # type: ignore[arg-type]
        fields=SupervisedConfig(**fields),
    )


def task(index: int = 0, **row) -> Task:
    return Task(id=f"train/{index}", index=index, row=row)


def taught(one, lesson) -> list[str]:
    """The text of each run of loss tokens of each sequence."""
    runs = []
    for experience in lesson.experiences:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], experience.loss_mask_T.astype(int), [0]])))
        runs += [one.tokenizer.decode(experience.ids_T[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return runs


def test_loss_is_on_the_assistants_tokens_with_their_end_token_and_on_nothing_else(toy_model_dir):
    """Made by hand: the toy template writes `<|im_start|>role\\ncontent<|im_end|>\\n`."""
    one = tutor(toy_model_dir)
    lesson = one.lesson(task(messages=SEEN))
    (experience,) = lesson.experiences
    text = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression":"2+2"}}</tool_call><|im_end|>'
        "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n#### 4<|im_end|>"
    )
    assert one.tokenizer.decode(experience.ids_T) == text
    assert taught(one, lesson) == [
        '<tool_call>{"name": "calculator", "arguments": {"expression":"2+2"}}</tool_call><|im_end|>',
        "#### 4<|im_end|>",
    ]
    assert (experience.advantages_T == experience.loss_mask_T).all()
    assert set(experience.calls_T.tolist()) == {-1, 0, 1}


def test_ids_by_hand(toy_model_dir):
    one = tutor(toy_model_dir)
    (experience,) = one.lesson(task(prompt="a", response="b")).experiences
    ids = [one.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert experience.ids_T[-1] == ids[1]
    assert experience.ids_T[0] == ids[0]
    expected = one.tokenizer("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = one.tokenizer("b")["input_ids"]
    assert experience.ids_T.tolist() == [*expected, *answer, ids[1]]
    assert experience.loss_mask_T.tolist() == [False] * len(expected) + [True] * (len(answer) + 1)


def test_a_lesson_is_what_the_quickstarts_agent_would_have_seen(tmp_path):
    """The prompts of the taught turns are, id for id, the gateway's prompts for the same conversation with tools."""
    one = tutor(QUICKSTART / "model", max_model_len=512)
    row = task(messages=SEEN, tools=json.dumps([TOOL]))
    (experience,) = one.lesson(row).experiences
    first = one.renderer.encode(one.renderer.render(SEEN[:1], [TOOL], {}))
    assert experience.ids_T[: len(first)].tolist() == first.tolist()
    assert experience.loss_mask_T[len(first)]
    assert not experience.loss_mask_T[: len(first)].any()
    whole = one.tokenizer.apply_chat_template(SEEN, tools=[TOOL], tokenize=False)
    assert whole.rstrip("\n") == one.tokenizer.decode(experience.ids_T)
    assert "calculator" in one.tokenizer.decode(first)


FORGETFUL = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}[...]{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_template_that_rewrites_history_makes_a_sequence_for_each_turn(toy_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    tokenizer.chat_template = FORGETFUL
    one = replace(tutor(toy_model_dir), tokenizer=tokenizer, renderer=Renderer(tokenizer))
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "two"},
    ]
    lesson = one.lesson(task(messages=messages))
    assert taught(one, lesson) == ["one<|im_end|>", "two<|im_end|>"]
    assert "[...]" in tokenizer.decode(lesson.experiences[1].ids_T)
    assert not any(check.broken for check in check_step([lesson], [weighted([lesson], SUPERVISED["sft"])], one))


THINKING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last %}<think>
{{ message.reasoning_content or '' }}
</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}{% endif -%}"""


def test_reasoning_is_taught_and_a_switched_off_one_is_context(toy_model_dir):
    """As hybrid models have it: the prompt of `enable_thinking: false` already holds the empty reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    tokenizer.chat_template = THINKING
    one = replace(tutor(toy_model_dir), tokenizer=tokenizer, renderer=Renderer(tokenizer))
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    lesson = one.lesson(task(messages=[SEEN[0], answer]))
    assert taught(one, lesson) == ["<think>\nhm\n</think>\nyes<|im_end|>"]
    off = replace(one, template_kwargs={"enable_thinking": False})
    assert taught(off, off.lesson(task(prompt="a", response="yes"))) == ["yes<|im_end|>"]
    with pytest.raises(DatasetError, match="row train/0: the chat template writes the answer of message 1 differently"):
        off.lesson(task(messages=[SEEN[0], answer]))


def test_a_turn_without_an_end_token_is_refused(toy_model_dir):
    one = replace(tutor(toy_model_dir), end_ids=frozenset([0]))
    with pytest.raises(DatasetError, match=r"does not end message 1 with an end token of the model \(\[0\]\)"):
        one.lesson(ROWS[1])


def test_weight_zero_makes_a_turn_context(toy_model_dir):
    one = tutor(toy_model_dir)
    messages = [SEEN[0], {**SEEN[1], "weight": 0}, *SEEN[2:]]
    lesson = one.lesson(task(messages=messages))
    assert taught(one, lesson) == ["#### 4<|im_end|>"]
    assert "calculator" in one.tokenizer.decode(lesson.experiences[0].ids_T)


def test_the_last_turn_alone_is_taught_where_the_settings_say_so_and_messages_may_be_json(toy_model_dir):
    one = tutor(toy_model_dir, turns="last")
    lesson = one.lesson(task(messages=json.dumps(SEEN)))
    assert taught(one, lesson) == ["#### 4<|im_end|>"]


def test_rows_that_are_too_long_are_dropped_or_refused(toy_model_dir):
    assert tutor(toy_model_dir, max_model_len=8).lesson(task(messages=SEEN)).too_long
    with pytest.raises(DatasetError, match=r"row train/0 has \d+ tokens, but model.max_model_len is 8"):
        tutor(toy_model_dir, max_model_len=8, too_long="refuse").lesson(task(messages=SEEN))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "?"}, "neither 'messages' nor 'prompt'; its fields are: question"),
        ({"messages": "hello"}, "'messages' is not JSON"),
        ({"messages": "3"}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"messages": [{"role": "robot", "content": "a"}, *SEEN]}, "'robot'"),
        ({"prompt": "a"}, "it has no 'response'"),
        ({"messages": SEEN, "tools": "[{]"}, "'tools' is not JSON"),
        ({"messages": SEEN, "tools": [{"name": "f"}]}, "a tool is a function with a name"),
        ({"messages": [SEEN[0], {"role": "assistant", "content": "a", "weight": 0}]}, "every message .* weight 0"),
    ],
)
def test_a_row_that_cannot_be_taught_is_named(toy_model_dir, row, words):
    with pytest.raises(DatasetError, match=rf"row train/3: .*{words}"):
        tutor(toy_model_dir).lesson(task(3, **row))


def test_every_token_of_a_text_but_the_first_is_predicted_once_over_its_pieces(toy_model_dir):
    one = tutor(toy_model_dir, "texts", max_model_len=6)
    text = "question answer yes no 12345"
    ids = [*one.tokenizer(text)["input_ids"], one.tokenizer.eos_token_id]
    pieces = one.lesson(task(text=text)).experiences
    assert len(pieces) > 2
    assert [token for piece in pieces for token in piece.ids_T[piece.loss_mask_T].tolist()] == ids[1:]
    assert all(len(piece.ids_T) <= 6 for piece in pieces)
    for before, after in pairwise(pieces):
        assert before.ids_T[-1] == after.ids_T[0]


def test_the_end_of_a_text_that_fits_exactly_makes_no_empty_piece(toy_model_dir):
    one = tutor(toy_model_dir, "texts", max_model_len=4)
    assert [len(piece.ids_T) for piece in one.lesson(task(text="123")).experiences] == [4]
    assert [len(piece.ids_T) for piece in one.lesson(task(text="1234")).experiences] == [4, 2]
    assert one.lesson(task(text="")).experiences == ()


def test_dpo_by_hand():
    """Log ratios: pair 0 chosen 0.3 + 0.1, rejected -0.2: m = 0.6; pair 1 chosen -1, rejected 0.5: m = -1.5."""
    now = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.3, -2.1, -2.8, -3.0, -1.0], dtype=torch.float64)
    sides = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = margins(now, reference, sides, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert found.tolist() == pytest.approx([0.6, -1.5])
    losses = dpo(found, beta=0.5)
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.3)), math.log(1 + math.exp(0.75))])
    losses.sum().backward()
    # -beta sigmoid(-beta m) on the better side, its negative on the other: equation 7's gradient
    a, b = 0.5 / (1 + math.exp(0.3)), 0.5 / (1 + math.exp(-0.75))
    assert now.grad.tolist() == pytest.approx([-a, -a, a, -b, b])


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=6), st.floats(0.01, 2.0))
def test_dpo_falls_with_the_margin_and_is_log_2_at_none(found, beta):
    losses = dpo(torch.tensor(found, dtype=torch.float64), beta=beta)
    raised = dpo(torch.tensor(found, dtype=torch.float64) + 0.1, beta=beta)
    assert (raised < losses).all()
    assert float(dpo(torch.zeros(1, dtype=torch.float64), beta=beta)) == pytest.approx(math.log(2))


def test_cross_entropy_by_hand():
    assert float(cross_entropy(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 0.5]))) == 2.0


ROWS = [
    task(0, messages=SEEN),
    task(1, prompt="question", response="yes"),
    task(2, prompt="question", response="no no no no no"),
]
PAIRS = [
    task(index, prompt="question " * (index + 1), chosen="yes " * (index + 1), rejected=f"no {index}")
    for index in range(4)
]


def plain_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def make_trainer(folder: Path, algorithm, **config) -> Trainer:
    reference = None
    if algorithm.needs_reference:
        reference = TrainedModel(plain_model(folder), compute_dtype=torch.float64)
        reference.freeze()
    return Trainer(
        TrainedModel(plain_model(folder), compute_dtype=torch.float64),
        algorithm=algorithm,
        config=TrainerConfig(max_grad_norm=1e6, **config),
        learning_rate=1e-3,
        planned_updates=10,
        reference=reference,
    )


def gradient(trainer: Trainer, experiences) -> dict[str, torch.Tensor]:
    trainer.policy.module.zero_grad()
    trainer._loss.backward(
        trainer._loss.begin([Minibatch(experiences=experiences)], version=0, step=None, probe=())[0], 0
    )
    return {name: parameter.grad.clone() for name, parameter in trainer.policy.parameters()}


def logprobs(model, experience) -> torch.Tensor:
    """Logprobs of the loss tokens by the model's own forward pass over this sequence alone."""
    ids = torch.from_numpy(experience.ids_T.astype(np.int64))[None]
    scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    targets = np.flatnonzero(experience.loss_mask_T)
    return scores[targets - 1, experience.ids_T[targets]]


def assert_same(found, module):
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("limit", [8192, 40])
def test_gradient_of_sft_equals_the_label_loss_of_transformers(toy_model_dir, limit):
    """Packed, prefix-shared, in any number of micro-batches: that of `F.cross_entropy` over all labels at once."""
    one, algorithm = tutor(toy_model_dir), SUPERVISED["sft"]
    experiences = weighted([one.lesson(row) for row in ROWS], algorithm)
    trainer = make_trainer(toy_model_dir, algorithm, max_tokens_per_micro_batch=limit)
    plain = plain_model(toy_model_dir)
    logits, labels = [], []
    for experience in experiences:
        ids = torch.from_numpy(experience.ids_T.astype(np.int64))
        logits.append(plain(input_ids=ids[None], use_cache=False).logits[0, :-1])
        labels.append(torch.where(torch.from_numpy(experience.loss_mask_T), ids, -100)[1:])
    loss = F.cross_entropy(torch.cat(logits), torch.cat(labels))
    loss.backward()
    measured = trainer.measure(experiences)
    assert measured.loss == pytest.approx(loss.item(), rel=1e-6)
    of_row = dict.fromkeys((experience.rollout_id for experience in experiences), 0.0)
    for experience, logits_TV, labels_T in zip(experiences, logits, labels, strict=True):
        part = F.cross_entropy(logits_TV, labels_T, reduction="sum") / sum(one.loss_mask_T.sum() for one in experiences)
        of_row[experience.rollout_id] += part.item()
    assert measured.rows == pytest.approx(of_row, rel=1e-6)
    assert_same(gradient(trainer, experiences), plain)


@pytest.mark.parametrize("limit", [8192, 64, 1])
def test_gradient_of_dpo_equals_a_plain_implementation_however_it_is_split(toy_model_dir, limit):
    one, algorithm = (
        tutor(toy_model_dir, "pairs"),
        resolve_supervised("dpo", LossConfig(policy_loss_args={"beta": 0.7})),
    )
    experiences = weighted([one.lesson(row) for row in PAIRS], algorithm)
    trainer = make_trainer(toy_model_dir, algorithm, max_tokens_per_micro_batch=limit)
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view_as(parameter)
    plain, reference = plain_model(toy_model_dir), plain_model(toy_model_dir)
    plain.load_state_dict(trainer.policy.module.state_dict())
    total, expected = 0.0, {}
    for row in PAIRS:
        chosen, rejected = (e for e in experiences if e.rollout_id == row.id)
        assert chosen.advantages_T.max() == 1.0
        assert rejected.advantages_T.min() == -1.0
        with torch.no_grad():
            before = [logprobs(reference, e).sum() for e in (chosen, rejected)]
        margin = (logprobs(plain, chosen).sum() - before[0]) - (logprobs(plain, rejected).sum() - before[1])
        expected[row.id] = margin.item()
        total = total - F.logsigmoid(0.7 * margin) / len(PAIRS)
    total.backward()
    measured = trainer.measure(experiences)
    assert measured.margins == pytest.approx(expected)
    parts = {row: math.log1p(math.exp(-0.7 * margin)) / len(PAIRS) for row, margin in expected.items()}
    assert measured.rows == pytest.approx(parts)
    assert measured.loss == pytest.approx(total.item(), rel=1e-6)
    assert_same(gradient(trainer, experiences), plain)
    assert len(trainer._loss._packs(experiences)) == {8192: 1, 64: 4, 1: 4}[limit]


def test_both_forms_of_pairs_teach_the_same(toy_model_dir):
    one = tutor(toy_model_dir, "pairs")
    user = {"role": "user", "content": "q"}
    by_prompt = one.lesson(task(prompt="q", chosen="yes", rejected="no"))
    sides = {name: [user, {"role": "assistant", "content": name}] for name in ("yes", "no")}
    whole = one.lesson(task(chosen=sides["yes"], rejected=sides["no"]))
    assert taught(one, by_prompt) == taught(one, whole) == ["yes<|im_end|>", "no<|im_end|>"]
    for first, second in zip(by_prompt.experiences, whole.experiences, strict=True):
        assert first.ids_T.tolist() == second.ids_T.tolist()
    with pytest.raises(DatasetError, match="'chosen' and 'rejected' are the same"):
        one.lesson(task(prompt="q", chosen="yes", rejected="yes"))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "rollout-mean"])
def test_weights_of_an_update_add_up_to_one_and_follow_the_unit(toy_model_dir, aggregation):
    one = tutor(toy_model_dir)
    algorithm = resolve_supervised("sft", LossConfig(aggregation=aggregation))
    lessons = [one.lesson(row) for row in ROWS]
    experiences = weighted(lessons, algorithm)
    assert sum(float(e.weights_T.sum()) for e in experiences) == pytest.approx(1.0)
    per_row = [float(e.weights_T.sum()) for e in experiences]
    if aggregation == "rollout-mean":
        assert per_row == pytest.approx([1 / 3] * 3)
    if aggregation == "sequence-mean-token-mean":  # four answers, two of them in the first row
        assert per_row == pytest.approx([1 / 2, 1 / 4, 1 / 4])


def test_lessons_are_split_over_minibatches_whole():
    assert [list(part) for part in split([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4, 5]]
    assert [list(part) for part in split([1], 3)] == [[1]]


def test_the_certificate_names_what_is_broken(toy_model_dir):
    """Each damage is found by the check that is there for it, and an undamaged step breaks none."""
    one, algorithm = tutor(toy_model_dir), SUPERVISED["sft"]
    lessons = [one.lesson(row) for row in ROWS]
    good = weighted(lessons, algorithm)
    assert {check.name: check.broken for check in check_step(lessons, [good], one)} == {
        "rows": 0,
        "mask": 0,
        "rendered": 0,
    }
    first = good[0]
    shifted = replace(first, loss_mask_T=np.roll(first.loss_mask_T, -1), weights_T=np.roll(first.weights_T, -1))
    ids_T = first.ids_T.copy()
    ids_T[3] += 1
    for damaged, name in (
        ([shifted, *good[1:]], "mask"),
        ([replace(first, ids_T=ids_T), *good[1:]], "rendered"),
        ([replace(first, weights_T=np.zeros_like(first.weights_T)), *good[1:]], "mask"),
        (list(good[1:]), "rows"),
    ):
        broken = {check.name: check.first for check in check_step(lessons, [damaged], one) if check.broken}
        assert name in broken, broken
        with pytest.raises(CertificateError, match=f"{name}: .*train/0"):  # as the loop stops
            broken_sentences(check_step(lessons, [damaged], one), stop=True)
        assert "train/0" in broken[name]
    pairs = [tutor(toy_model_dir, "pairs").lesson(PAIRS[0])]
    half = weighted(pairs, SUPERVISED["dpo"])[:1]
    broken = {check.name for check in check_step(pairs, [half], tutor(toy_model_dir, "pairs")) if check.broken}
    assert broken == {"pairs"}
    (line,) = broken_sentences(check_step(pairs, [half], tutor(toy_model_dir, "pairs")), stop=False)
    assert line.startswith("pairs: ")


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("sft", {"advantage": "rloo"}, "loss.advantage has no effect in 'sft'"),
        ("sft", {"kl_coef": 0.1}, "loss.kl_coef has no effect"),
        ("dpo", {"aggregation": "token-mean"}, "loss.aggregation has no effect in 'dpo'"),
        ("dpo", {"policy_loss_args": {"bta": 1}}, "its loss takes beta"),
        ("dpo", {"policy_loss_args": {"beta": "much"}}, "must hold numbers"),
        ("cpt", {"constant_length": 4}, "go together"),
    ],
)
def test_settings_without_effect_are_refused(name, loss, words):
    with pytest.raises(ConfigError, match=words):
        resolve_supervised(name, LossConfig(**loss))


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(folder: Path, model: Path, data: Path, kind: str, **more):
    return {
        "train_dataset": DatasetConfig(path=str(data), total_steps=more.pop("steps", 12)),
        "model": TunerModelConfig(model_path=str(model), max_model_len=64, max_tokens=8),
        "algorithm": AlgorithmConfig(
            algorithm_type=kind, batch_size=4, learning_rate=1e-2, save_interval_steps=4, eval_interval_steps=6
        ),
        "settings": {"checkpoint_root_dir": str(folder / "runs"), **more.pop("settings", {})},
        **more,
    }


TEACHABLE = [
    {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "yes"}]}
    for i in range(20)
]


async def says_yes(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}]
    )
    return WorkflowOutput(reward=float(reply.choices[0].message.content == "yes"))


def test_sft_teaches_the_agent_and_leaves_everything_in_the_run_directory(tmp_path, toy_model_dir, toy_dataset, capsys):
    """The workflow evaluates before and after, as in reinforcement learning: from nothing to (nearly) always right."""
    rows = [
        *TEACHABLE,
        {"messages": [{"role": "user", "content": "long " * 99}, {"role": "assistant", "content": "a"}]},
    ]
    result = tune(
        workflow_func=says_yes,
        eval_dataset=DatasetConfig(path=str(toy_dataset), split="test"),
        **options(tmp_path, toy_model_dir, write(tmp_path, "rows", rows), "sft", steps=20),
    )
    assert result.before["greedy"].accuracy == 0.0
    assert result.after["greedy"].accuracy > 0.9
    assert result.loss_after < 0.3 < result.loss_before
    assert (result.verdict.kind, result.verdict.measure) == ("better", "sampled accuracy")
    for name in ("config.yaml", "resolved.json", "run.db", "metrics.jsonl", "summary.json", "loss_curve.png"):
        assert (result.run_dir / name).stat().st_size > 0, name
    certificate = json.loads((result.run_dir / "certificate.json").read_text())
    assert certificate["holds"]
    assert {check["name"] for check in certificate["checks"]} == {"rows", "mask", "rendered"}
    assert certificate["logprob_gaps"] is None
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["held_out"]["after"]["loss"] == result.loss_after
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("batch/rows_too_long", 0) for row in metrics) >= 1
    shown = capsys.readouterr().out
    assert "of 4 rows left out: longer than 64 tokens" in shown
    assert shown.count("engine: embedded (") == 1
    assert shown.splitlines()[-1] == f"run directory: {result.run_dir}"
    model = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert model.config.vocab_size
    assert main(["certify", str(result.run_dir)]) == 0
    assert "76 trained, 4 too long" in capsys.readouterr().out


def test_a_run_from_yaml_without_a_workflow_goes_on_where_it_was(tmp_path, toy_model_dir, capsys):
    """Two sessions of 4 and 8 steps end with the very weights of one of 12."""
    write(tmp_path, "rows", TEACHABLE)
    content = {
        "train_dataset": {"path": "rows.jsonl", "total_steps": 12},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "algorithm": {"algorithm_type": "sft", "batch_size": 3, "learning_rate": 0.01},
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "name": "whole",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["run", "--config", str(tmp_path / "run.yaml")]) == 0
    parts = ["run", "--config", str(tmp_path / "run.yaml"), "--set", "name=parts"]
    assert main([*parts, "--set", "train_dataset.total_steps=4"]) == 0
    assert main(parts) == 0
    assert "continuing parts after step 4" in capsys.readouterr().out
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "Sharpen" / name / "global_step_12").state_dict()
        for name in ("whole", "parts")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    with pytest.raises(ConfigError, match=r"algorithm\.algorithm_type: 'sft' -> 'cpt'"):
        tune(
            config_path=tmp_path / "run.yaml",
            settings={"algorithm.algorithm_type": "cpt", "supervised.text_key": "text"},
            train_dataset=DatasetConfig(path=str(write(tmp_path, "texts", [{"text": "yes"}] * 3))),
        )


AGENT = """
from sharpen import JudgeOutput, WorkflowOutput


async def run_agent(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content)


async def judge(task, response):
    return JudgeOutput(reward=float(response == "yes"))
"""


def test_workflow_and_judge_of_the_file_evaluate_the_agent(tmp_path, toy_model_dir, toy_dataset):
    write(tmp_path, "rows", TEACHABLE)
    (tmp_path / "agent.py").write_text(AGENT)
    content = {
        "workflow": "agent.py:run_agent",
        "judge": "agent.py:judge",
        "train_dataset": {"path": "rows.jsonl", "total_steps": 1},
        "eval_dataset": {"path": str(toy_dataset), "split": "test"},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64, "max_tokens": 8},
        "algorithm": {"algorithm_type": "sft", "batch_size": 3},
        "checkpoint_root_dir": str(tmp_path / "runs"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    result = tune(config_path=tmp_path / "run.yaml")
    assert result.before["greedy"].num_tasks == result.after["sampled"].num_tasks == 10


def test_cpt_and_dpo_learn(tmp_path, toy_model_dir, capsys):
    texts = write(tmp_path, "texts", [{"body": "yes no " * 6} for _ in range(9)] + [{"body": ""}])
    result = tune(
        **options(tmp_path, toy_model_dir, texts, "cpt", settings={"supervised.text_key": "body", "time_limit_s": 600})
    )
    assert result.loss_after < 0.5 * result.loss_before
    assert "1 of 4 rows have no token to learn" in capsys.readouterr().out
    rows = [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no"} for i in range(100)]
    result = tune(**options(tmp_path, toy_model_dir, write(tmp_path, "pairs", rows), "dpo"))
    assert result.loss_before == pytest.approx(math.log(2))
    assert result.loss_after < 0.5
    assert (result.verdict.kind, result.verdict.num_tasks) == ("better", 10)
    assert result.verdict.difference == pytest.approx(result.loss_before - result.loss_after)
    assert "(held-out loss, 10 held-out rows)" in capsys.readouterr().out
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["held_out"]["after"]["accuracy"] == 1.0
    certificate = json.loads((result.run_dir / "certificate.json").read_text())
    assert {check["name"] for check in certificate["checks"]} == {"rows", "mask", "rendered", "pairs"}


def test_a_bad_row_late_in_the_data_stops_the_run_with_a_checkpoint_to_go_on_from(tmp_path, toy_model_dir):
    rows = TEACHABLE * 5
    path = write(tmp_path, "rows", [*rows[:80], {"messages": [{"role": "user", "content": "?"}]}, *rows[81:]])
    given = options(tmp_path, toy_model_dir, path, "sft", steps=25, experiment_name="late")
    given["settings"] |= {"evaluation.hold_out": False}
    with pytest.raises(DatasetError, match="row rows/80: no message of the assistant"):
        tune(**given)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tune(**given)
    assert result.steps == 25
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "trainer/loss" in row] == list(range(1, 26))
    assert result.loss_before is None


def test_the_time_limit_ends_a_run_with_a_checkpoint(tmp_path, toy_model_dir):
    data = write(tmp_path, "rows", TEACHABLE)
    result = tune(**options(tmp_path, toy_model_dir, data, "sft", settings={"time_limit_s": 1e-3}))
    assert result.steps == 1
    assert result.model_dir.exists()


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"workflow_func": says_yes}, ConfigError, "on the tasks of eval_dataset"),
        ({"judge_func": says_yes}, ConfigError, "give both, or neither"),
        (
            {
                "workflow_func": says_yes,
                "eval_dataset": DatasetConfig(path="d"),
                "settings": {"model.inference_engine_num": 2},
            },
            ConfigError,
            "inference_engine_num is 2",
        ),
        ({"settings": {"sampling.order": "difficulty"}}, ConfigError, "goes by rewards"),
        (
            {"settings": {"supervised.messages_key": "chat", "supervised.prompt_key": "p"}},
            DatasetError,
            "neither 'chat'",
        ),
        ({"model": 4}, DatasetError, "fits the model"),
        ({"settings": {"evaluation.hold_out": False}, "model": 4}, DatasetError, "none of the 4 rows of step 1"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, toy_model_dir, more, kind, words):
    data = write(tmp_path, "rows", TEACHABLE)
    given = options(tmp_path, toy_model_dir, data, "sft")
    given["settings"] |= more.get("settings", {})
    if "model" in more:
        given["model"] = TunerModelConfig(model_path=str(toy_model_dir), max_model_len=more["model"])
    more = {name: value for name, value in more.items() if name not in ("settings", "model")}
    with pytest.raises(kind, match=words):
        tune(**given, **more)


@pytest.mark.slow
def test_sft_then_grpo_trains_the_quickstarts_agent(tmp_path, monkeypatch):
    """A few right traces raise the agent, and GRPO from that checkpoint raises it further."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import agent

    data = str(QUICKSTART / "data")
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:48]
    traces = write(tmp_path, "traces", [right_trace(json.loads(line), agent) for line in lines])
    common = {
        "workflow_func": agent.run_agent,
        "judge_func": agent.judge,
        "eval_dataset": DatasetConfig(path=data, split="test"),
    }
    settings = {
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "trainer": {"beta2": 0.95, "weight_decay": 0.0},
        "evaluation.max_tasks": 256,
    }
    taught = tune(
        train_dataset=DatasetConfig(path=str(traces), total_steps=6),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=16, learning_rate=1e-4),
        settings=settings,
        **common,
    )
    assert taught.loss_after < taught.loss_before
    assert taught.after["sampled"].accuracy > taught.before["sampled"].accuracy + 0.05
    tuned = tune(
        train_dataset=DatasetConfig(path=data, split="train", total_steps=8),
        model=TunerModelConfig(model_path=str(taught.model_dir), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=16, learning_rate=3e-4),
        settings={**settings, "loss.kl": "none"},
        **common,
    )
    assert tuned.before["greedy"].accuracy == pytest.approx(taught.after["greedy"].accuracy, abs=0.03)  # bfloat16 files
    assert tuned.after["sampled"].accuracy > tuned.before["sampled"].accuracy + 0.1
    del sys.modules["agent"]


@pytest.mark.slow
def test_an_expert_beside_the_rollouts_trains_the_quickstarts_agent(tmp_path, monkeypatch):
    """`mix` with a few right traces as the expert's rows: the agent learns from both at once."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import agent

    data = str(QUICKSTART / "data")
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:48]
    traces = write(tmp_path, "traces", [right_trace(json.loads(line), agent) for line in lines])
    tuned = tune(
        workflow_func=agent.run_agent,
        judge_func=agent.judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=12),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="mix", group_size=8, batch_size=16, learning_rate=3e-4),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "trainer": {"beta2": 0.95, "weight_decay": 0.0},
            "loss.kl": "none",
            "expert": {"dataset": {"path": str(traces)}, "batch_size": 16},
            "evaluation.max_tasks": 256,
        },
    )
    assert tuned.after["greedy"].accuracy > tuned.before["greedy"].accuracy + 0.2
    assert tuned.after["sampled"].accuracy > tuned.before["sampled"].accuracy + 0.2
    del sys.modules["agent"]


def right_trace(row: dict[str, str], agent) -> dict[str, object]:
    """The question, the right call of the calculator with its result, and the answer."""
    expression, result = row["answer"].split(" = ")[0], row["answer"].rpartition("#### ")[2]
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    messages = [
        {"role": "system", "content": agent.SYSTEM},
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]
    return {"messages": messages, "tools": json.dumps(agent.TOOLS)}


def test_algorithms_are_listed_with_formula_source_and_defaults(capsys):
    assert main(["algorithms"]) == 0
    shown = capsys.readouterr().out
    for words in ("sft\n", "cpt\n", "dpo\n", "arXiv 2305.18290", "beta 0.1", "mean over pairs"):
        assert words in shown


def test_settings_of_one_kind_of_run_are_not_ignored_in_the_other(tmp_path, toy_model_dir, toy_dataset, capsys):
    given = options(tmp_path, toy_model_dir, toy_dataset, "grpo", settings={"supervised.text_key": "body"})
    with pytest.raises(ConfigError, match="the settings of supervised have no effect: 'grpo' learns from rollouts"):
        tune(says_yes, **given)
    rows = write(tmp_path, "rows", TEACHABLE)
    tune(
        **options(
            tmp_path, toy_model_dir, rows, "sft", steps=1, settings={"rollout.timeout_s": 3, "check.num_tasks": 1}
        )
    )
    assert "without effect in sft: rollout.timeout_s, check.num_tasks" in capsys.readouterr().out
