"""Files of other programs, in the words that they have there: what is read of them, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpen.cli.main import BAD_INPUT, DONE, main
from sharpen.learning.experience.reading import read_groups
from sharpen.serve.record.rows import LeftOut, dpo_rows, sft_rows
from sharpen.types import Rollout

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
ROUND = [USER, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}


def written(path: Path, *values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def imported(tmp_path: Path, *paths: Path, code: int = DONE, **options: str) -> list[Rollout]:
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["record", "import", *map(str, paths), "--dir", str(tmp_path / "back"), *flags]) == code
    if code != DONE:
        assert not (tmp_path / "back").exists()
        return []
    return [one for group in read_groups(tmp_path / "back" / "run.db") for one in group.rollouts]


def heard(rollout: Rollout) -> list[list[Any]]:
    """What each call of a rollout was asked and what it answered."""
    return [[*map(dict, call.messages), dict(call.response)] for call in rollout.calls]


def generation(trace: str, start: str, given: Any, output: Any, **more: Any) -> dict[str, Any]:
    about = {"id": f"{trace}-{start}", "traceId": trace, "type": "GENERATION", "name": "llm", "startTime": start}
    return {**about, "endTime": start, "input": given, "output": output, "providedModelName": "m", **more}


START, LATER = "2025-12-17T16:09:00.875Z", "2025-12-17T16:10:00.875Z"
SPAN = {"id": "x", "traceId": "t", "type": "SPAN", "name": "step", "startTime": START, "input": "x", "output": "y"}


@pytest.mark.parametrize("shape", ["api", "page", "trace", "bucket"])
def test_generations_of_langfuse(tmp_path, shape):
    first = generation("t", START, json.dumps({"messages": [USER], "tools": [TOOL]}), json.dumps(ROUND[1]))
    second = generation("t", LATER, [*ROUND, RESULT], ANSWER, modelParameters={"temperature": 0.5})
    score = {"id": "s", "traceId": "t", "name": "right", "value": 1, "dataType": "NUMERIC"}
    path = tmp_path / "export.json"
    if shape == "api":
        written(tmp_path / "export.jsonl", second, SPAN, first, score).rename(path)
    elif shape == "page":
        written(path, {"data": [second, SPAN, first, score], "meta": {}})
    elif shape == "trace":
        written(path, {"id": "t", "name": "n", "observations": [second, SPAN, first], "scores": [score]})
    else:
        words = {"traceId": "trace_id", "startTime": "start_time", "endTime": "end_time"}
        words |= {"providedModelName": "provided_model_name", "modelParameters": "model_parameters"}
        rows = [{words.get(name, name): value for name, value in one.items()} for one in (second, first, score)]
        rows[0]["model_parameters"] = json.dumps(rows[0]["model_parameters"])
        path = written(tmp_path / "export.jsonl", *rows)
    (rollout,) = imported(tmp_path, path)
    assert heard(rollout) == [[USER, ROUND[1]], [*ROUND, RESULT, ANSWER]]
    assert rollout.reward == 1.0
    assert rollout.calls[0].tools == (TOOL,)
    assert [call.sampling.temperature for call in rollout.calls] == [1.0, 0.5]
    assert [call.model for call in rollout.calls] == ["m", "m"]
    assert rollout.calls[0].started == 1765987740.875


def lc(kind: str, **fields: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": fields}


def run(id_: str, inputs: Any, outputs: Any, **more: Any) -> dict[str, Any]:
    about = {"id": id_, "trace_id": "t", "name": "ChatOpenAI", "run_type": "llm", "start_time": "2025-01-01T00:00:00"}
    return {**about, "inputs": inputs, "outputs": outputs, **more}


ARGS = {"name": "add", "args": {"a": 2, "b": 2}, "id": "c1", "type": "tool_call"}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"messages": [USER], "model": "m"}, {"choices": [{"message": ROUND[1], "finish_reason": "tool_calls"}]}),
        (
            {"messages": [[lc("HumanMessage", content="2 + 2?", type="human")]]},
            {"generations": [[{"text": "", "message": lc("AIMessageChunk", content="", tool_calls=[ARGS])}]]},
        ),
        (
            {"messages": [{"type": "human", "content": "2 + 2?"}]},
            {"messages": [{"type": "ai", "content": "", "tool_calls": [ARGS]}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": ARGS["args"]}]},
        ),
    ],
)
def test_runs_of_langsmith_in_all_words(tmp_path, inputs, outputs):
    chain = {**run("root", {"x": 1}, {"y": 2}), "run_type": "chain", "feedback_stats": {"good": {"n": 1, "avg": 0.25}}}
    extra = {"invocation_params": {"tools": [TOOL], "temperature": 0.5}}
    path = written(tmp_path / "t.jsonl", chain, run("a", inputs, outputs, extra=extra))
    (rollout,) = imported(tmp_path, path)
    assert heard(rollout) == [ROUND]
    assert (rollout.reward, rollout.calls[0].tools) == (0.25, (TOOL,))
    assert rollout.calls[0].sampling.temperature == 0.5


def test_runs_of_langsmith_as_its_bulk_export_has_them(tmp_path):
    import pyarrow
    import pyarrow.parquet

    row = run("a", json.dumps({"messages": [USER]}), json.dumps({"choices": [{"message": ANSWER}]}))
    row |= {"feedback_stats": json.dumps({"good": {"n": 2, "avg": 1.0}}), "error": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "runs.parquet")
    (rollout,) = imported(tmp_path, tmp_path / "runs.parquet")
    assert heard(rollout) == [[USER, ANSWER]]
    assert rollout.reward == 1.0


def test_anthropics_results_of_tools_are_messages_of_their_own(tmp_path):
    blocks = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]}]
    used = [{"type": "text", "text": "I add."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}}]
    given = {
        "system": "Be brief.",
        "messages": [USER, {"role": "assistant", "content": used}, {"role": "user", "content": blocks}],
        "tools": [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}}],
    }
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]
    path = written(tmp_path / "x.json", generation("t", START, given, {"role": "assistant", "content": thought}))
    (rollout,) = imported(tmp_path, path)
    (messages,) = heard(rollout)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "4"}
    assert messages[4] == {"role": "assistant", "reasoning_content": "hm", "content": "4"}
    assert rollout.calls[0].tools[0]["function"]["parameters"] == {"type": "object"}


def test_traces_that_begin_alike_are_rollouts_of_one_task(tmp_path):
    rows = []
    for trace, answer, value in (("a", "4", 1), ("b", "5", 0), ("c", "?", 0.5)):
        given = [USER] if trace != "c" else [{"role": "user", "content": "another"}]
        rows += [generation(trace, START, given, answer), {"traceId": trace, "name": "right", "value": value}]
    imported(tmp_path, written(tmp_path / "x.jsonl", *rows))
    left_out = LeftOut()
    (pair,) = dpo_rows(read_groups(tmp_path / "back" / "run.db"), left_out)
    assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["4", "5"]
    assert left_out.no_pair == 1


def test_a_score_of_several_must_be_named(tmp_path, capsys):
    scores = [{"traceId": "t", "name": name, "value": value} for name, value in (("right", 1), ("short", 0))]
    path = written(tmp_path / "x.jsonl", generation("t", START, [USER], "4"), *scores)
    imported(tmp_path, path, code=BAD_INPUT)
    assert "several scores (right, short): --score NAME" in capsys.readouterr().err
    imported(tmp_path, path, code=BAD_INPUT, score="wrong")
    assert "there are: right, short" in capsys.readouterr().err
    (rollout,) = imported(tmp_path, path, score="short")
    assert rollout.reward == 0.0


def trajectory(**changes: Any) -> dict[str, Any]:
    steps = [
        {"step_id": 1, "source": "user", "message": "2 + 2?"},
        {"step_id": 2, "source": "agent", "message": "4", "metrics": {}},
    ]
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "a", "version": "1"}, "steps": steps, **changes}


def test_harbors_folders_have_the_rewards_and_the_task_beside_the_trajectory(tmp_path):
    for trial, reward in (("one", 1.0), ("two", 0.0)):
        written(tmp_path / "job" / trial / "agent" / "trajectory.json", trajectory())
        result = {"task_name": "sums", "verifier_result": {"rewards": {"reward": reward}}}
        written(tmp_path / "job" / trial / "result.json", result)
    rollouts = imported(tmp_path, tmp_path / "job")
    assert [(one.reward, one.task_id) for one in rollouts] == [(1.0, "sums"), (0.0, "sums")]


def test_what_a_trajectory_of_harbor_may_have(tmp_path):
    """A step of a program, an observation without a call, copied context, a sub-agent's trajectory, an image."""
    image = {"type": "image", "source": {"media_type": "image/png", "path": "https://x/y.png"}}
    steps = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "look"}, image]},
        {"step_id": 2, "source": "agent", "message": "old", "is_copied_context": True},
        {"step_id": 3, "source": "agent", "message": "ls", "observation": {"results": [{"content": "a.txt"}]}},
        {"step_id": 4, "source": "agent", "message": "by the program", "llm_call_count": 0},
        {"step_id": 5, "source": "agent", "message": "done", "reasoning_content": "hm", "model_name": "m"},
    ]
    inner = trajectory(trajectory_id="inner")
    (rollout,) = imported(
        tmp_path, written(tmp_path / "x.json", trajectory(steps=steps, subagent_trajectories=[inner]))
    )
    assert [call.response["content"] for call in rollout.calls] == ["ls", "done", "4"]
    second = rollout.calls[1]
    roles = [(message["role"], message["content"]) for message in second.messages[1:]]
    assert roles == [("assistant", "old"), ("assistant", "ls"), ("user", "a.txt"), ("assistant", "by the program")]
    assert second.messages[0]["content"][1] == {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    assert (second.response["reasoning_content"], second.model) == ("hm", "m")
    rows = list(sft_rows(read_groups(tmp_path / "back" / "run.db"), None, LeftOut()))
    weights = [[one.get("weight", 1) for one in row["messages"] if one["role"] == "assistant"] for row in rows]
    assert weights == [[0, 1, 0, 1], [1]]


def test_images_are_files_in_a_folder_and_audio_ends_what_is_read(tmp_path, capsys):
    png = bytes.fromhex("89504e470d0a1a0a0000000d")
    part = {"type": "image", "source": {"media_type": "image/png", "path": "y.png"}}
    sound = {"type": "audio", "source": {"media_type": "audio/wav", "path": "z.wav"}}
    steps = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "look"}, part]},
        {"step_id": 2, "source": "agent", "message": "seen"},
        {"step_id": 3, "source": "user", "message": [sound]},
        {"step_id": 4, "source": "agent", "message": "heard"},
    ]
    path = written(tmp_path / "there" / "x.json", trajectory(steps=steps))
    imported(tmp_path, path, code=BAD_INPUT)
    assert "its image y.png cannot be read" in capsys.readouterr().err
    (tmp_path / "there" / "y.png").write_bytes(png)
    (rollout,) = imported(tmp_path, path)
    assert [call.response["content"] for call in rollout.calls] == ["seen"]
    assert rollout.calls[0].pictures[0].picture.data == png
    assert "trajectories from their first audio on" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "back"), "--for", "atif", "--to", str(tmp_path / "docs")]) == DONE
    (document,) = (tmp_path / "docs").glob("*.json")
    there = json.loads(document.read_text())["steps"][0]["message"][1]["source"]["path"]
    assert (tmp_path / "docs" / there).read_bytes() == png


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def span(attributes: dict[str, Any], events: list[Any] = [], number: int = 1) -> dict[str, Any]:  # noqa: B006
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    about = {"traceId": "t" * 32, "spanId": f"{number:016}", "name": "chat m", "startTimeUnixNano": str(number)}
    return {**about, "endTimeUnixNano": str(number + 1), "attributes": listed, "events": events}


PARTS = [{"role": "user", "parts": [{"type": "text", "content": "2 + 2?"}]}]
OUTPUT = [{"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}]
SAID = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(PARTS)}
SAID |= {"gen_ai.output.messages": json.dumps(OUTPUT)}


def test_spans_that_note_what_is_said_in_an_event_and_spans_that_do_not(tmp_path, capsys):
    def of(value: Any) -> Any:
        if isinstance(value, list):
            return {"arrayValue": {"values": [of(one) for one in value]}}
        if isinstance(value, dict):
            return {"kvlistValue": {"values": [{"key": key, "value": of(one)} for key, one in value.items()]}}
        return {"stringValue": value}

    begin = [{"type": "text", "content": "Be brief."}]
    said = {"gen_ai.input.messages": PARTS, "gen_ai.output.messages": OUTPUT, "gen_ai.system_instructions": begin}
    listed = [{"key": key, "value": of(value)} for key, value in said.items()]
    event = {"name": "gen_ai.client.inference.operation.details", "attributes": listed}
    named = {"gen_ai.operation.name": "chat"}
    silent = span(named, number=2)
    other = span({"gen_ai.operation.name": "execute_tool"}, number=3)
    (rollout,) = imported(tmp_path, written(tmp_path / "x.json", otlp(span(named, [event]), silent, other)))
    assert heard(rollout) == [[{"role": "system", "content": "Be brief."}, USER, ANSWER]]
    assert "left out: 1 spans of calls without gen_ai.input.messages" in capsys.readouterr().out


def test_of_several_choices_the_one_counts_that_is_gone_on_from(tmp_path):
    choices = json.dumps([*OUTPUT, {"role": "assistant", "parts": [{"type": "text", "content": "5"}]}])
    history = [*PARTS, {"role": "assistant", "parts": [{"type": "text", "content": "5"}]}, *PARTS]
    first = span({**SAID, "gen_ai.output.messages": choices})
    second = span({**SAID, "gen_ai.input.messages": json.dumps(history)}, number=2)
    imported(tmp_path, written(tmp_path / "x.json", otlp(second, first)))
    (row,) = sft_rows(read_groups(tmp_path / "back" / "run.db"), None, LeftOut())
    assert [one["content"] for one in row["messages"]] == ["2 + 2?", "5", "2 + 2?", "4"]


BAD = {
    "no file": (None, "No such file"),
    "empty": ("", "it is empty"),
    "no JSON": ('{"a": 1}\n{"a', "line 2 is no JSON"),
    "no object": ("[1]", "record 1 is no object: 1"),
    "unknown": ('{"a": 1, "b": 2}', "no format that is known (Harbor's ATIF, OTLP JSON, exports of Langfuse"),
    "another version": (trajectory(schema_version="ATIF-v2.0"), "version 'ATIF-v2.0'; versions ATIF-v1 are read"),
    "no steps": (trajectory(steps=[]), "no list of steps"),
    "no source": (trajectory(steps=[{"step_id": 1, "source": "robot"}]), "step 1 has the source 'robot'"),
    "no name": (
        trajectory(steps=[{"step_id": 1, "source": "agent", "message": "", "tool_calls": [{"tool_call_id": "x"}]}]),
        "step 1 has a tool call without a function_name",
    ),
    "no ids": (
        trajectory(
            steps=[
                {
                    "step_id": 7,
                    "source": "agent",
                    "message": "a",
                    "metrics": {"prompt_token_ids": ["x"], "completion_token_ids": [1]},
                }
            ]
        ),
        "the metrics of step 7",
    ),
    "no spans": ({"resourceSpans": 5}, "its resourceSpans is no list"),
    "no trace": (otlp({"name": "x"}), "a span cannot be read (KeyError: 'traceId')"),
    "no parts": (otlp(span({**SAID, "gen_ai.input.messages": '[{"role": "user"}]'})), "a message has no parts"),
    "no messages": (generation("t", START, {"prompt": 1}, "4"), "observation t-2025-12-17T16:09:00.875Z: what it was"),
    "no answer": (run("r1", {"messages": [USER]}, {"x": 1}), "run r1: what it answered has no message"),
    "no part": (
        run("r1", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, {"role": "assistant"}),
        "run r1: a part of a message is neither text nor an image",
    ),
    "observations by name": ({"id": "t", "name": "n", "observations": ["a"]}, "the trace t names its observations"),
    "no calls": (SPAN, "no call of a model that can be learnt from"),
}


ALONE = {"no parts", "no messages", "no answer", "no part", "no calls"}
"""Calls that are counted where there are others."""


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_sentence_and_nothing_is_imported(tmp_path, capsys, case):
    """Beside a good one, of which nothing is imported either."""
    content, sentence = BAD[case]
    path, good = tmp_path / "bad.jsonl", written(tmp_path / "good.json", trajectory())
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    imported(tmp_path, *([path] if case in ALONE else [good, path]), code=BAD_INPUT)
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert case in ALONE or str(path) in error


def test_a_folder_of_a_run_and_options_of_a_recorder_are_refused(tmp_path, capsys):
    path = written(tmp_path / "good.json", trajectory())
    assert main(["record", "--port", "5", "import", str(path)]) == BAD_INPUT
    assert "--port is for recording a server" in capsys.readouterr().err
    assert main(["record"]) == BAD_INPUT
    assert "--upstream URL" in capsys.readouterr().err
    assert main(["record", "import", str(tmp_path / "good.json"), "--dir", str(tmp_path / "back"), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found == {"sessions": 1, "calls": 1, "reward": None, "dir": str(tmp_path / "back"), "left_out": []}


def test_a_call_in_words_that_are_not_known_is_counted_beside_others(tmp_path, capsys):
    odd = [generation("t", start, {"prompt": 1}, "4") for start in (LATER, "2025-12-17T16:11:00Z")]
    (rollout,) = imported(tmp_path, written(tmp_path / "x.jsonl", generation("t", START, [USER], "4"), *odd))
    assert heard(rollout) == [[USER, ANSWER]]
    what = "left out: 2 calls whose messages are in words that are not known (the first: observation t-2025-12-17T16:10"
    assert what in capsys.readouterr().out
