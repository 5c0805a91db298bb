"""The front of a server, over a scripted engine and real HTTP: who may call, what is counted, what is kept."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.config.sections import GatewayConfig
from sharpen.errors import EngineLostError
from sharpen.gateway.caller import nobody
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.routes import COUNT_TOKENS, MODELS, OURS
from sharpen.gateway.server import Server
from sharpen.serve.front import MAX_RUNNING, Front, OneKey, Recent
from sharpen.serve.metrics import Metric, exposition
from sharpen.serve.openapi import CALLS, document

KEY = "a key"
ASK = [{"role": "user", "content": "hi"}]


@dataclass
class Served:
    front: Front
    engine: ScriptedEngine
    loop: ServingLoop
    gateway: Gateway
    address: str
    clients: ExitStack

    @property
    def openai(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=KEY, max_retries=0)
        return self.clients.enter_context(client)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        client = anthropic.Anthropic(base_url=self.address, api_key=KEY, max_retries=0)
        return self.clients.enter_context(client)

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", headers={"authorization": f"Bearer {key}"})

    def metric(self, line: str) -> float:
        found = [one for one in self.get("/metrics").text.splitlines() if one.startswith(f"{line} ")]
        assert len(found) == 1, (line, self.get("/metrics").text)
        return float(found[0].rpartition(" ")[2])


@pytest.fixture
def served():
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: f"noise {request.noise % 1000}")
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=loop.loop)
    front = Front(gateway, OneKey(gateway, KEY), KEY, document("1"))
    server = Server(front.start, loop.loop, nobody, GatewayConfig())
    with ExitStack() as clients:
        yield Served(front, engine, loop, gateway, server.url().removesuffix("/v1"), clients)
    if engine._gate is not None:
        loop.call(engine.release)
    loop.run(server.stop())
    loop.run(gateway.close())
    loop.stop()


def test_all_protocols_are_answered_and_nothing_is_kept(served):
    reply = served.openai.chat.completions.create(model="toy", messages=ASK)
    assert reply.choices[0].message.content.startswith("noise")
    chunks = served.openai.chat.completions.create(model="toy", messages=ASK, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices).startswith("noise")
    assert served.anthropic.messages.create(model="toy", max_tokens=9, messages=ASK).content[0].text
    assert served.openai.completions.create(model="toy", prompt="hi").choices[0].text
    first = served.openai.responses.create(model="toy", input="hi")
    again = served.openai.responses.create(model="toy", input="more", previous_response_id=first.id)
    assert first.output_text in served.engine.tokenizer.decode(served.engine.requests[-1].prompt_ids)
    assert served.openai.responses.retrieve(again.id).id == again.id
    assert served.gateway._keys.holders() == []


def test_a_seed_repeats_whoever_asks_and_without_one_nothing_does(served):
    def noise(**options):
        served.openai.chat.completions.create(model="toy", messages=ASK, **options)
        return served.engine.requests[-1].noise

    assert noise(seed=4) == noise(seed=4)
    assert len({noise(seed=4), noise(seed=5), noise(), noise()}) == 4


def test_other_keys_and_none_are_refused_in_the_vendors_words(served):
    for key in ("another key", "ключ"):
        header = {"authorization": f"Bearer {key}".encode()}
        reply = httpx.post(f"{served.address}/v1/chat/completions", headers=header, json={"messages": ASK})
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    reply = httpx.post(f"{served.address}/v1/messages", json={"messages": ASK})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    assert served.get("/metrics", key="no").status_code == 401
    assert served.engine.requests == []


def test_health_and_description_need_no_key(served):
    health = httpx.get(f"{served.address}/health")
    assert (health.status_code, health.json()["model"], health.json()["version"]) == (200, "toy", 0)
    described = httpx.get(f"{served.address}/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert set(CALLS) <= set(described["paths"])
    for path in CALLS:  # what is described is there
        reply = httpx.post(f"{served.address}{path}", headers={"x-api-key": KEY}, json={})
        assert reply.status_code == 400, (path, reply.text)


def test_the_description_is_of_what_is_served_all_of_it(served):
    """Each path that is described is answered, and each route that is answered is described."""
    described = httpx.get(f"{served.address}/openapi.json").json()["paths"]
    stored = served.openai.responses.create(model="toy", input="hi").id
    for path, methods in described.items():
        place = path.replace("{id}", stored).replace("{model}", "toy")
        for method in sorted(methods.keys() - {"parameters"}, reverse=True):  # get it, then delete it
            reply = httpx.request(method, f"{served.address}{place}", headers={"x-api-key": KEY}, content=b"{}")
            assert reply.status_code in (200, 400), (method, path, reply.text)
            open_ = methods[method].get("security") == []
            without = httpx.request(method, f"{served.address}{place}", content=b"{}")
            assert (without.status_code != 401) == open_, (method, path)
    routes = {(method.lower(), f"/v1{path}") for method, path in (*OURS, COUNT_TOKENS, MODELS)}
    assert routes <= {(method, path) for path, methods in described.items() for method in methods}


def test_what_is_measured_is_what_the_page_lists(served):
    page = (Path(__file__).parents[2] / "docs" / "use" / "serve.md").read_text()
    text = served.get("/metrics").text
    for kind in ("HELP", "TYPE"):
        assert len(re.findall(rf"^# {kind} sharpen_\w+ ", text, re.MULTILINE)) == text.count(f"# {kind} ")
    plain, learning = (set(re.findall(r"`(sharpen_\w+)`", part)) for part in page.split("# Serve a model that learns"))
    assert set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) == plain
    assert not plain & learning


def test_metrics_count_calls_tokens_and_what_is_running(served):
    served.openai.chat.completions.create(model="toy", messages=ASK)
    with served.anthropic.messages.stream(model="toy", max_tokens=3, messages=ASK) as stream:
        stream.until_done()
    with pytest.raises(openai.BadRequestError):
        served.openai.chat.completions.create(model="toy", messages=[])
    assert served.metric('sharpen_requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert served.metric('sharpen_requests_total{path="/v1/chat/completions",status="400"}') == 1
    assert served.metric('sharpen_requests_total{path="/v1/messages",status="200"}') == 1
    prompts = sum(len(one.prompt_ids) for one in served.engine.requests)
    assert served.metric("sharpen_prompt_tokens_total") == prompts
    assert served.metric("sharpen_sampled_tokens_total") > 3
    assert served.metric("sharpen_requests_running") == 0
    served.engine.hold()
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(served.openai.chat.completions.create, model="toy", messages=ASK)
        while not served.metric("sharpen_requests_running"):
            pass
        served.loop.call(served.engine.release)
        reply.result()
    assert served.metric("sharpen_requests_running") == 0
    assert served.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_labels_are_escaped():
    metric = Metric(name="odd", kind="gauge", text="Odd.", values={(("a", 'b"\\\n'),): 12345678})
    assert exposition([metric]).decode().splitlines()[-1] == 'sharpen_odd{a="b\\"\\\\\\n"} 12345678'


def test_what_clients_go_on_with_is_remembered_within_bounds():
    recent: Recent[int] = Recent(2)
    for number in range(5):
        recent[str(number)] = number
    assert recent == {"3": 3, "4": 4}


def test_too_many_at_once_are_told_to_come_back(served):
    served.front.requests.running = MAX_RUNNING
    with pytest.raises(openai.InternalServerError) as caught:
        served.openai.chat.completions.create(model="toy", messages=ASK)
    assert caught.value.status_code == 503
    served.front.requests.running = 0
    assert served.openai.chat.completions.create(model="toy", messages=ASK)


def test_the_end_waits_for_what_is_running_and_refuses_more(served):
    served.engine.hold()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(served.openai.chat.completions.create, model="toy", messages=ASK)
        assert served.engine.waiting.acquire(timeout=120)
        ending = asyncio.run_coroutine_threadsafe(served.front.end(120.0), served.loop.loop)
        while served.get("/health").status_code != 503:
            pass
        with pytest.raises(openai.InternalServerError):
            served.openai.chat.completions.create(model="toy", messages=ASK)
        assert not ending.done()
        served.loop.call(served.engine.release)
        assert running.result().choices[0].finish_reason == "stop"
        ending.result(120)


def test_the_end_aborts_what_takes_too_long(served):
    served.engine.hold()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(served.openai.chat.completions.create, model="toy", messages=ASK)
        assert served.engine.waiting.acquire(timeout=120)
        served.loop.run(served.front.end(0.05))
        with pytest.raises(openai.APIStatusError):
            running.result()
    assert served.engine.cancelled == 1


def test_a_client_that_hangs_up_stops_its_call(served):
    served.engine.hold()
    with pytest.raises(openai.APITimeoutError):
        served.openai.chat.completions.create(model="toy", messages=ASK, timeout=0.5)
    while served.metric("sharpen_requests_running"):
        pass
    assert served.engine.cancelled == 1
    assert served.metric('sharpen_requests_total{path="/v1/chat/completions",status="499"}') == 1


def test_a_lost_engine_is_told_to_whoever_runs_the_server(served):
    def lose(request):
        raise EngineLostError("out of memory")

    served.engine.script = lose
    with pytest.raises(openai.InternalServerError):
        served.openai.chat.completions.create(model="toy", messages=ASK)
    assert served.front.lost.wait(120)
    assert served.get("/health").status_code == 503
