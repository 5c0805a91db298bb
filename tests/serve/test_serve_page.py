"""The programs of docs/use/serve.md run as they are printed, against servers over a scripted engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.caller import nobody
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.server import Server
from sharpen.placement.exchange.store import Batches, FolderStore
from sharpen.serve.front import Front
from sharpen.serve.sessions import Sessions

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "serve.md").read_text(encoding="utf-8")
KEY = "at-key"
ASK: Any = [{"role": "user", "content": "hi"}]


def test_the_programs(tmp_path: Path) -> None:
    clients, session = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    gateway = Gateway(
        ScriptedEngine(tokenizer, lambda request: "an answer"), tokenizer, model_name="toy", loop=loop.loop
    )
    sessions = Sessions(gateway, KEY, tmp_path / "sessions", idle_s=600.0, group_size=1)
    sessions.restore(Batches(FolderStore(tmp_path)), 0)
    routes = {("POST", "/sessions"): sessions.open, ("POST", "/feedback"): sessions.rate}
    front = Front(gateway, sessions, KEY, {}, routes)
    server = Server(front.start, loop.loop, nobody, GatewayConfig())
    sessions.address = server.url
    base_url = server.url()
    made = run(clients, {"http://127.0.0.1:8000/v1": base_url, "http://127.0.0.1:8000": base_url.removesuffix("/v1")})
    assert made["client"].chat.completions.create(model="toy", messages=ASK).choices[0].message.content == "an answer"
    assert made["claude"].messages.create(model="toy", max_tokens=9, messages=ASK).content[0].text == "an answer"

    def agent(client: openai.OpenAI) -> None:
        with client:
            client.chat.completions.create(model="toy", messages=ASK)

    run(session, {"{...}": "{}"}, SERVER=base_url.removesuffix("/v1"), agent=agent)
    sessions.save()
    (rated,) = sessions.rated()
    assert (rated.task.id, rated.reward) == ("ticket-17", 0.8)
    made["client"].close()
    made["claude"].close()
    loop.run(server.stop())
    loop.run(gateway.close())
    loop.stop()


def run(code: str, places: dict[str, str], **names: Any) -> dict[str, Any]:
    """Run a program of the page with other addresses and keys; return its names."""
    for old, new in places.items():
        assert old in code
        code = code.replace(old, new)
    code = code.replace("at-…", KEY)
    found: dict[str, Any] = {"openai": openai, "anthropic": anthropic, "httpx": httpx, "KEY": KEY, **names}
    exec(compile(code, "serve.md", "exec", dont_inherit=True), found)
    return found
