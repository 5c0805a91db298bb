"""A teacher behind an endpoint, from `tune()` to the certificate: served here, or scripted in vLLM's words."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import http_here
import numpy as np
import pytest
import torch

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.distill import DistillConfig
from sharpen.errors import ConfigError, RolloutError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.experience.merge import merge
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.teacher import Teacher
from sharpen.models.configuration import load_tokenizer
from sharpen.placement.teacher_endpoint import TeacherEndpoint
from sharpen.run.decide import decide_serving
from sharpen.serve.front import Front, OneKey
from sharpen.serve.model import find_model, serving_config
from sharpen.serve.openapi import document
from sharpen.serve.server import listening, loaded
from sharpen.types import Outcome


def quiet(line: str) -> None:
    """Say nothing."""


@contextlib.contextmanager
def served(folder: Path, key: str) -> Iterator[str]:
    """Serve a model as `sharpen serve` does, and yield its URL."""
    config = serving_config(find_model(str(folder)), {"model.max_model_len": 128}).config
    with loaded(decide_serving(config), "big", quiet) as model:
        front = Front(model.gateway, OneKey(model.gateway, key), key, document("0"))
        with listening(front, model, config, quiet) as server:
            yield server.url()


@contextlib.contextmanager
def scripted(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """Serve /v1/completions with these answers to the decoded bodies, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.dumps(answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Write no line."""

    with http_here.answering(Handler) as url:
        yield f"{url}/v1"


def as_vllm(tokenizer: Any, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's answer: -1 and -id / 1024 as logprob of each id, and a likelier alternative beside it."""
    entries: list[Any] = [None]
    for id_ in body["prompt"][1:]:
        own = {"logprob": -1 - id_ / 1024, "rank": 2, "decoded_token": tokenizer.decode([id_])}
        entries.append({str(id_ + 1): {"logprob": -0.5, "rank": 1, "decoded_token": "?"}, str(id_): own})
    choice = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None, "prompt_logprobs": entries}
    return {"id": "c", "object": "text_completion", "created": 0, "model": "big", "choices": [choice]}


async def two_calls(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or "-"}]
        messages += [{"role": "user", "content": "more"}]
    return WorkflowOutput()


async def cool(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4, temperature=0.5)
    return WorkflowOutput()


def run(folder, model, dataset, url, *, workflow=two_calls, algorithm="on_policy_distill", steps=2, **settings):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=1, batch_size=8, learning_rate=5e-3, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.hold_out": False,
            "rollout.max_attempts": 1,
            "check.enabled": False,
            "distill.teacher_url": url,
            "distill.teacher_model": "big",
            **settings,
        },
    )


def metrics(result):
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_served_teacher_says_what_one_in_this_process_says(
    tmp_path, toy_model_dir, toy_dataset, write_toy_model, monkeypatch
):
    """Every trained token has the teacher's score on record, that of the same weights loaded here. The certificate
    and the updates made once more hold.

    Break: shift `_of_echo` by one; leave `taught_S` out of `_sequence` or of `begin._taught`.
    """
    teacher_dir = write_toy_model(tmp_path / "teacher", seed=7)
    monkeypatch.setenv("TEACHER_KEY", "a-key-of-the-test")
    with served(teacher_dir, "a-key-of-the-test") as url:
        result = run(
            tmp_path, toy_model_dir, toy_dataset, url, **{"distill.teacher_api_key_env": "TEACHER_KEY", "seed": 3}
        )
    teacher = Teacher.load(teacher_dir, dtype="float32", device=torch.device("cpu"))
    rollouts = [one for group in read_groups(result.run_dir / "run.db") for one in group.rollouts]
    asked = sum(len(one.ids_T) for rollout in rollouts for one in merge(rollout))
    for rollout in rollouts:
        for one in pack(merge(rollout), 4096):
            assert one.taught_E is not None
            np.testing.assert_allclose(one.taught_E, teacher.logprobs(one).numpy(), atol=1e-4)
    assert {call.rollout_id for call in read_trained(result.run_dir / "run.db")} == {one.id for one in rollouts}
    rows = metrics(result)
    assert sum(row["teacher/tokens"] for row in rows) == asked
    assert all(row["teacher/failed"] == 0 and row["time/teacher_s"] > 0 for row in rows)
    assert all(row["trainer/distill_divergence"] != 0 and row["trainer/grad_norm"] > 0 for row in rows)
    assert certify(result.run_dir).holds, certify(result.run_dir).problems
    repeated = retrain(result.run_dir)
    assert repeated.repeated, repeated.not_repeated
    assert not repeated.problems
    assert "a-key-of-the-test" not in (result.run_dir / "resolved.json").read_text()


def test_a_rollout_without_a_score_does_not_train(tmp_path, toy_model_dir, toy_dataset):
    """It is a failure of the teacher, counted and named; the others train, each with its own scores in whatever order
    they come. The certificate notices a score that is another than the one that trained.

    Break: take 0 for what is missing, in `_of_vllm`; shift it by one; give `teach` the answers as they come; leave
    `taught_S` out of `recorded_digest` and `records_digest`.
    """
    tokenizer, asked, numbers = load_tokenizer(toy_model_dir), [], itertools.count(1)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        asked.append(body)
        time.sleep(0.05 * (-number % 4))  # the first of four is answered last
        found = as_vllm(tokenizer, body)
        if number % 4 == 2:
            found["choices"][0]["prompt_logprobs"][-1] = None
        return found

    with scripted(answer) as url:
        result = run(tmp_path, toy_model_dir, toy_dataset, url, **{"rollout.max_excluded_share": 0.9})
    rollouts = [one for group in read_groups(result.run_dir / "run.db") for one in group.rollouts]
    failed = [one for one in rollouts if one.outcome == Outcome.INFRASTRUCTURE]
    assert 0 < len(failed) < len(rollouts)
    assert all("the teacher 'big' at http" in (one.error or "") for one in failed)
    assert sum(row["teacher/failed"] for row in metrics(result)) == len(failed)
    trained = {call.rollout_id for call in read_trained(result.run_dir / "run.db")}
    assert trained == {one.id for one in rollouts} - {one.id for one in failed}
    for call in (call for one in rollouts if one not in failed for call in one.calls):
        np.testing.assert_array_equal(call.taught_S, -1 - call.sampled_ids_S.astype(np.float32) / 1024)
    assert all(body["prompt_logprobs"] == 0 for body in asked)
    assert certify(result.run_dir).holds, certify(result.run_dir).problems
    with contextlib.closing(sqlite3.connect(result.run_dir / "run.db")) as records, records:
        records.execute("UPDATE call_taught SET logprobs = zeroblob(length(logprobs)) WHERE rowid = 1")
    assert not certify(result.run_dir).holds


def test_calls_that_an_endpoint_cannot_score_are_named(tmp_path, toy_model_dir, toy_dataset):
    tokenizer = load_tokenizer(toy_model_dir)
    with (
        scripted(lambda body: as_vllm(tokenizer, body)) as url,
        pytest.raises(RolloutError, match=r"temperature 0\.5.*temperature 1"),
    ):
        run(tmp_path, toy_model_dir, toy_dataset, url, workflow=cool)


def test_other_tokens_and_endpoints_without_scores_are_refused_at_the_start(toy_model_dir):
    """Break: leave out `_compare`."""
    tokenizer = load_tokenizer(toy_model_dir)

    def shifted(body: dict[str, Any]) -> dict[str, Any]:
        found = as_vllm(tokenizer, body)
        for id_, at in zip(body["prompt"][1:], found["choices"][0]["prompt_logprobs"][1:], strict=True):
            at[str(id_)]["decoded_token"] = f"not {id_}"
        return found

    def silent(body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}]}

    for answer, message in ((shifted, "has other tokens than the model: id"), (silent, "gives no logprobs")):
        with scripted(answer) as url, pytest.raises(ConfigError, match=message):
            TeacherEndpoint.open(DistillConfig(teacher_url=url, teacher_model="big"), toy_model_dir, 128)


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("jsd", {}, "whole distributions"),
        ("on_policy_distill", {"distill.divergence": "forward"}, "whole distribution"),
        ("on_policy_distill", {"distill.teacher_path": "somewhere"}, "teacher_path is set"),
        ("on_policy_distill", {"distill.teacher_model": None}, "go together"),
        ("on_policy_distill", {"distill.teacher_api_key_env": "NO_SUCH_VARIABLE"}, "which is not set"),
        ("on_policy_distill", {"distill.teacher_url": "ftp://host"}, "must be an address"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused(tmp_path, toy_model_dir, toy_dataset, algorithm, settings, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, toy_model_dir, toy_dataset, "http://127.0.0.1:9/v1", algorithm=algorithm, **settings)
