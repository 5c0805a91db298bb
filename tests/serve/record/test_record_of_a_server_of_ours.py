"""A recorder in front of `sharpen serve`: what it records are the ids that the engine was asked and sampled."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.caller import nobody
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.listening import AppServer
from sharpen.gateway.server import Server
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.serve.front import Front, OneKey
from sharpen.serve.record.proxy import Proxy
from sharpen.serve.record.sessions import RecordedSessions
from sharpen.serve.record.upstream import Upstream
from sharpen.types import Call

KEY = "at-the-servers-key"
TOOLS = [{"type": "function", "function": {"name": "name", "parameters": {"type": "object", "properties": {}}}}]
SAYS = ["yes", '<tool_call>\n{"name": "name", "arguments": {}}\n</tool_call>', "no"]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[str, ScriptedEngine, Journal]]:
    """The URL of a recorder, the engine behind it, and the journal."""
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    says = iter(SAYS * 2)
    engine = ScriptedEngine(tokenizer, lambda request: next(says))
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=loop.loop)
    server = Server(Front(gateway, OneKey(gateway, KEY), KEY, {}).start, loop.loop, nobody, GatewayConfig())
    upstream = Upstream(server.url(), None)
    with Journal(tmp_path / "run.db") as journal:
        sessions = RecordedSessions(journal, idle_s=600.0, say=print)
        app = Proxy(upstream, sessions, "the-recorders", {}, print, open_=True, max_body_mb=64)

        async def start() -> AppServer:
            proxy = AppServer(app, GatewayConfig())
            await proxy.start()
            return proxy

        proxy = loop.run(start())
        yield f"http://127.0.0.1:{proxy.port}/v1", engine, journal
        for ending in (proxy.stop(), upstream.close(), server.stop(), gateway.close()):
            loop.run(ending)
    loop.stop()


def calls_of(journal: Journal) -> tuple[Call, ...]:
    journal.flush()
    ((rollout,),) = [group.rollouts for group in read_groups(journal.path)]
    return rollout.calls


@pytest.mark.parametrize("stream", [False, True])
def test_the_recorded_ids_are_the_engines(recorded, stream):
    url, engine, journal = recorded
    messages = [{"role": "user", "content": "answer"}]
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        for _ in range(2):
            asked = {"model": "toy", "messages": messages, "tools": TOOLS, "temperature": 0.5}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    reply = events.get_final_completion()
            else:
                reply = client.chat.completions.create(**asked)
            answer = reply.choices[0].message.model_dump(exclude_none=True)
            messages = [*messages, {key: answer[key] for key in answer.keys() & {"role", "content", "tool_calls"}}]
            messages.append({"role": "user", "content": "the name"})
        list(client.completions.create(model="toy", prompt="system", stream=stream))
    calls = calls_of(journal)
    for call, request, text in zip(calls, engine.requests, SAYS, strict=True):
        assert call.prompt_ids_P.tolist() == list(request.prompt_ids)
        sampled = [*engine.tokenizer.encode(text, add_special_tokens=False), engine.tokenizer.eos_token_id]
        assert call.sampled_ids_S.tolist() == sampled
        assert len(call.logprobs_S) == len(sampled)
    first, second, third = calls
    assert (first.parent, second.parent, third.parent) == (None, 0, None)
    assert first.response["content"] == "yes"
    assert second.response["tool_calls"][0]["function"] == {"name": "name", "arguments": "{}"}
    assert third.response["content"] == "no"
    assert {call.sampling.temperature for call in calls[:2]} == {0.5}
