"""Auxiliary models served here, on tiny real engines: own tokenizer, context and sampling; counted; never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from sharpen.errors import ConfigError, ModelError
from sharpen.placement.auxiliary.settings import check_auxiliary_models


async def ask(model: Any, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return await model.client.chat.completions.create(model=model.name, messages=messages, **options)


def test_own_context_sampling_and_noise(make_config: Any, open_models: Any, toy_model_dir: Path) -> None:
    config = make_config(
        greedy={"model_path": str(toy_model_dir), "max_model_len": 40, "temperature": 0.0, "max_tokens": 5},
        noisy={"model_path": str(toy_model_dir), "max_model_len": 64, "max_tokens": 16},
    )
    models = open_models(config)
    sessions = [models.open(f"g/{n}", n) for n in range(2)]

    async def texts(name: str) -> list[str]:
        replies = [await ask(session.auxiliary_models[name], "hi") for session in sessions]
        return [reply.choices[0].message.content for reply in replies]

    greedy = asyncio.run(texts("greedy"))
    assert greedy[0] == greedy[1]
    noisy = asyncio.run(texts("noisy"))
    assert noisy[0] != noisy[1]
    again = models.open("g/0", 0)
    assert asyncio.run(ask(again.auxiliary_models["noisy"], "hi")).choices[0].message.content == noisy[0]
    with pytest.raises(openai.BadRequestError) as caught:
        asyncio.run(ask(sessions[0].auxiliary_models["greedy"], "question " * 30))
    assert caught.value.code == "context_length_exceeded"
    assert sessions[0].auxiliary_failure is None  # the judge's prompt was too long: nobody's failure
    for session in (*sessions, again):
        session.end()


def test_interleaved_rollouts_are_counted_each_on_its_own(
    make_config: Any, open_models: Any, toy_model_dir: Path
) -> None:
    """Trap 26 for tokens: the counts are those of the responses that the rollout received itself."""
    models = open_models(make_config(judge={"model_path": str(toy_model_dir), "max_tokens": 12}))
    sessions = [models.open(f"g/{n}", n) for n in range(24)]

    async def use(n: int) -> int:
        used = 0
        for call in range(n % 3):
            reply = await ask(sessions[n].auxiliary_models["judge"], "x" * (n % 5 + call + 1))
            used += reply.usage.total_tokens
        return used

    async def all_of_them() -> list[int]:
        return list(await asyncio.gather(*(use(n) for n in range(24))))

    used = asyncio.run(all_of_them())
    for n, session in enumerate(sessions):
        assert session.counts == {"auxiliary/judge/calls": float(n % 3), "auxiliary/judge/tokens": float(used[n])}
        session.end()
    assert models.auxiliary.total_tokens == {"judge": sum(used)}
    assert len(set(used)) > 5


def test_the_cap_and_the_end(make_config: Any, open_models: Any, toy_model_dir: Path) -> None:
    models = open_models(make_config(judge={"model_path": str(toy_model_dir), "max_tokens": 4, "max_total_tokens": 30}))
    models.auxiliary.restore({"judge": 29, "a model of an earlier session": 5})
    session = models.open("g/0", 1)
    judge = session.auxiliary_models["judge"]
    used = asyncio.run(ask(judge, "hi")).usage.total_tokens
    with pytest.raises(openai.PermissionDeniedError) as caught:
        asyncio.run(ask(judge, "hi"))
    assert caught.value.code == "token_cap_reached"
    assert f"has used {29 + used} tokens" in str(session.exhausted)
    session.end()
    with pytest.raises(openai.AuthenticationError):
        asyncio.run(ask(judge, "hi"))


BAD = [
    ({"base_url": "host/v1"}, ConfigError, "base_url is 'host/v1': it must be an address like https://host/v1"),
    ({"base_url": "ftp://host"}, ConfigError, "it must be an address like"),
    ({"base_url": "https://host/v1/chat/completions"}, ConfigError, "leave the method out"),
    ({"base_url": "https://host/v1", "api_key_env": "NO_SUCH_KEY"}, ConfigError, "NO_SUCH_KEY, which is not set"),
    ({"base_url": "https://host/v1", "tool_call_parser": None}, ConfigError, "tool_call_parser has no effect"),
    ({"model_path": "./nowhere"}, ModelError, "./nowhere"),
    ({"model_path": "./nowhere", "api_key_env": "KEY"}, ConfigError, "api_key_env belongs to an endpoint"),
]


@pytest.mark.parametrize(("settings", "kind", "words"), BAD, ids=[words for _, _, words in BAD])
def test_what_can_be_checked_before_anything_is_loaded(make_config: Any, settings: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind) as caught:
        check_auxiliary_models(make_config(judge=settings).auxiliary_models)
    assert words in str(caught.value)
    assert "judge" in str(caught.value) or kind is ModelError


def test_a_good_one_passes(make_config: Any, toy_model_dir: Path) -> None:
    check_auxiliary_models(
        make_config(
            judge={"model_path": str(toy_model_dir)}, other={"base_url": "http://localhost:8000/v1/"}
        ).auxiliary_models
    )
