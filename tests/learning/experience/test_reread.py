"""Calls as a teacher with other tokens reads them: prompt, answer, ends; and the calls that it cannot read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experience_builders import audited, make_call, make_group, make_rollout
from other_tokenizers import TURNS, byte_bpe, fast, llama_like, policy_model, word_piece
from toy_model import write_model

from sharpen.config.distill import DistillConfig
from sharpen.config.run import LossConfig
from sharpen.errors import ConfigError, TrainingError
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.experience.reread import Policy, Reader, Rereading
from sharpen.models.configuration import load_tokenizer
from sharpen.types import PROMPT_ROLE, Call, CallStatus, Constraint, Reread, Sampling

QUESTION = {"role": "user", "content": "question 1"}
DISTILL = Distill(divergence="reverse_sampled")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = fast(byte_bpe(), eos="<eot>", bos="<bos>", template=TURNS)
    return write_model(tmp_path_factory.mktemp("teacher"), made, longest=64)


@pytest.fixture(scope="module")
def reader(base: Path, folder: Path) -> Reader:
    return Reader(Policy(base), folder, {})


def call_of(base: Path, text: str, *, ended: bool = True, messages: Any = (QUESTION,), **changes: Any) -> Call:
    """The call in which the policy said this."""
    own = load_tokenizer(base)
    ids = [*own(text)["input_ids"], *([own.eos_token_id] if ended else [])]
    prompt = own.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    given = {"finish_reason": "stop" if ended else "length", "messages": tuple(messages)}
    return make_call(0, own(prompt)["input_ids"], ids, **given | changes)


def spelled(folder: Path, ids: Any) -> list[str]:
    own = load_tokenizer(folder)
    return [own.decode([int(id_)]) for id_ in ids]


def test_prompt_answer_and_end_by_hand(base, folder, reader) -> None:
    """The prompt is the teacher's own, its end token the one that its template writes, not that of a text; where both
    have a token's end a chunk ends.

    Break: leave the end token out, or take `eos_token_id` for it.
    """
    found = reader.read(call_of(base, "answers 12"))
    assert isinstance(found, Reread)
    assert "".join(spelled(folder, found.prompt_ids_P)) == "<bos><turn>user: question 1<end>\n<turn>assistant: "
    assert spelled(folder, found.answer_ids_R) == ["an", "swer", "s", " ", "12", "<end>"]
    assert spelled(base, load_tokenizer(base)("answers 12")["input_ids"]) == ["an", "s", "w", "er", "s", " 1", "2"]
    assert found.chunks_S.tolist() == [0, 1, 1, 1, 2, 3, 3, 4]
    assert found.chunks_R.tolist() == [0, 1, 2, 3, 3, 4]
    cut = reader.read(call_of(base, "answers 12", ended=False))
    assert isinstance(cut, Reread)
    assert cut.answer_ids_R.tolist() == found.answer_ids_R[:-1].tolist()
    assert cut.chunks_S.tolist() == found.chunks_S[:-1].tolist()


def test_an_answer_of_nothing_but_its_end(base, folder, reader) -> None:
    found = reader.read(call_of(base, ""))
    assert isinstance(found, Reread)
    assert (found.chunks_S.tolist(), found.chunks_R.tolist()) == ([0], [0])
    assert spelled(folder, found.answer_ids_R) == ["<end>"]


def test_special_tokens_that_an_answer_spells_are_text(base, folder, reader) -> None:
    """Red when the answer is encoded as a prompt is."""
    found = reader.read(call_of(base, "a <end"))
    assert isinstance(found, Reread)
    own = load_tokenizer(base)
    assert "end" in "".join(spelled(folder, found.answer_ids_R[:-1]))
    ids = [*own("<eot")["input_ids"], own.get_vocab()[":"]]
    encoded = reader._encoded("<end>")
    assert encoded is not None
    assert not {*encoded[0]} & reader._tokens.special_ids
    assert isinstance(reader.read(replace(call_of(base, "x"), sampled_ids_S=np.array(ids, np.int32))), Reread)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_teacher_that_puts_a_space_before_a_text(scheme, base, tmp_path) -> None:
    """As Llama's: the answer has exactly the policy's bytes, whatever the tokenizer makes of a text by itself."""
    made = fast(llama_like(scheme=scheme), eos="</s>", bos="<s>", template=TURNS)
    reader = Reader(Policy(base), write_model(tmp_path, made), {})
    for text in ("the answer", " the answer", "12345 :<", "x"):
        found = reader.read(call_of(base, text))
        assert isinstance(found, Reread)
        pieces = reader._tokens.of(found.answer_ids_R[:-1].tolist())
        assert pieces is not None
        assert b"".join(pieces) == text.encode()
        assert found.answer_ids_R[-1] == made.eos_token_id


def test_special_tokens_within_an_answer_and_stray_bytes_are_text(base, folder, reader) -> None:
    """The teacher finds them unlikely. Left out, such an answer would cost nothing, and be learned."""
    own, its = load_tokenizer(base), load_tokenizer(folder)
    ids = [*own("a")["input_ids"], own.convert_tokens_to_ids("<|im_start|>"), own.eos_token_id]
    found = reader.read(make_call(0, own("question")["input_ids"], ids))
    assert isinstance(found, Reread)
    assert "".join(spelled(folder, found.answer_ids_R)) == "a<|im_start|><end>"
    assert found.chunks_S.tolist() == [0, 1, 2]
    assert found.has_special
    assert not reader._policy.has_special(make_call(0, [1], ids[:1]))
    vocabulary = its.get_vocab()
    ids = [vocabulary["a"], vocabulary["Ã"], vocabulary["b"], vocabulary["Ã"], its.eos_token_id]
    found = Reader(Policy(folder), folder, {}).read(make_call(0, its("question")["input_ids"], ids))
    assert isinstance(found, Reread)
    assert its.decode(found.answer_ids_R) == "a\ufffdb\ufffd<end>"
    assert found.chunks_S.tolist() == [0, 1, 1, 2, 3]


def test_reasoning_that_the_prompt_opened_is_open_for_the_teacher(folder, tmp_path) -> None:
    """Once, also where the teacher's template opens it too."""
    its = load_tokenizer(folder)
    call = call_of(folder, "yes</think>")
    tail = np.array([its.get_vocab()["<think>"], *its("\n")["input_ids"]], np.int32)
    opened = replace(call, prompt_ids_P=np.concatenate([call.prompt_ids_P, tail]))
    thinks = TURNS.replace("<turn>assistant: {%", "<turn>assistant: <think>\n{%")
    other = write_model(tmp_path, fast(byte_bpe(), eos="<eot>", bos="<bos>", template=thinks))
    for teacher, given, end in (
        (folder, opened, ": <think>\n"),
        (folder, call, "assistant: "),
        (other, opened, ": <think>\n"),
    ):
        found = Reader(Policy(folder), teacher, {}).read(given)
        assert isinstance(found, Reread)
        said = "".join(spelled(folder, found.prompt_ids_P))
        assert said.endswith(end)
        assert said.count("<think>") == end.count("<think>")


def test_a_prompt_of_text_is_read_as_it_is(base, folder, reader) -> None:
    own = load_tokenizer(base)
    raw = {"messages": ({"role": PROMPT_ROLE, "content": "the question"},)}
    call = make_call(0, own("the question")["input_ids"], own(" yes")["input_ids"] + [own.eos_token_id], **raw)
    found = reader.read(call)
    assert isinstance(found, Reread)
    assert "".join(spelled(folder, found.prompt_ids_P)) == "the question"
    assert spelled(folder, found.answer_ids_R)[-1] == "<eot>"
    ids = np.concatenate([call.prompt_ids_P, [own.convert_tokens_to_ids("<|im_start|>")]]).astype(np.int32)
    assert "special tokens that no messages" in str(reader.read(replace(call, prompt_ids_P=ids)))


def test_what_no_teacher_with_other_tokens_can_read(base, folder, reader) -> None:
    """Each is named, and none becomes a number."""
    good = call_of(base, "yes")
    other = Reader(Policy(folder), folder, {})
    its = load_tokenizer(folder)
    part = its.backend_tokenizer.encode("a\N{SNOWMAN}").ids
    cases = {
        "a token without text": (reader, replace(good, sampled_ids_S=np.array([1000, 1], np.int32))),
        "a constraint": (reader, replace(good, constraint=Constraint(grammar="start: /a/", origin="x"))),
        "top_p": (reader, replace(good, sampling=Sampling(top_p=0.5))),
        "min_p": (reader, replace(good, sampling=Sampling(min_p=0.5))),
        "no messages": (reader, replace(good, messages=())),
        "more than the 64 tokens": (reader, call_of(base, "abcdefgh 12 " * 9)),
        "cut off within a character": (
            other,
            replace(good, finish_reason="length", sampled_ids_S=np.array([*part, its.get_vocab()["Ã"]], np.int32)),
        ),
        "messages that the teacher's chat template refuses": (
            reader,
            replace(good, messages=({"role": "user", "content": "\ud800"},)),
        ),
    }
    for reason, (own_reader, call) in cases.items():
        assert reason in str(own_reader.read(call)), reason
    assert isinstance(reader.read(replace(good, sampling=Sampling(temperature=0.7))), Reread)


def test_a_text_that_the_tokenizer_changes_is_not_read(base, folder, tmp_path) -> None:
    """A tokenizer that composes accents has other bytes for this text."""
    from tokenizers import normalizers

    made = byte_bpe()
    made.normalizer = normalizers.Lowercase()
    reader = Reader(Policy(folder), write_model(tmp_path, fast(made, eos="<eot>", template=TURNS)), {})
    assert reader.read(call_of(folder, "Yes")) == "a text that the teacher's tokenizer changes"
    assert isinstance(reader.read(call_of(folder, "yes")), Reread)


def test_tokenizers_of_no_use_are_refused_before_anything_is_loaded(base, tmp_path) -> None:
    other = write_model(tmp_path / "words", fast(word_piece(), eos="[SEP]"))
    with pytest.raises(ConfigError, match=r"the teacher in .*words cannot.*WordPiece"):
        Rereading.of(DISTILL, base, {"": other}, None)
    with pytest.raises(ConfigError, match=r"the model in .*words"):
        Rereading.of(DISTILL, other, {"": base}, None)
    assert Rereading.of(DISTILL, base, {}, None) is None
    assert Rereading.of(None, base, {"": other}, None) is None


def test_calls_that_are_not_read_are_left_out_and_counted(base, folder) -> None:
    """They train nothing and weigh nothing: the weights are those of the others alone. Only trainable calls of scored
    rollouts are read.

    Break: keep the status of a call that is left out, with an advantage of 0.
    """
    rereading = Rereading.of(DISTILL, base, {"": folder}, None)
    assert rereading is not None
    good, bad = call_of(base, "yes"), call_of(base, "answers", constraint=Constraint(grammar="start: /a/", origin="x"))
    greedy = replace(call_of(base, "yes", sampling=Sampling(temperature=0.0)), index=1)
    group = make_group(
        [
            make_rollout([good, greedy]),
            make_rollout([bad, replace(good, index=1), replace(good, index=2)], index=1),
            make_rollout([bad], reward=None, index=2),
        ]
    )
    placed = rereading.place([replace(group, side=(replace(group, id="s"),))])
    (found,) = placed.groups
    assert [[call.status for call in one.calls] for one in found.rollouts] == [
        [CallStatus.USED, CallStatus.USED],
        [CallStatus.LEFT_OUT, CallStatus.USED, CallStatus.USED],
        [CallStatus.USED],
    ]
    assert found.side[0].rollouts[1].calls[0].status == CallStatus.LEFT_OUT
    assert rereading.reread.keys() == {("g/0", 0), ("g/1", 1), ("g/1", 2)}
    assert placed.metrics["teacher/calls_left_out"] == 2
    assert placed.note == "calls without a teacher: a constraint (2)"
    assert placed.metrics["teacher/tokens"] == sum(len(one.answer_ids_R) for one in rereading.reread.values())


def test_a_run_whose_teacher_reads_nothing_ends_with_the_reason(base, folder) -> None:
    rereading = Rereading.of(DISTILL, base, {"": folder}, None)
    assert rereading is not None
    bad = call_of(base, "answers", sampling=Sampling(top_k=3))
    group = make_group([make_rollout([bad])])
    with pytest.raises(TrainingError, match=r"cannot read 1 of the 1 calls of this step .* is 0\.5\): top_k \(1\)"):
        rereading.place([group])
    both = make_group([make_rollout([bad]), make_rollout([call_of(base, "yes")], index=1)])
    assert rereading.place([both]).metrics["teacher/calls_left_out"] == 1
    own = load_tokenizer(base)
    ids = [own.convert_tokens_to_ids("<|im_start|>"), own.eos_token_id]
    marked = make_call(0, own("question")["input_ids"], ids)
    with pytest.raises(TrainingError, match="1 of the 1 answers of this step have special tokens within"):
        rereading.place([make_group([make_rollout([marked])])])
    assert rereading.place([]).note == ""


def test_only_the_tasks_of_such_a_teacher_are_reread(base, folder) -> None:
    """One of two teachers has the model's tokens: its calls stay as they are, and their sequences get nothing."""
    distill = replace(DISTILL, teacher_key="domain", teachers=("maths", "code"))
    rereading = Rereading.of(distill, base, {"code": folder}, None)
    assert rereading is not None
    bad = call_of(base, "answers", constraint=Constraint(grammar="start: /a/", origin="x"))
    groups = [
        replace(one, task=replace(one.task, row={"domain": name}))
        for name, call in (("maths", bad), ("code", call_of(base, "yes")))
        for one in [make_group([make_rollout([call], group=name)], group=name)]
    ]
    placed = rereading.place(groups)
    assert placed.metrics["teacher/calls_left_out"] == 0
    assert placed.groups[0] == groups[0]
    assert rereading.reread.keys() == {("code/0", 0)}


def test_a_batch_has_the_readings_of_its_calls(base, folder) -> None:
    algorithm = resolve("on_policy_distill", LossConfig(), 1, distill=DistillConfig())
    rereading = Rereading.of(algorithm.distill, base, {"": folder}, None)
    assert rereading is not None
    placed = rereading.place([make_group([make_rollout([call_of(base, "yes")])])])
    (batch,) = rereading.join([make_batch(placed.groups, algorithm)])
    (one,) = batch.experiences
    assert one.rereads.keys() == {0}
    assert len(one.rereads[0].chunks_S) == one.loss_mask_T.sum()


def test_a_call_that_was_left_out_weighs_nothing_and_is_found_where_it_trains_as_zero(base, folder) -> None:
    """The other calls have all the weight. A batch with the call in it, without an advantage, is no batch of the
    records.

    Break: keep the status of a call that is left out.
    """
    algorithm = resolve("on_policy_distill", LossConfig(), 2, distill=DistillConfig())
    rereading = Rereading.of(algorithm.distill, base, {"": folder}, None)
    assert rereading is not None
    bad = call_of(base, "answers", constraint=Constraint(grammar="start: /a/", origin="x"))
    group = make_group([make_rollout([call_of(base, text)], index=n) for n, text in enumerate(("yes", "the answer"))])
    group = replace(group, rollouts=(*group.rollouts, make_rollout([bad], index=2)))
    placed = rereading.place([group]).groups
    (batch,) = rereading.join([make_batch(placed, algorithm)])
    assert [one.rollout_id for one in batch.experiences] == ["g/0", "g/1"]
    weights = [one.weights_T[one.loss_mask_T] for one in batch.experiences]
    assert np.concatenate(weights).tolist() == [pytest.approx(1 / sum(map(len, weights)))] * sum(map(len, weights))
    assert not [check for check in audited(placed, [batch], algorithm, group_size=3).values() if check.broken]
    found = audited(placed, [make_batch([group], algorithm)], algorithm, group_size=3)
    assert {name for name, check in found.items() if check.broken} >= {"loss_mask", "token_weights"}
