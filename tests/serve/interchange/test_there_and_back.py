"""A run in another program's format and back is a recording that teaches the same, with the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpen.cli.main import BAD_INPUT, DONE, main
from sharpen.learning.experience.reading import read_groups
from sharpen.serve.interchange import atif
from sharpen.serve.record.rows import LeftOut, Talk, sft_rows


def exported(run: Path, purpose: str, to: Path) -> Path:
    assert main(["export", str(run), "--for", purpose, "--to", str(to)]) == DONE
    return to


def taught(run: Path) -> list[Any]:
    """What the rows of a recording teach, without the names that its rollouts have there."""
    rows = list(sft_rows(read_groups(run / "run.db"), None, LeftOut()))
    return sorted(json.dumps([row["messages"], row["tools"], row["reward"]], sort_keys=True) for row in rows)


def sampled(run: Path) -> list[Any]:
    calls = [call for group in read_groups(run / "run.db") for one in group.rollouts for call in one.calls]
    arrays = ((call.prompt_ids_P, call.sampled_ids_S, call.logprobs_S) for call in calls)
    return sorted([one.tolist() for one in three] for three in arrays)


@pytest.mark.parametrize(("purpose", "name"), [("atif", "docs"), ("atif", "docs.jsonl"), ("otel", "spans.jsonl")])
def test_what_comes_back_teaches_the_same_with_the_same_ids(run, tmp_path, purpose, name, capsys):
    there, back = exported(run, purpose, tmp_path / name), tmp_path / "back"
    assert main(["record", "import", str(there), "--dir", str(back)]) == DONE
    assert "6 sessions with 12 calls" in capsys.readouterr().out
    assert taught(back) == taught(run)
    assert sampled(back) == sampled(run)
    (first, *_), (again, *_) = (
        [call for group in read_groups(one / "run.db") for call in group.rollouts[0].calls] for one in (run, back)
    )
    assert (first.sampling.temperature, first.sampling.max_tokens) == (
        again.sampling.temperature,
        again.sampling.max_tokens,
    )


def test_the_tasks_come_back_so_that_pairs_can_be_made(run, tmp_path):
    back = tmp_path / "back"
    assert main(["record", "import", str(exported(run, "atif", tmp_path / "a.jsonl")), "--dir", str(back)]) == DONE
    tasks = [{group.task.id for group in read_groups(one / "run.db")} for one in (run, back)]
    assert tasks[0] == tasks[1] == {"train/0", "train/1"}


def test_what_is_there_already_is_left_out_and_further_sessions_are_added(run, tmp_path, capsys):
    there, back = exported(run, "atif", tmp_path / "docs"), tmp_path / "back"
    first = sorted(there.iterdir())[:2]
    assert main(["record", "import", *map(str, first), "--dir", str(back)]) == DONE
    assert main(["record", "--dir", str(back), "import", str(there)]) == DONE
    assert "left out: 2 sessions that the recording has already" in capsys.readouterr().out
    assert taught(back) == taught(run)
    assert main(["show", str(back)]) == DONE
    assert "6 sessions (0 open, 6 with a reward" in capsys.readouterr().out


def test_a_document_of_harbor_says_what_was_sampled_and_what_is_context(run, tmp_path):
    docs = [json.loads(one.read_text()) for one in sorted(exported(run, "atif", tmp_path / "docs").iterdir())]
    by_name = {doc["trajectory_id"]: doc for doc in docs}
    tool = by_name["step_2/train/0/0/0"]
    system, user, call, answer = tool["steps"]
    assert (tool["session_id"], tool["extra"]["reward"]) == ("step_2/train/0/0", 1.0)
    assert [(one["source"], one["message"]) for one in (system, user)] == [("system", "Be brief."), ("user", "2 + 2?")]
    (made,) = call["tool_calls"]
    assert (made["function_name"], made["arguments"]) == ("add", {"a": 2, "b": 2})
    assert made["extra"] == {"arguments": '{"a":  2, "b": 2}'}  # as it was sampled
    assert call["observation"]["results"] == [{"source_call_id": made["tool_call_id"], "content": "4"}]
    assert answer["message"] == "It is 4."
    recorded = next(one for one in read_groups(run / "run.db") if one.id == "step_2/train/0").rollouts[0].calls
    for step, one in zip((call, answer), recorded, strict=True):
        assert step["metrics"]["prompt_token_ids"] == one.prompt_ids_P.tolist()
        assert step["metrics"]["completion_token_ids"] == one.sampled_ids_S.tolist()
        assert step["metrics"]["logprobs"] == one.logprobs_S.tolist()
    first, second = by_name["step_3/train/0/0/0"], by_name["step_3/train/0/0/1"]
    assert [one.get("is_copied_context") for one in first["steps"]] == [None, True, None, None, None, None]
    assert [one.get("is_copied_context") for one in second["steps"]] == [None, True, None, True, None, None]
    assert first["final_metrics"]["total_completion_tokens"] > second["final_metrics"]["total_completion_tokens"]


def test_a_turn_of_openenv_has_its_mask_over_prompt_and_answer(run, tmp_path):
    lines = exported(run, "openenv", tmp_path / "turns.jsonl").read_text().splitlines()
    traces = [json.loads(line) for line in lines]
    assert [len(trace["turns"]) for trace in traces] == [1, 1, 2, 2, 3, 3]
    recorded = [one for group in read_groups(run / "run.db") for one in group.rollouts]
    for trace, rollout in zip(traces, recorded, strict=True):
        assert set(trace) == {"schema_version", "turns"}
        for turn, call in zip(trace["turns"], rollout.calls, strict=True):
            assert turn["prompt_token_ids"] == call.prompt_ids_P.tolist()
            assert turn["completion_token_ids"] == call.sampled_ids_S.tolist()
            assert turn["loss_mask"] == [0] * len(call.prompt_ids_P) + [1] * len(call.sampled_ids_S)
            assert turn["metadata"]["reward"] == rollout.reward


def test_nothing_is_overwritten_and_what_cannot_be_written_is_said(run, tmp_path, capsys):
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    for purpose in ("atif", "openenv", "otel"):
        assert main(["export", str(run), "--for", purpose, "--to", str(there)]) == BAD_INPUT
        assert str(there) in capsys.readouterr().err
    assert there.read_text() == "mine"
    recording = tmp_path / "text"
    texts = tmp_path / "texts.json"
    steps = [{"step_id": 1, "source": "user", "message": "a"}, {"step_id": 2, "source": "agent", "message": "b"}]
    agent = {"name": "x", "version": "1"}
    texts.write_text(json.dumps({"schema_version": "ATIF-v1.2", "session_id": "s", "agent": agent, "steps": steps}))
    assert main(["record", "import", str(texts), "--dir", str(recording)]) == DONE
    capsys.readouterr()
    assert main(["export", str(recording), "--for", "openenv", "--to", str(tmp_path / "none.jsonl")]) == BAD_INPUT
    assert "left out: 1 calls without token ids" in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(("role", "extra"), [("developer", {"role": "developer"}), ("user", None), ("system", None)])
def test_a_role_that_atif_does_not_know_comes_back(role: str, extra: dict[str, Any] | None) -> None:
    """Red when it is not kept: a developer's message is a user's then; or when roles that are known are kept too."""
    message = {"role": role, "content": "Be brief."}
    step = atif._step(message, Talk(messages=[message], tools=()), 0)
    assert step.get("extra") == extra
    assert atif._message(step, Path()) == message
