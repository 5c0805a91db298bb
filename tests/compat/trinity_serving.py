"""Trinity workflows on the real gateway and runner, over an engine that says what a script says.

In: a function from the prompt's text to an answer. Out: rollouts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import http_here
import numpy as np

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.compat.trinity import workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.config.rows import Row
from sharpen.config.run import RolloutConfig
from sharpen.contracts import GenerateRequest, Generation
from sharpen.gateway.gateway import Gateway
from sharpen.placement.serving import ServingThread
from sharpen.types import Group, Rollout, Task

Script = Callable[[str], str]
MakePlace = Callable[..., "Place"]


class PromptEngine:
    """Answers a prompt's text with `script`; the logprob of the token at position i is -(i + 1)."""

    def __init__(self, tokenizer: Any, script: Script, max_model_len: int = 2048) -> None:
        self.tokenizer, self.script, self.max_model_len = tokenizer, script, max_model_len
        self.version = 3
        self.prompts: list[str] = []
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        prompt = self.tokenizer.decode(request.prompt_ids)
        self.prompts.append(prompt)
        self.requests.append(request)
        said = [*self.tokenizer.encode(self.script(prompt), add_special_tokens=False), self.tokenizer.eos_token_id]
        kept = said[: request.sampling.max_tokens]
        return Generation(
            ids=np.array(kept, np.int32),
            logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32),
            versions=np.full(len(kept), self.version, np.int32),
            finish_reason="stop" if kept == said else "length",
        )

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.version = version

    async def close(self) -> None:
        pass


class Place:
    """A gateway over a script, and runners on it."""

    def __init__(self, model_dir: Path, script: Script, max_model_len: int = 2048, **options: Any) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.thread = ServingThread()
        self.engine = PromptEngine(tokenizer, script, max_model_len)
        self.gateway = Gateway(self.engine, tokenizer, model_name="toy", loop=self.thread.loop, **options)
        self.auxiliary = Gateway(self.engine, tokenizer, model_name="helper", loop=self.thread.loop)
        self._runners: list[RolloutRunner] = []

    def open(self, rollout_id: str, noise_seed: int, record: bool = True) -> RolloutModels:
        """The policy and one auxiliary model, `helper`."""
        policy = self.gateway.open(rollout_id, noise_seed, record=record)
        return Uncounted(policy, {"helper": self.auxiliary.open(rollout_id, 1, record=False)})

    def run(
        self,
        workflow: Any,
        *rows: dict[str, Any],
        group_size: int = 1,
        taskset: dict[str, Any] | None = None,
        workflow_args: dict[str, Any] | None = None,
        no_use_in: str | None = None,
        record: bool = True,
        **settings: Any,
    ) -> list[Group]:
        """Run a workflow class (or a function) on rows, `group_size` times each."""
        function = workflow
        if isinstance(workflow, str | type):
            function = workflow_function(workflow, TasksetConfig(**(taskset or {})), workflow_args or {}, no_use_in)
        config = RolloutConfig(**{"timeout_s": 20.0, "max_attempts": 1, **settings})
        functions = UserFunctions(function, None, workflow_args)
        attempts = InProcess(functions, config.timeout_s)
        runner = RolloutRunner(attempts, self.open, config, group_size, 0, whole_groups=functions.whole_groups)
        self._runners.append(runner)
        tasks = [Task(id=f"train/{i}", index=i, row=Row(row)) for i, row in enumerate(rows or ({"prompt": "q"},))]
        return runner.run(
            tasks,
            group_ids=[f"g{task.index}" for task in tasks],
            open_session=lambda rollout_id, seed: self.open(rollout_id, seed, record),
        )

    def one(self, workflow: Any, *rows: dict[str, Any], **options: Any) -> Rollout:
        """The only rollout of the only task."""
        return self.run(workflow, *rows, **options)[0].rollouts[0]

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        for gateway in (self.gateway, self.auxiliary):
            self.thread.call(gateway.close(), timeout_s=10)
        self.thread.close()


class Uncounted(RolloutModels):
    """Nothing is noticed of the calls, so that a rollout's metrics are the workflow's own."""

    @property
    def counts(self) -> dict[str, float]:
        return {}


class Talks(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that says 'yes', as a stream where it is asked to."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "extra" in body or "plain_text" in body:
            self.send_error(400)
            return
        message = {"role": "assistant", "content": "yes"}
        choices = [{"index": i, "finish_reason": "stop", "message": message} for i in range(body.get("n", 1))]
        head = {"id": f"r{id(body)}", "created": 1, "model": "m"}
        content = json.dumps({**head, "object": "chat.completion", "choices": choices})
        if body.get("stream"):
            parts = [{"role": "assistant", "content": ""}, {"content": "ye"}, {"content": "s"}]
            events = [{"index": 0, "delta": part, "finish_reason": None} for part in parts]
            events.append({"index": 0, "delta": {}, "finish_reason": "stop"})
            chunks = [{**head, "object": "chat.completion.chunk", "choices": [event]} for event in events]
            content = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def talking_server() -> Iterator[str]:
    """The base URL of such an endpoint."""
    with http_here.answering(Talks) as url:
        yield f"{url}/v1"
