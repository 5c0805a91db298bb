"""From a record to SFT and DPO: which answers are taught, which rollouts are compared, and that both run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from sharpen.cli.main import BAD_INPUT, DONE, main
from sharpen.config.load import resolve
from sharpen.gateway.render import Renderer
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.learning.supervised.data import make_tutor
from sharpen.serve.record.rows import LeftOut, dpo_rows, sft_rows
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Sampling, Task

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(index: int, messages: list[dict], answer: str, **changes) -> Call:
    ids = np.zeros(1, np.int32)
    made = Call(
        index=index,
        parent=None,
        prompt_ids_P=ids,
        sampled_ids_S=ids,
        logprobs_S=np.zeros(1, np.float32),
        versions_S=ids,
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=tuple(messages),
        tools=(),
        response=said(answer),
    )
    return replace(made, **changes)


def group(*calls: Call, reward: float | None = None, task: str = "t", id_: str = "s", **changes) -> Group:
    rollout = Rollout(
        id=f"{id_}/0", group_id=id_, task_id=task, index=0, attempt=0, calls=calls, outcome=Outcome.OK, reward=reward
    )
    return Group(
        id=id_, task=Task(id=task, index=0, row={}), version=0, rollouts=(replace(rollout, **changes),)
    )  # fmt: skip


def taught(row: dict) -> list[str]:
    return [one["content"] for one in row["messages"] if one["role"] == "assistant" and one.get("weight", 1)]


def test_a_conversation_is_one_row_and_a_fork_another_with_each_answer_once():
    start, go_on = [user("a")], [user("a"), said("1"), user("b")]
    made = group(
        call(0, start, "1"),
        call(1, go_on, "2", tools=TOOLS),
        call(2, [user("sub")], "3"),
        call(3, [user("a"), said("1"), user("c")], "4"),
        reward=0.5,
    )
    rows = list(sft_rows([made], None, LeftOut()))
    assert [taught(row) for row in rows] == [["1", "2"], ["3"], ["4"]]
    assert rows[0]["messages"] == [*go_on, said("2")]
    assert (json.loads(rows[0]["tools"]), rows[1]["tools"]) == (list(TOOLS), None)
    assert {(row["rollout"], row["task_id"], row["reward"]) for row in rows} == {("s/0", "t", 0.5)}


def test_answers_that_were_not_sampled_here_are_context():
    example = [user("x"), said("an example"), user("a")]
    (row,) = sft_rows([group(call(0, example, "1"))], None, LeftOut())
    assert taught(row) == ["1"]
    assert row["messages"][1]["weight"] == 0


def test_an_answer_is_taught_as_it_was_sampled_not_as_it_was_sent_back():
    thought = {**said("1"), "reasoning_content": "hm"}
    made = group(call(0, [user("a")], "1", response=thought), call(1, [user("a"), said("1"), user("b")], "2"))
    (row,) = sft_rows([made], None, LeftOut())
    assert row["messages"][1] == thought


def test_what_is_left_out_is_counted():
    left_out = LeftOut()
    prompt = [{"role": "prompt", "content": "once"}]
    low, none = group(call(0, [user("a")], "1"), reward=0.1), group(call(0, [user("a")], "1"))
    odd = group(
        call(0, prompt, "1"), call(1, [user("a")], "2", status=CallStatus.ABANDONED), call(2, [user("a")], "3"),
        reward=0.5,
    )  # fmt: skip
    rows = list(sft_rows([low, none, odd], 0.5, left_out))
    assert [taught(row) for row in rows] == [["3"]]
    assert (left_out.low, left_out.no_messages, left_out.not_used) == (2, 1, 1)
    assert len(list(left_out.lines())) == 3


def test_with_rewards_of_calls_only_the_good_ones_are_taught():
    calls = (call(0, [user("a")], "1"), call(1, [user("a"), said("1"), user("b")], "2"))
    made = group(*calls, reward=1.0, call_rewards={0: 0.0, 1: 1.0})
    assert [taught(row) for row in sft_rows([made], 0.5, LeftOut())] == [["2"]]
    assert [taught(row) for row in sft_rows([made], None, LeftOut())] == [["1", "2"]]
    assert list(sft_rows([group(*calls, reward=1.0, call_rewards={0: 0.0})], 0.5, LeftOut())) == []


def test_the_best_is_compared_with_the_worst_of_its_task():
    def one(id_: str, reward: float | None, answer: str, ask: str = "a", task: str = "t") -> Group:
        return group(call(0, [user(ask)], answer), reward=reward, id_=id_, task=task)

    left_out = LeftOut()
    groups = [
        *(one(str(n), reward, f"answer {n}") for n, reward in enumerate((0.0, 1.0, 0.5, 0.25))),
        *(one("u", None, "x"), one("v", 1.0, "y", task="alone")),
        *(one("w", 1.0, "y", task="other asks"), one("z", 0.0, "y", ask="b", task="other asks")),
    ]
    pairs = list(dpo_rows(groups, left_out))
    found = [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in pairs]
    assert found == [("answer 1", "answer 0"), ("answer 2", "answer 3")]
    assert (pairs[0]["reward"], pairs[0]["rejected_reward"], pairs[0]["rejected_rollout"]) == (1.0, 0.0, "0/0")
    assert (left_out.low, left_out.no_pair) == (1, 2)


@pytest.fixture
def recording(tmp_path: Path, toy_model_dir: Path) -> Path:
    """A recording of the toy model, its ids as the model's template and tokenizer have them."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    renderer, folder = Renderer(tokenizer), tmp_path / "record"
    folder.mkdir()

    def computed(index: int, messages: list[dict], answer: str) -> Call:
        prompt = tokenizer(renderer.render(messages, (), {}), add_special_tokens=False)["input_ids"]
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        made = call(index, messages, answer)
        return replace(made, prompt_ids_P=np.asarray(prompt, np.int32), sampled_ids_S=np.asarray(ids, np.int32))

    with Journal(folder / "run.db") as journal:
        for number in range(4):
            ask, answer = [user(f"question {number // 2}")], "yes" if number % 2 else "no"
            again = [*ask, said(answer), user("question")]
            calls = (computed(0, ask, answer), computed(1, again, answer))
            journal.add(group(*calls, reward=number % 2, id_=f"s{number}", task=f"t{number // 2}"))
    return folder


def test_what_is_taught_are_the_ids_that_were_recorded(recording, tmp_path, toy_model_dir):
    rows = tmp_path / "rows.jsonl"
    assert main(["export", str(recording), "--for", "sft", "--to", str(rows), "--min-reward", "1"]) == DONE
    settings = {"model.model_path": str(toy_model_dir), "model.max_model_len": 200, "train_dataset.path": str(rows)}
    config = resolve(None, {**settings, "algorithm.algorithm_type": "sft"}).config
    tutor = make_tutor(config.model, config.supervised, SUPERVISED["sft"].data, toy_model_dir)
    recorded = [one.rollouts[0].calls for one in read_groups(recording / "run.db")]
    lines = rows.read_text().splitlines()
    assert len(lines) == 2
    for line, calls in zip(lines, recorded[1::2], strict=True):
        lesson = tutor.lesson(Task(id="r", index=0, row=json.loads(line)))
        (sources,) = {id(one): one for one in lesson.sources}.values()
        assert [one.sampled_ids_S.tolist() for one in sources] == [one.sampled_ids_S.tolist() for one in calls]
        assert [one.prompt_ids_P.tolist() for one in sources] == [one.prompt_ids_P.tolist() for one in calls]


@pytest.mark.parametrize(("algorithm", "num_rows"), [("sft", 4), ("dpo", 2)])
def test_a_record_trains(recording, tmp_path, toy_model_dir, algorithm, num_rows, capsys):
    rows, config = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    floor = ["--min-reward", "0"] if algorithm == "sft" else []
    assert main(["export", str(recording), "--for", algorithm, "--to", str(rows), *floor]) == DONE
    assert f"{num_rows} rows" in capsys.readouterr().out
    config.write_text(
        f"checkpoint_root_dir: {tmp_path / 'runs'}\nname: taught\n"
        f"train_dataset: {{path: {rows}, total_steps: 1}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 200}}\n"
        f"algorithm: {{algorithm_type: {algorithm}, batch_size: 2}}\nevaluation: {{hold_out: false}}\n"
    )
    assert main(["run", "--config", str(config)]) == DONE
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["steps"] == 1


def test_failures_are_not_taught_beside_successes_without_a_word(recording, tmp_path, capsys):
    """Red while `--for sft` wrote them all: of a run, 1,493 of 2,560 rows had reward 0."""
    words = ["export", str(recording), "--for", "sft", "--to", str(tmp_path / "rows.jsonl")]
    assert main(words) == BAD_INPUT
    said = capsys.readouterr().err
    assert "differ in reward (4 of 0, 4 of 1)" in said
    assert not (tmp_path / "rows.jsonl").exists()
    floors = re.findall(r"--min-reward=\S+", said)
    for floor, num_rows, counts in zip(floors, (2, 4), ("4 of 1", "4 of 0, 4 of 1"), strict=True):
        (tmp_path / "rows.jsonl").unlink(missing_ok=True)
        assert main([*words, floor]) == DONE
        out = capsys.readouterr().out
        assert f"{num_rows} rows for sft" in out
        assert f"answers by reward: {counts}\n" in out
    (tmp_path / "rows.jsonl").unlink()
    assert main([*words, "--min-reward", "0", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["rewards"] == {"min": 0.0, "max": 1.0, "without": 0}


@pytest.mark.parametrize(
    ("rewards", "own", "code", "counts"),
    [
        ((0.5, 0.5), {}, DONE, "2 of 0.5"),
        ((None, None), {}, DONE, "2 without one"),
        ((1.0, None), {}, DONE, "1 of 1, 1 without one"),
        ((-1e-7, 2 / 3), {}, BAD_INPUT, "1 of -1e-07, 1 of 0.666667"),
        ((1.0, 1.0), {0: 0.25}, BAD_INPUT, "1 of 0.25, 1 of 1"),
        (tuple(n / 8 for n in range(8)), {}, BAD_INPUT, "8 from 0 to 0.875"),
    ],
)
def test_rewards_are_counted_before_they_are_taught(tmp_path, capsys, rewards, own, code, counts):
    """A call's own reward counts where it has one."""
    with Journal(tmp_path / "run.db") as journal:
        for number, reward in enumerate(rewards):
            made = call(0, [user(f"question {number}")], "answer")
            journal.add(group(made, reward=reward, id_=str(number), call_rewards={} if number else own))
    assert main(["export", str(tmp_path), "--for", "sft", "--to", str(tmp_path / "rows.jsonl")]) == code
    written = capsys.readouterr()
    assert counts in (written.out if code == DONE else written.err)
    if code == BAD_INPUT:  # what it says to do is to the last digit
        best = re.findall(r"--min-reward=\S+", written.err)[0]
        assert main(["export", str(tmp_path), "--for", "sft", "--to", str(tmp_path / "rows.jsonl"), best]) == DONE


def test_an_export_overwrites_nothing_and_is_never_empty(recording, tmp_path, capsys):
    there = tmp_path / "rows.jsonl"
    there.write_text("mine")
    for options, named in (
        (["--for", "sft", "--to", str(there), "--min-reward", "1"], str(there)),
        (["--for", "sft", "--to", str(tmp_path / "x"), "--min-reward", "2"], "4 rollouts"),
        (["--for", "dpo", "--to", str(tmp_path / "x"), "--min-reward", "1"], "--min-reward"),
    ):
        assert main(["export", str(recording), *options]) == BAD_INPUT
        assert named in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert not (tmp_path / "x").exists()
