"""TRAPS rows 26 and 27: calls belong to their rollout, and only what was delivered is trained."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from scripted import eventually

from sharpen.types import CallStatus

USER = [{"role": "user", "content": "hello"}]


def test_trap_26_a_thousand_interleaved_rollouts(serve: Any, tokenizer: Any) -> None:
    """Red when the transports share one key, or `Gateway.start` looks the session up by anything but the key."""

    def script(request: Any) -> str:
        names = re.findall(r"rollout (\d+)", tokenizer.decode(request.prompt_ids))
        return f"rollout {names[-1]} heard"

    served = serve(script)

    async def workflow(number: int, session: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am rollout {number}"}]
        for turn in range(2):
            await asyncio.sleep((number * 7919 % 13) / 1000)
            reply = await session.model.client.chat.completions.create(model="toy", messages=messages)
            content = reply.choices[0].message.content
            assert content == f"rollout {number} heard"
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"turn {turn}"}]

    async def main() -> list[Any]:
        sessions = [served.open(f"g/{number}") for number in range(1000)]
        await asyncio.gather(*(workflow(number, session) for number, session in enumerate(sessions)))
        return [session.close() for session in sessions]

    for number, calls in enumerate(asyncio.run(main())):
        assert [call.parent for call in calls] == [None, 0]
        assert all(call.status == CallStatus.USED for call in calls)
        for call in calls:
            assert f"rollout {number} heard" in tokenizer.decode(call.sampled_ids_S)
            assert f"I am rollout {number}<" in tokenizer.decode(call.prompt_ids_P)


def test_trap_26_threads_and_loops_of_their_own(serve: Any, tokenizer: Any) -> None:
    """As above, with synchronous clients, one loop per thread, and HTTP. Red in the same way."""
    served = serve(lambda request: tokenizer.decode(request.prompt_ids).split("user\n")[1].split("<")[0])
    said: dict[int, list[str | None]] = {}

    def work(number: int) -> None:
        session = served.open(f"g/{number}")
        messages: Any = [{"role": "user", "content": f"number {number}"}]
        create = session.model.sync_client.chat.completions.create
        replies = [create(model="toy", messages=messages)]

        async def again() -> Any:
            return await session.model.client.chat.completions.create(model="toy", messages=messages)

        replies.append(asyncio.run(again()))
        with openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key) as client:
            replies.append(client.chat.completions.create(model="toy", messages=messages))
        said[number] = [reply.choices[0].message.content for reply in replies]
        assert [call.status for call in session.close()] == [CallStatus.USED] * 3

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert said == {number: [f"number {number}"] * 3 for number in range(12)}


def held(serve: Any) -> Any:
    """A gateway whose engine does not answer until it is released."""
    served = serve("hi")
    served.serving.call(served.engine.hold)
    return served


def test_trap_27_cancelled_call_is_aborted_and_abandoned(serve: Any) -> None:
    """Red when `AsyncTransport` marks the exchange delivered before the agent's task has it."""
    served = held(serve)
    session = served.open()

    async def main() -> None:
        asking = asyncio.create_task(session.model.client.chat.completions.create(model="toy", messages=USER))
        await asyncio.to_thread(served.engine.waiting.acquire)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())
    eventually(lambda: served.engine.cancelled == 1)
    (call,) = session.close()
    assert (call.status, call.finish_reason, call.trainable) == (CallStatus.ABANDONED, "abort", False)


def test_trap_27_answer_that_comes_after_the_cancellation(serve: Any) -> None:
    """The engine has sampled, the answer is on its way, the agent's task is cancelled: not trained. Red as above."""
    served = held(serve)
    session = served.open()

    async def main() -> None:
        asking = asyncio.create_task(session.model.client.chat.completions.create(model="toy", messages=USER))
        await asyncio.to_thread(served.engine.waiting.acquire)
        served.serving.call(served.engine.release)
        eventually(lambda: session.snapshot()[0].finish_reason == "stop")  # blocks this loop:
        time.sleep(0.1)  # the answer waits in its queue
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())
    (call,) = session.close()
    assert call.finish_reason == "stop"
    assert call.status == CallStatus.ABANDONED


@pytest.mark.parametrize("kind", ["async", "sync", "http"])
def test_trap_27_timed_out_call_is_aborted_and_abandoned(serve: Any, kind: str) -> None:
    """Red when a timeout leaves the request running, or a disconnect is not noticed.

    On a loaded machine the limit may pass before the engine has the request: then a longer one is tried.
    """
    served = held(serve)
    session = served.open()
    client = session.model.sync_client
    if kind == "http":
        client = openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)

    def ask(timeout_s: float) -> None:
        if kind == "async":
            asyncio.run(session.model.client.chat.completions.create(model="toy", messages=USER, timeout=timeout_s))
        else:
            client.chat.completions.create(model="toy", messages=USER, timeout=timeout_s)

    for timeout_s in (0.3, 3.0, 30.0):
        with pytest.raises(openai.APITimeoutError):
            ask(timeout_s)
        if served.engine.requests:
            break
    client.close()
    eventually(lambda: served.engine.cancelled == len(served.engine.requests) > 0)
    assert {call.status for call in session.close()} == {CallStatus.ABANDONED}


def test_trap_27_calls_in_flight_when_the_rollout_ends(serve: Any) -> None:
    """Red when `Session.close` does not cancel its tasks (the agent would wait for ever)."""
    served = held(serve)
    session = served.open()
    errors: list[Exception] = []

    def work() -> None:
        try:
            session.model.sync_client.chat.completions.create(model="toy", messages=USER)
        except openai.AuthenticationError as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    served.engine.waiting.acquire()
    calls = session.close()
    thread.join(120)
    assert len(errors) == 1
    assert [call.status for call in calls] == [CallStatus.ABANDONED]
    assert session.close() is calls
    eventually(lambda: served.engine.cancelled == 1)


def test_trap_27_of_a_retried_call_only_the_retry_is_used(serve: Any) -> None:
    """Red when `Session.exchange` ignores the SDK's retry count."""
    session = serve("hi").open()
    url = f"{session.model.base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {session.model.api_key}"}
    body = {"model": "toy", "messages": USER}
    for retry in ("0", "1", "2"):
        assert httpx.post(url, headers={**headers, "x-stainless-retry-count": retry}, json=body).status_code == 200
    httpx.post(url, headers=headers, json=body)  # the same question asked anew is no retry
    statuses = [call.status for call in session.close()]
    assert statuses == [CallStatus.ABANDONED, CallStatus.ABANDONED, CallStatus.USED, CallStatus.USED]


async def told_apart(serve: Any, *requests: tuple[str, str]) -> list[CallStatus]:
    """Statuses of equal requests over HTTP, each (retry count, idempotency key), one after the other."""
    session = serve("hi").open()
    url, key = f"{session.model.base_url}/chat/completions", session.model.api_key
    async with httpx.AsyncClient() as client:
        for retry, idempotency_key in requests:
            headers = {"api-key": key, "x-stainless-retry-count": retry}
            if idempotency_key:
                headers["idempotency-key"] = idempotency_key
            await client.post(url, headers=headers, json={"model": "toy", "messages": USER})
    return [call.status for call in session.close()]


USED, ABANDONED = CallStatus.USED, CallStatus.ABANDONED


def test_trap_27_an_idempotency_key_says_which_request_is_repeated(serve: Any) -> None:
    """Red when `Session._abandon_repeated` goes by the body alone: then all but the last are abandoned."""
    statuses = asyncio.run(told_apart(serve, ("0", "a"), ("0", "b"), ("0", "c"), ("1", "b")))
    assert statuses == [USED, ABANDONED, USED, USED]


def test_trap_27_where_it_cannot_be_told_none_is_trained(serve: Any) -> None:
    """Three equal requests, of which one is repeated though all were answered: only the repetition is known to be in
    the agent's hands. Red when the last one alone is taken for the repeated one."""
    statuses = asyncio.run(told_apart(serve, ("0", ""), ("0", ""), ("0", ""), ("1", "")))
    assert statuses == [ABANDONED, ABANDONED, ABANDONED, USED]


@pytest.mark.parametrize("transport", ["in-process", "http"])
def test_trap_27_of_equal_requests_at_once_the_one_that_timed_out_is_repeated(serve: Any, transport: str) -> None:
    """Eight equal requests (a vote); one of them gives up and tries again: the others are used. Red when
    `Session._abandon_repeated` takes the last one with an equal body, as it did: a used call is abandoned."""
    served = serve(lambda request: "hi")
    served.serving.call(served.engine.hold)
    session = served.open()

    async def main() -> None:
        client = session.model.client
        if transport == "http":
            client = openai.AsyncOpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)
        ask = client.chat.completions.create
        impatient = asyncio.create_task(ask(model="toy", messages=USER))
        await asyncio.to_thread(served.engine.waiting.acquire)
        patient = [asyncio.create_task(ask(model="toy", messages=USER)) for _ in range(7)]
        for _ in patient:
            await asyncio.to_thread(served.engine.waiting.acquire)
        impatient.cancel()
        await asyncio.wait([impatient])
        await asyncio.to_thread(eventually, lambda: served.engine.cancelled == 1)
        served.serving.call(served.engine.release)
        await asyncio.gather(*patient)
        await ask(model="toy", messages=USER, extra_headers={"x-stainless-retry-count": "1"})
        await client.close()

    asyncio.run(main())
    assert [call.status for call in session.close()] == [ABANDONED, *[USED] * 8]


def test_trap_27_the_clients_own_retry(serve: Any) -> None:
    """A client that times out and tries again: the first call is not trained. Red when a timeout does not abort."""
    served = held(serve)
    session = served.open()

    def release() -> None:
        served.engine.waiting.acquire()
        served.engine.waiting.acquire()
        served.serving.call(served.engine.release)

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    client = session.model.sync_client.with_options(max_retries=9, timeout=0.5)
    assert client.chat.completions.create(model="toy", messages=USER).choices[0].message.content == "hi"
    thread.join(120)
    *before, last = [call.status for call in session.close()]
    assert last == CallStatus.USED
    assert set(before) == {CallStatus.ABANDONED}


def test_closing_the_gateway_revokes_every_key(serve: Any) -> None:
    served = serve("hi")
    session = served.open()
    assert session.model.base_url
    served.serving.run(served.gateway.close())
    with pytest.raises(openai.AuthenticationError):
        session.model.sync_client.chat.completions.create(model="toy", messages=USER)


def test_a_synchronous_client_on_the_serving_loop_is_refused(serve: Any) -> None:
    served = serve("hi")
    session = served.open()

    async def wrong() -> None:
        session.model.sync_client.chat.completions.create(model="toy", messages=USER)

    with pytest.raises(RuntimeError, match="block the serving loop"):
        served.serving.run(wrong())


def test_unrecorded_sessions_keep_no_calls(serve: Any) -> None:
    session = serve("hi").open(record=False)
    session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    assert session.close() == ()
    assert session.metrics["num_calls"] == 1


def test_a_call_knows_when_it_began_also_if_it_is_cut_off(serve: Any) -> None:
    """Red when the sampler notes no start, or `Entry.call` knows no time of a call that is still running."""
    served = serve("yes")
    session, before = served.open("g/0"), time.time()
    session.model.sync_client.chat.completions.create(model="toy", messages=USER)
    served.engine.waiting.acquire()
    served.serving.call(served.engine.hold)
    waiting = threading.Thread(target=_ask_in_vain, args=(session,))
    waiting.start()
    served.engine.waiting.acquire()
    whole, cut = session.close()
    waiting.join()
    assert before <= whole.started <= whole.started + whole.seconds <= cut.started + cut.seconds <= time.time()
    assert (whole.status, cut.status) == (CallStatus.USED, CallStatus.ABANDONED)
    assert whole.seconds > 0
    assert cut.seconds > 0


def _ask_in_vain(session: Any) -> None:
    with pytest.raises(openai.APIError):
        session.model.sync_client.chat.completions.create(model="toy", messages=USER)
