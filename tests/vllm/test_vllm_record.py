"""`sharpen record` before a real vLLM server, and SFT and DPO rows from what it recorded: another process serves the
quickstart's model, the recorder is a command, the application an OpenAI client. The same server is a teacher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from processes import Forked, forked, line_of, python
from transformers import AutoTokenizer
from vllm_served import MODEL, vllm_processes

from sharpen.cli.main import main
from sharpen.config.distill import DistillConfig
from sharpen.learning.experience.reading import read_groups
from sharpen.placement.teacher_endpoint import TeacherEndpoint
from sharpen.types import Call, Rollout

KEY = "the-key"
QUESTIONS = ("What is 2 + 3?", "What is 4 + 4?")
OPTIONS = ("--served-model-name", "policy", "--max-model-len", "512", "--dtype", "float32", "--enforce-eager")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
LIMIT_S = 600


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    return False


def port_of(process: Forked) -> int:
    """The port that a server was given by the system, when it answers there."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and answers(connection.laddr.port):
                return int(connection.laddr.port)
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"vLLM did not start: {process.communicate()}")


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    """The base URL of `vllm serve`."""
    known = {process.pid for process in vllm_processes()}
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--host", "127.0.0.1"]
    options = ["--port", "0", "--max-num-seqs", "4", *OPTIONS]
    try:
        with forked(*arguments, *options, env={**os.environ, **ENVIRONMENT}) as process:
            yield f"http://127.0.0.1:{port_of(process)}/v1"
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
    finally:
        for one in vllm_processes():
            if one.pid not in known:
                one.kill()


def post(url: str, key: str = KEY, **body: Any) -> Any:
    reply = httpx.post(url, headers={"authorization": f"Bearer {key}"}, json=body, timeout=LIMIT_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(session: dict[str, Any], question: str, stream: bool) -> None:
    """Two turns, the second with the first's answer as the client has it. Streamed answers are longer than whole ones,
    so that the two sessions of a task differ."""
    length: Any = {"max_tokens": 12, "extra_body": {"min_tokens": 6}} if stream else {"max_tokens": 3}
    messages: list[Any] = [{"role": "user", "content": question}]
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        for more in ("And 1 more?", None):
            request: Any = {"model": "policy", "messages": messages, **length}
            if stream:
                with client.chat.completions.create(**request, stream=True) as chunks:
                    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            else:
                said = client.chat.completions.create(**request).choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]


@pytest.fixture(scope="module")
def record(upstream: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recording: each question in two sessions, whole and streamed, of which one was good."""
    folder = tmp_path_factory.mktemp("vllm") / "record"
    arguments = ("--upstream", upstream, "--dir", str(folder), "--port", "0", "--api-key", KEY)
    with python("-m", "sharpen.cli.main", "record", *arguments) as process:
        while not (line := line_of(process)).startswith("recording"):
            pass
        url = line.split()[3].removesuffix("/v1")
        for question in QUESTIONS:
            for stream in (False, True):
                session = post(f"{url}/sessions", task_id=question, task={"question": question})
                ask(session, question, stream)
                post(f"{url}/feedback", session=session["id"], reward=float(stream))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
    return folder


def rollouts_of(folder: Path) -> list[Rollout]:
    return [rollout for group in read_groups(folder / "run.db") for rollout in group.rollouts]


def test_its_ids_and_logprobs_are_the_models(record: Path, model: Any) -> None:
    """The ids of a prompt are those of the template, and each sampled id has the model's own logprob."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rollouts = rollouts_of(record)
    assert [(len(rollout.calls), rollout.reward) for rollout in rollouts] == [(2, 0.0), (2, 1.0)] * len(QUESTIONS)
    for rollout in rollouts:
        for call in rollout.calls:
            rendered = tokenizer.apply_chat_template(list(call.messages), add_generation_prompt=True, tokenize=False)
            assert tokenizer.decode(call.prompt_ids_P) == rendered
            assert 0 < len(call.sampled_ids_S) <= 12
            np.testing.assert_allclose(call.logprobs_S, logprobs(model, call), atol=1e-3)


def logprobs(model: Any, call: Call) -> np.ndarray:
    ids = [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]
    return of_all(model, ids)[len(call.prompt_ids_P) - 1 :]


def of_all(model: Any, ids: list[int]) -> np.ndarray:
    """The model's logprobs of all ids but the first."""
    with torch.no_grad():
        scores_TV = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return scores_TV.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).numpy()


def test_the_server_is_a_teacher(upstream: str, record: Path, model: Any) -> None:
    """The start finds vLLM's form and equal texts of ids, and the scores are the model's."""
    config = DistillConfig(teacher_url=upstream, teacher_model="policy")
    teacher = TeacherEndpoint.open(config, MODEL, 512)
    try:
        assert teacher.form == "prompt_logprobs"
        rollouts = rollouts_of(record)
        for call in (call for rollout in rollouts for call in rollout.calls):
            ids = [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]
            np.testing.assert_allclose(teacher.logprobs(ids), of_all(model, ids), atol=1e-3)
        for rollout in rollouts:
            taught, tokens = teacher._rollout(rollout)
            assert (taught.outcome, tokens > 0) == (rollout.outcome, True)
            for call in taught.calls:
                assert call.taught_S is not None
                np.testing.assert_allclose(call.taught_S, logprobs(model, call), atol=1e-3)
    finally:
        teacher.close()


@pytest.mark.parametrize(("kind", "num_rows"), [("sft", 2), ("dpo", 2)])
def test_what_was_recorded_is_learnt_from(record: Path, tmp_path: Path, kind: str, num_rows: int) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.yaml"
    options = ["--min-reward", "1"] if kind == "sft" else []
    assert main(["export", str(record), "--for", kind, *options, "--to", str(rows)]) == 0
    assert len(rows.read_text().splitlines()) == num_rows
    settings = {
        "train_dataset": {"path": str(rows), "total_steps": 1},
        "model": {"model_path": str(MODEL), "max_model_len": 512},
        "algorithm": {"algorithm_type": kind, "batch_size": 2, "learning_rate": 1e-4},
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "project": "p",
        "name": "n",
    }
    config.write_text(json.dumps(settings))
    assert main(["run", "--config", str(config)]) == 0
    assert main(["certify", str(tmp_path / "runs" / "p" / "n")]) == 0
