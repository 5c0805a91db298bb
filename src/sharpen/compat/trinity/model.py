"""`ModelWrapper` as Trinity's workflows know it: genuine OpenAI clients, `chat`, and the history of the rollout.

In: the model object of one rollout (`ChatModel`, `Endpoint`, or AgentScope's around one). Out: clients whose calls are
recorded, and `Experience`s of them. One wrapper belongs to one rollout: nobody else's calls are in its history.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from sharpen.agent.tasks.images import with_images
from sharpen.compat.trinity.experience import Answer, Experience
from sharpen.errors import ConfigError
from sharpen.gateway.history import Canonical, canonical
from sharpen.gateway.images import decoded, reference
from sharpen.gateway.protocols.chat import check_recorded
from sharpen.gateway.requests import ApiError, render_message
from sharpen.types import PROMPT_ROLE, Call, CallStatus, Picture

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types import Completion
    from openai.types.chat import ChatCompletion


# Which answers made a conversation: what Trinity's multi-turn workflows ask with their list of messages.
#
# In: the messages, with the assistant's own among them, and the rollout's answers so far. Out: the answers that gave
# those assistant messages. Nothing is tokenized again: the tokens are those of the recorded calls.


def answers_in(
    messages: Sequence[Mapping[str, Any]], answers: Sequence[Answer], told: Sequence[Answer] = ()
) -> tuple[Answer, ...]:
    """The answers that gave the conversation's assistant messages, in order.

    An answer gave the assistant message at position k if it was asked with the messages before k. Where several were
    (n > 1), the one that says what the message says, and of those that say the same one that no earlier conversation
    `told`: the same conversation may be held several times. Assistant messages that nobody was asked for (examples in
    the prompt) are context. Raises `ConfigError` if no answer made any part of the conversation, or if it cannot be
    told which one did.
    """
    said = [_canonical(message, position) for position, message in enumerate(messages)]
    asked = [
        (tuple(_canonical(message, position) for position, message in enumerate(answer.messages)), answer)
        for answer in answers
        if (answer.call is None or answer.call.status == CallStatus.USED) and answer.messages[0]["role"] != PROMPT_ROLE
    ]
    found: list[Answer] = []
    for position, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tuple(said[:position])
        candidates = [answer for prompt, answer in asked if prompt == before]
        candidates.sort(key=lambda answer: any(answer is one for one in told))
        if len(candidates) > 1:
            candidates = [answer for answer in candidates if answer.text.strip() == said[position][1].strip()]
            if not candidates:
                raise ConfigError(
                    f"messages[{position}] is none of the answers that the model gave there: put exp.response_text "
                    "into the conversation as it came"
                )
        found += candidates[:1]
    if not found:
        raise ConfigError(
            f"none of the rollout's {len(answers)} calls made this conversation of {len(messages)} messages: each "
            "assistant message must be the answer to exactly the messages before it"
        )
    return tuple(found)


def _canonical(message: Mapping[str, Any], position: int) -> Canonical:
    try:
        given = _with_references(message)
        check_recorded(given, position)
        return canonical(render_message(given))
    except (ApiError, ValueError) as error:
        raise ConfigError(f"the conversation is not one of chat messages: {error}") from error


def _with_references(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as it is recorded: with references in place of its images."""
    (message,) = with_images([message], ())
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": list(map(_referenced, message["content"]))}


def _referenced(part: Any) -> Any:
    source = part.get("image_url") if isinstance(part, Mapping) else None
    url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return part
    return reference(Picture.of(decoded(url.partition(",")[2])).sha256)


# What an endpoint was asked and what it answered, for workflows that are evaluated against one.
#
# In: an `Endpoint` (`base_url`, `name`, `api_key`, clients). Out: clients whose successful chat completions are kept,
# as `Answer`s without token ids: an endpoint's tokens are not trained.


class EndpointHistory:
    """The answers of one rollout, numbered in the order they came. Both clients write to it, from any thread."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._answers: dict[int, Answer] = {}
        self._indexes: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    @cached_property
    def client(self) -> AsyncOpenAI:
        """The endpoint's asynchronous client, with every answer kept."""

        async def keep(response: httpx.Response) -> None:
            if _is_answer(response):
                self._keep(response.request.content, await response.aread())

        transport = self._endpoint.async_transport  # where calls are counted
        http_client: Any = httpx.AsyncClient(transport=transport, event_hooks={"response": [keep]}, timeout=None)
        client: AsyncOpenAI = self._endpoint.client.with_options(http_client=http_client)
        return client

    @cached_property
    def sync_client(self) -> OpenAI:
        """The endpoint's synchronous client, with every answer kept."""

        def keep(response: httpx.Response) -> None:
            if _is_answer(response):
                self._keep(response.request.content, response.read())

        transport = self._endpoint.sync_transport  # where calls are counted
        http_client: Any = httpx.Client(transport=transport, event_hooks={"response": [keep]}, timeout=None)
        client: OpenAI = self._endpoint.sync_client.with_options(http_client=http_client)
        return client

    def answers(self) -> dict[int, Answer]:
        """All answers so far, by number."""
        with self._lock:
            return dict(self._answers)

    def indexes_of(self, response_id: str) -> list[int]:
        """The numbers of a response's choices."""
        with self._lock:
            return list(self._indexes[response_id])

    def _keep(self, request: bytes, response: bytes) -> None:
        asked = json.loads(request)
        with self._lock:
            for response_id, choice in _choices(response):
                index = len(self._answers)
                self._answers[index] = Answer(
                    messages=tuple(asked["messages"]),
                    tools=tuple(asked.get("tools") or ()),
                    response=choice["message"],
                    finish_reason=str(choice.get("finish_reason")),
                )
                self._indexes.setdefault(response_id, []).append(index)


def _is_answer(response: httpx.Response) -> bool:
    return response.is_success and response.request.url.path.endswith("/chat/completions")


def _choices(response: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """(response id, choice) of a whole response or of a stream's events, whose text is put together."""
    if not response.lstrip().startswith(b"data:"):
        body = json.loads(response)
        yield from ((str(body.get("id")), choice) for choice in body["choices"])
        return
    merged: dict[int, dict[str, Any]] = {}
    response_id = ""
    for line in response.decode().splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        response_id = str(event.get("id"))
        for part in event["choices"]:
            choice = merged.setdefault(part["index"], {"message": {"role": "assistant", "content": ""}})
            choice["message"]["content"] += part["delta"].get("content") or ""
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    yield from ((response_id, merged[index]) for index in sorted(merged))


PASSED = ("n", "temperature", "top_p", "max_tokens", "stop", "seed", "tools", "tool_choice")
"""Arguments of `chat` that the endpoint takes under the same name."""
WITHOUT_EFFECT = ("logprobs",)
"""The logprob of every sampled token is recorded anyway."""
ABSENT = {
    "logprobs": "logprobs of tokens that were not sampled: exp.logprobs has those of what was",
    "logprobs_async": "logprobs of tokens that were not sampled: exp.logprobs has those of what was",
    "clone_with_isolated_history": "a second history of the same rollout",
    "sync_model_weights": "weights are loaded by the run itself",
    "get_lora_request": "adapters",
    "config": "Trinity's own configuration object: see model_path, api_address and api_key",
}
"""What Trinity's wrapper has and this one does not, and why."""


class ModelWrapper:
    """A model as a workflow sees it. Copies are the same object, so that agents may copy what holds it.

    `enable_history` is true for the model that is trained (also while it is evaluated), false for auxiliary ones.
    """

    def __init__(self, model: Any, *, enable_history: bool) -> None:
        self.enable_history = enable_history
        self._model = getattr(model, "sharpen_model", model)  # AgentScope's object holds ours
        self._history = None if hasattr(self._model, "calls") else EndpointHistory(self._model)
        self._experiences: dict[int, Experience] = {}
        self._extracted: set[int] = set()
        self._told: set[int] = set()

    @property
    def model_path(self) -> str:
        """The model as it was configured, and the name to call it by."""
        return str(self._model.name)

    @property
    def model_name(self) -> str:
        """The same."""
        return self.model_path

    @property
    def is_eval(self) -> bool:
        """Whether the rollout is an evaluation's, of which nothing is trained."""
        return not getattr(self._model, "recorded", False)

    @property
    def model_version(self) -> int:
        """Updates that the served weights have had; 0 for an endpoint."""
        return int(getattr(self._model, "version", 0))

    @property
    def api_address(self) -> str:
        """Where the model is served over HTTP, without `/v1`. The first use starts the server."""
        return str(self._model.base_url).rstrip("/").removesuffix("/v1")

    @property
    def api_key(self) -> str:
        """The key to call it with: this rollout's own."""
        return str(self._model.api_key)

    def get_openai_client(self) -> OpenAI:
        """An `openai.OpenAI`, the same each time; its `model_path` is the model's name. Calls block their thread."""
        client: OpenAI = self._labelled(self._history.sync_client if self._history else self._model.sync_client)
        return client

    def get_openai_async_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI`, the same each time; its `model_path` is the model's name."""
        client: AsyncOpenAI = self._labelled(self._history.client if self._history else self._model.client)
        return client

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> list[Experience]:
        """Ask the model, `n` times at once; the experiences are in the history too.

        `sampling` takes n, temperature, top_p, top_k, max_tokens, stop, seed, tools, tool_choice; None is the model's
        own. An assistant message at the end is the beginning of the answer. An image is a part of the type `image` (of
        Pillow, a path, ...) or `image_url`. `response_text` is all that was sampled:
        no parser takes reasoning or tool calls out of it. Blocks the calling thread; raises `ConfigError` for an
        unknown argument, and openai's errors.
        """
        return self._answered(self.get_openai_client().chat.completions.create(**self._request(messages, sampling)))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> list[Experience]:
        """As `chat`."""
        client = self.get_openai_async_client()
        return self._answered(await client.chat.completions.create(**self._request(messages, sampling)))

    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """Ask with each of these texts as they are, without the chat template; otherwise as `chat` (without tools).

        Raises `ConfigError` where an endpoint answers.
        """
        create = self.get_openai_client().completions.create
        completions = [create(**self._raw_request(prompt, sampling)) for prompt in self._raw_prompts(prompts)]
        return [experience for completion in completions for experience in self._answered(completion)]

    async def generate_async(self, prompts: Sequence[str], **sampling: Any) -> list[Experience]:
        """As `generate`, with all prompts at once."""
        create = self.get_openai_async_client().completions.create
        requests = [self._raw_request(prompt, sampling) for prompt in self._raw_prompts(prompts)]
        completions = await asyncio.gather(*(create(**request) for request in requests))
        return [experience for completion in completions for experience in self._answered(completion)]

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """An experience for each call that was answered since the last extraction, in the order they were made.

        With `clear_history=False` they stay in the history. Raises `ConfigError` for an auxiliary model, whose calls
        are never trained.
        """
        if not self.enable_history:
            raise ConfigError(
                f"the calls of the auxiliary model {self.model_path!r} are never trained, so it has no history: "
                "extract the experiences of the workflow's own model"
            )
        answers = self._answers()
        fresh = [index for index in sorted(answers) if index not in self._extracted and _delivered(answers[index])]
        experiences = [self._experience(index, answers) for index in fresh]
        if clear_history:
            self._extracted.update(fresh)
        return experiences

    def convert_messages_to_experience(self, messages: Sequence[Mapping[str, Any]]) -> Experience:
        """One experience for the answers that made this conversation (see `answers_in`).

        Nothing is tokenized again: it stands for the recorded calls. Raises `ConfigError` where no call made it.
        """
        answers = self._answers()
        told = [answers[index] for index in self._told if index in answers]
        found = answers_in(messages, list(answers.values()), told)
        self._told.update(index for index, answer in answers.items() if any(answer is one for one in found))
        return Experience.of(found, self)

    async def get_message_token_len(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of the prompt that these messages make. Raises `ConfigError` where an endpoint answers."""
        if self._history is not None:
            raise ConfigError(
                "model.get_message_token_len() needs the model's tokenizer, which an endpoint has not got"
            )
        number: int = await self._model.count_tokens(messages)
        return number

    async def convert_messages_to_experience_async(self, messages: Sequence[Mapping[str, Any]]) -> Experience:
        """As `convert_messages_to_experience`."""
        return self.convert_messages_to_experience(messages)

    def recognize(self, name: str, experiences: Sequence[Experience]) -> list[Experience]:
        """The experiences that the workflow `name` returned, with those that it constructed replaced by recorded ones.

        Raises `ConfigError` where they are not what was recorded (see `experience`).
        """
        answers = self._answers() if any(experience.claim is not None for experience in experiences) else {}
        calls = {index: answer.call for index, answer in answers.items() if answer.call and _delivered(answer)}
        taken = {call.index for experience in experiences for call in experience.calls}
        found = []
        for experience in experiences:
            if (claim := experience.claim) is None:
                found.append(experience)
                continue
            indexes = list(answers) if self._history is not None else claim.calls(name, calls, taken)
            taken.update(indexes)
            own = Experience.of([answers[index] for index in indexes], self)
            own.eid, own.info, own.metrics = experience.eid, experience.info, experience.metrics
            own.reward = experience.reward
            if claim.leaves_out():
                own.leave_out()
            found.append(own)
        return found

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT:
            raise AttributeError(f"ModelWrapper.{name} is not available here ({ABSENT[name]})")
        raise AttributeError(f"'ModelWrapper' object has no attribute {name!r}")

    def __copy__(self) -> ModelWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        return self

    def __repr__(self) -> str:
        return f"ModelWrapper(model_path={self.model_path!r})"

    def _labelled(self, client: Any) -> Any:
        client.model_path = self.model_path
        client.model_wrapper = self
        return client

    def _raw_prompts(self, prompts: Sequence[str]) -> Sequence[str]:
        if self._history is not None:
            raise ConfigError(
                "model.generate() asks without the chat template, which an endpoint is not asked here: use chat()"
            )
        if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError(f"model.generate() takes a list of texts, got {prompts!r:.100}")
        return prompts

    def _raw_request(self, prompt: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
        asked = self._request((), sampling)
        for name in ("tools", "tool_choice"):
            if asked.get(name) is not None:
                raise ConfigError(f"model.generate() takes no {name!r}: tools are written by the chat template")
        del asked["messages"], asked["extra_body"]["plain_text"]
        return {**asked, "prompt": prompt}

    def _request(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in sampling.items() if value is not None}
        extra: dict[str, Any] = dict(given.pop("extra_body", {}))
        if (top_k := given.pop("top_k", 0)) > 0:
            extra["top_k"] = top_k
        for name in set(given) - {*PASSED, *WITHOUT_EFFECT}:
            near = get_close_matches(name, PASSED, n=1)
            raise ConfigError(
                f"model.chat() takes no {name!r}{f'; did you mean {near[0]!r}?' if near else ''} "
                f"(it takes {', '.join((*PASSED, 'top_k'))})"
            )
        if messages and messages[-1].get("role") == "assistant":
            extra["continue_final_message"] = True
        if self._history is None:
            extra["plain_text"] = True
        kept = {name: given[name] for name in PASSED if name in given}
        return {"model": self.model_path, "messages": with_images(messages, ()), "extra_body": extra, **kept}

    def _answered(self, completion: ChatCompletion | Completion) -> list[Experience]:
        """The experiences of a response's choices."""
        if self._history is not None:
            indexes = self._history.indexes_of(completion.id)
        else:
            indexes = [int((choice.model_extra or {})["call_index"]) for choice in completion.choices]
        answers = self._answers()
        return [self._experience(index, answers) for index in indexes]

    def _answers(self) -> dict[int, Answer]:
        if self._history is not None:
            return self._history.answers()
        return {call.index: _answer(call, self._model.prompt_text) for call in self._model.calls()}

    def _experience(self, index: int, answers: Mapping[int, Answer]) -> Experience:
        """The experience of a call: the same object whenever it is asked for, so that what was set on it stays."""
        if index not in self._experiences:
            self._experiences[index] = Experience.of([answers[index]], self)
        return self._experiences[index]


def _delivered(answer: Answer) -> bool:
    return answer.call is None or answer.call.status == CallStatus.USED


def _answer(call: Call, prompt_text: Callable[[int], str]) -> Answer:
    return Answer(
        messages=call.messages,
        tools=call.tools,
        response=call.response,
        finish_reason=call.finish_reason,
        call=call,
        prompt_text=lambda: prompt_text(call.index),
    )
