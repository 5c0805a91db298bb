"""Updates taught by a model with other tokens, made once more: right ones are found right, faults in how the text was
reread are found. What the certificate reads is what the run read, for any text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_update import STEP, FaultyUpdate, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import TURNS, byte_bpe, fast, llama_like, other_teacher, policy_model
from probe_trainer import probed, probed_twice
from toy_model import write_model

from sharpen.errors import CheckpointError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.model import PlainSequence
from sharpen.evidence.certificate.plain.reread import PlainReader
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.evidence.certificate.plain.teacher import Teaching
from sharpen.learning.experience.reading import read_groups
from sharpen.learning.experience.reread import Policy, Reader
from sharpen.models.configuration import load_tokenizer
from sharpen.types import Call, CallStatus, Constraint, Reread, Sampling

SETTINGS: dict[str, Any] = {
    "evaluation.hold_out": False,
    "loss.kl": "k2",
    "loss.kl_coef": 0.02,
    "trainer.max_grad_norm": 1e6,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Mapping[str, Path]:
    """A policy, a teacher with other tokens, tasks, and a run."""
    root = tmp_path_factory.mktemp("reread")
    policy_model(root / "policy")
    other_teacher(root / "teacher")
    (root / "tasks").mkdir()
    rows = (json.dumps({"question": f"question {n}"}) for n in range(40))
    (root / "tasks" / "train.jsonl").write_text("\n".join(rows))
    found = {name: root / name for name in ("policy", "teacher", "tasks")}
    teacher = {"distill.teacher_path": str(found["teacher"])}
    found["run"] = make_run(root, found["policy"], found["tasks"], "on_policy_distill", **SETTINGS, **teacher)
    return found


def test_steps_without_a_fault_are_found_right(places) -> None:
    """Some chunks have several tokens, and some answers special ones."""
    found = retrain(places["run"])
    assert [(one.first, one.last) for one in found.repeated] == [(step, step) for step in range(1, STEP + 1)]
    assert not found.problems
    assert not found.not_repeated
    assert certify(places["run"]).holds
    rows = [json.loads(line) for line in (places["run"] / "metrics.jsonl").read_text().splitlines()]
    assert all(row["teacher/tokens_per_chunk"] > 1 for row in rows)
    assert all(row["teacher/calls_with_special"] > 0 for row in rows)


def reread(change: Callable[[Reread], Reread]) -> Callable[[FaultyUpdate], None]:
    """Change every reading."""

    def plant(update: FaultyUpdate) -> None:
        update.each(lambda one: replace(one, rereads={call: change(read) for call, read in one.rereads.items()}))

    return plant


def shifted(read: Reread) -> Reread:
    """Each chunk is compared with the teacher's next one."""
    last = int(read.chunks_R[-1])
    return replace(read, chunks_R=np.where(read.chunks_R == last, 0, read.chunks_R + 1).astype(np.int32))


def without_end(read: Reread) -> Reread:
    """The end token is compared with the teacher's last token before its own."""
    if len(read.answer_ids_R) == 1 or read.chunks_R[-1] == read.chunks_R[-2]:
        return read
    chunks_R = read.chunks_R[:-1].copy()
    chunks_R[-1] = read.chunks_R[-1]
    if read.chunks_R[-2] not in chunks_R:
        chunks_R = read.chunks_R[1:]
    return replace(read, answer_ids_R=read.answer_ids_R[-len(chunks_R) :] - 1, chunks_R=chunks_R)


def other_end(read: Reread) -> Reread:
    """The end of a text in place of the end of a turn."""
    ids = read.answer_ids_R.copy()
    ids[ids == 1] = 3
    return replace(read, answer_ids_R=ids)


def without_prompt(read: Reread) -> Reread:
    return replace(read, prompt_ids_P=read.prompt_ids_P[-1:])


def share_of_the_term(update: FaultyUpdate) -> None:
    """Each token of a chunk gets its share of the term, so that the chunk is counted once."""
    prepare = update.trainer._loss._teach

    def teach(parts: Any, *others: Any) -> None:
        prepare(parts, *others)
        for part in parts:
            sizes = torch.from_numpy(np.bincount(part.chunks_E)[part.chunks_E])
            sums = torch.from_numpy(np.bincount(part.chunks_E, part.pack.logprobs_E)[part.chunks_E])
            part.teacher_E = sums + (part.teacher_E - sums) / sizes

    update.trainer._loss._teach = teach


FAULTS: dict[str, Callable[[FaultyUpdate], None]] = {
    "chunks are shifted by one": reread(shifted),
    "the teacher's end token is dropped": reread(without_end),
    "the end of a text stands for that of a turn": reread(other_end),
    "a chunk's term is shared out among its tokens": share_of_the_term,
    "the teacher reads no prompt": reread(without_prompt),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_what_the_teacher_read_is_found(name, places, tmp_path) -> None:
    update = FaultyUpdate(places["run"], tmp_path / "run")
    FAULTS[name](update)
    update.train()
    assert update.found().problems


def test_a_call_that_no_teacher_can_read_is_a_problem_where_it_trained(places) -> None:
    """Its status says that it trained: red when such a call is passed over."""
    reader = PlainReader(places["policy"], places["teacher"], None)
    call = call_of(places["policy"], "yes")
    constraint = Constraint(grammar="start: /a/", origin="x")
    for wrong in (replace(call, constraint=constraint), replace(call, sampling=Sampling(top_p=0.5))):
        with pytest.raises(CheckpointError, match="was trained, and its teacher cannot read it"):
            reader.read(wrong, sequence_of(wrong))


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(folder)


def call_of(folder: Path, text: str, *, ended: bool = True) -> Call:
    own, question = tokenizer_of(folder), {"role": "user", "content": "question 1"}
    ids = own(text, add_special_tokens=False)["input_ids"] + ([own.eos_token_id] if ended else [])
    prompt = own.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    return Call(
        index=0,
        parent=None,
        prompt_ids_P=np.array(own(prompt, add_special_tokens=False)["input_ids"], np.int32),
        sampled_ids_S=np.array(ids, np.int32),
        logprobs_S=np.zeros(len(ids), np.float32),
        versions_S=np.zeros(len(ids), np.int32),
        sampling=Sampling(),
        finish_reason="stop" if ended else "length",
        status=CallStatus.USED,
        messages=(question,),
        tools=(),
        response={},
    )


def sequence_of(call: Call) -> PlainSequence:
    count = len(call.sampled_ids_S)
    ids = np.concatenate([call.prompt_ids_P, call.sampled_ids_S]).astype(np.int64)
    return PlainSequence(
        owner="r",
        ids_T=torch.from_numpy(ids),
        places_S=torch.arange(len(ids) - count, len(ids)),
        recorded_S=torch.zeros(count),
        weights_S=torch.ones(count),
    )


def check_same(reader: Reader, plain: PlainReader, call: Call) -> None:
    """Both read the same ids, and the same chunks."""
    read = reader.read(call)
    if isinstance(read, str):
        with pytest.raises(CheckpointError):
            plain.read(call, sequence_of(call))
        return
    found = plain.read(call, sequence_of(call))
    assert found.read is not None
    assert found.read.ids_T.tolist() == [*read.prompt_ids_P.tolist(), *read.answer_ids_R.tolist()]
    assert found.read.places_S.tolist() == list(range(len(read.prompt_ids_P), len(found.read.ids_T)))
    own, its = np.full(len(read.chunks_S), -1), np.full(len(read.chunks_R), -1)
    for number, (first, second) in enumerate(found.stretches):
        own[first], its[second] = number, number
    assert own.tolist() == read.chunks_S.tolist()
    assert its.tolist() == read.chunks_R.tolist()


TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8", exclude_characters="\r"), st.sampled_from("the answer é本\U0001f600 \n<end>")
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> list[tuple[Path, Reader, PlainReader]]:
    """Byte-level and Llama's, each way round."""
    root = tmp_path_factory.mktemp("readers")
    bytes_ = write_model(root / "bytes", fast(byte_bpe(), eos="<eot>", bos="<bos>", template=TURNS))
    other = write_model(root / "other", fast(byte_bpe(300), eos="<eot>", bos="<bos>", template=TURNS))
    llama = write_model(root / "llama", fast(llama_like(), eos="</s>", bos="<s>", template=TURNS))
    return [
        (one, Reader(Policy(one), two, {}), PlainReader(one, two, None))
        for one, two in ((bytes_, other), (bytes_, llama), (llama, bytes_))
    ]


@settings(max_examples=100)
@given(text=TEXTS, ended=st.booleans(), cut=st.integers(0, 3))
def test_the_certificate_reads_what_the_run_read(text, ended, cut, readers) -> None:
    """Any text, in tokens of three kinds, also cut off within a character."""
    for folder, reader, plain in readers:
        call = call_of(folder, text, ended=ended)
        keep = len(call.sampled_ids_S) - (0 if ended else cut)
        if keep > 0:
            check_same(reader, plain, replace(call, sampled_ids_S=call.sampled_ids_S[:keep]))


@settings(max_examples=100)
@given(data=st.data(), ended=st.booleans())
def test_any_ids_are_read_alike(data, ended, readers) -> None:
    """Special tokens, stray bytes and parts of characters among them."""
    for folder, reader, plain in readers:
        call = call_of(folder, "", ended=ended)
        ids = data.draw(st.lists(st.integers(0, len(tokenizer_of(folder)) - 1), min_size=1, max_size=12))
        check_same(reader, plain, replace(call, sampled_ids_S=np.array([*ids, *call.sampled_ids_S], np.int32)))


def test_every_call_of_a_run_is_read_alike(places) -> None:
    reader = Reader(Policy(places["policy"]), places["teacher"], {})
    plain = PlainReader(places["policy"], places["teacher"], None)
    calls = [call for one in read_groups(places["run"] / "run.db") for r in one.rollouts for call in r.calls]
    assert len(calls) > 20
    for call in calls:
        check_same(reader, plain, call)


def test_terms_of_stretches_by_hand() -> None:
    """Recorded -1, -2 | -0.5; the teacher's -0.25, -0.75 | -2: at a coefficient of 2 each token has 4, 4 and -3."""
    found = Teaching(divergence="reverse_sampled", coef=2.0).advantages(
        torch.tensor([-0.25, -0.75, -2.0]).double(),
        torch.tensor([-1.0, -2.0, -0.5]),
        ((slice(0, 2), slice(0, 2)), (slice(2, 3), slice(2, 3))),
    )
    assert found.tolist() == [4.0, 4.0, -3.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_probed_with_such_a_teacher(dtype, places) -> None:
    """Before the first update, with readings of any ids; red when each token gets its share."""
    given = {"distill.teacher_path": str(places["teacher"]), "trainer.dtype": dtype}

    def shared_out(trainer: Any) -> None:
        class Faulty:
            pass

        faulty = Faulty()
        faulty.trainer = trainer  # type: ignore[attr-defined]
        share_of_the_term(faulty)  # type: ignore[arg-type]

    found, faulty_one = probed_twice(places["policy"], "on_policy_distill", shared_out, **given)
    assert not found.not_probed
    assert not found.problem, found.line
    assert max(gap.share for gap in found.gaps) < 0.5
    assert faulty_one.problem


def test_two_kinds_of_teachers_by_task(places, tmp_path) -> None:
    same = policy_model(tmp_path / "same", seed=9)
    rows = [{"question": f"question {n}", "domain": ("maths", "code")[n % 2]} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    teachers = {"maths": str(same), "code": str(places["teacher"])}
    given = {"distill.teachers": teachers, "distill.teacher_key": "domain", "evaluation.hold_out": False}
    run = make_run(tmp_path / "runs", places["policy"], tmp_path, "on_policy_distill", **given)
    found = retrain(run)
    assert len(found.repeated) == STEP
    assert not found.problems
    assert certify(run).holds
    assert not probed(places["policy"], "on_policy_distill", **given).problem


def test_messages_that_are_gone_are_named(places, tmp_path) -> None:
    given = {"distill.teacher_path": str(places["teacher"]), "journal.keep_steps": 1}
    run = make_run(tmp_path, places["policy"], places["tasks"], "on_policy_distill", steps=3, **SETTINGS, **given)
    found = retrain(run)
    assert not found.problems
    assert found.not_repeated
    assert all("journal.keep_steps" in one for one in found.not_repeated)
