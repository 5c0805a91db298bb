"""Tries an engine against plain forward passes of the same model: what it samples, with which logprobs and versions,
before, while and after new weights come, and how its requests end.

In: what starts the engine, a folder with a small Hugging Face model and its tokenizer. Out: nothing, or an
`AssertionError`. Shape suffixes: S sampled tokens of a request, V vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.contracts import Engine, EngineSettings, GenerateRequest, Generation, StartEngine
from sharpen.errors import ContextOverflowError, EngineError, ModelError, SamplingError
from sharpen.types import Constraint, Sampling

if TYPE_CHECKING:
    import torch

MAX_MODEL_LEN, MAX_SLOTS = 96, 3
LENGTHS = (1, 3, 17, 40, 41)
"""Lengths of prompts; the last one begins like the one before."""


def check_engine(
    start: StartEngine, folder: Path, *, tolerance: float = 1e-4, device: str = "cpu", limit_s: float = 300.0
) -> None:
    """Raise `AssertionError` if what `start` gives does not keep the contract of `Engine`.

    `folder` holds a small model in float32 with its tokenizer; random weights will do. `tolerance`: how far a logprob
    may be from that of a plain forward pass on `device`; `limit_s`: how long a part of the check may take, of which the
    message then tells. The engine is started twice, one after the other. Tried are its logprobs at every kind of
    sampling, its noise, loads, cancelled requests, stop strings, limits, and what it must refuse.
    """
    asyncio.run(_check(start, _Plain.of(folder, tolerance, device), folder, device, limit_s))


async def _check(start: StartEngine, plain: _Plain, folder: Path, device: str, limit_s: float) -> None:
    settings = EngineSettings(
        folder=folder,
        tokenizer=plain.tokenizer,
        max_model_len=MAX_MODEL_LEN,
        device=device,
        dtype="float32",
        max_slots=MAX_SLOTS,
        kv_cache_mb=None,
        tensor_parallel_size=1,
        alone=True,
    )
    engine = await start(settings)
    try:
        assert engine.version == 0, f"version is {engine.version} before any weights were loaded: it must be 0"
        assert engine.max_model_len == MAX_MODEL_LEN, (
            f"max_model_len is {engine.max_model_len}, and {MAX_MODEL_LEN} was asked for"
        )
        for check in CHECKS:
            await _within(limit_s, check, check(engine, plain))
    finally:
        await engine.close()
    await _within(limit_s, _check_closed, _check_closed(await start(settings)))


async def _within(limit_s: float, check: Callable[..., Any], call: Coroutine[Any, Any, None]) -> None:
    try:
        await asyncio.wait_for(call, limit_s)
    except TimeoutError:
        raise AssertionError(f"after {limit_s:g} s this had not ended: {check.__doc__}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """The model as transformers computes it, a whole sequence at once: with the weights of the folder, and with the
    `others` that the engine gets later."""

    tokenizer: Any
    model: Any
    others: Mapping[str, torch.Tensor]
    later: Any
    end_ids: frozenset[int]
    tolerance: float

    @classmethod
    def of(cls, folder: Path, tolerance: float, device: str) -> _Plain:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, later = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
            .to(device)
            .eval()
            for _ in range(2)
        )
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in later.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(device)
                parameter.add_(noise * 0.5 * parameter.abs().mean())
        ends = model.generation_config.eos_token_id
        return cls(
            tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
            model=model,
            others={name: parameter.detach().clone() for name, parameter in later.named_parameters()},
            later=later,
            end_ids=frozenset([] if ends is None else ends if isinstance(ends, list) else [ends]),
            tolerance=tolerance,
        )

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Ids that are none of the special ones."""
        special = {*self.tokenizer.all_special_ids, *self.end_ids}
        usual = [id_ for id_ in range(min(self.vocab_size, len(self.tokenizer))) if id_ not in special]
        return [int(id_) for id_ in np.random.default_rng(seed).choice(usual, length)]

    def logits_SV(self, prompt: Sequence[int], found: Generation, *, later: bool) -> Any:
        """The logits from which each token was sampled."""
        import torch

        ids = torch.tensor([[*prompt, *found.ids.tolist()]], device=self.model.device)
        with torch.no_grad():
            logits = (self.later if later else self.model)(input_ids=ids, use_cache=False).logits[0].float().cpu()
        return logits[len(prompt) - 1 : -1]

    def logprobs_S(self, prompt: Sequence[int], found: Generation, sampling: Sampling, *, later: bool) -> Any:
        """The logprobs of the sampled tokens, of the distribution that they were drawn from (greedy ones: of the plain
        softmax); minus infinity for a token that top-p, top-k or min-p leaves out."""
        import torch

        logits_SV = self.logits_SV(prompt, found, later=later) / (sampling.temperature or 1.0)
        if sampling.temperature:
            order = logits_SV.argsort(dim=-1, descending=True)
            ranks_SV = order.argsort(dim=-1)
            sorted_SV = logits_SV.gather(1, order)
            sorted_SV[sorted_SV < sorted_SV[:, :1] + math.log(sampling.min_p or 1e-300)] = -torch.inf
            if sampling.top_k:
                sorted_SV[:, sampling.top_k :] = -torch.inf
            mass_SV = torch.softmax(sorted_SV, -1)
            sorted_SV[mass_SV.cumsum(-1) - mass_SV >= sampling.top_p] = -torch.inf
            logits_SV = sorted_SV.gather(1, ranks_SV)
        return (
            torch.log_softmax(logits_SV, -1).gather(1, torch.tensor(found.ids.astype(np.int64))[:, None])[:, 0].numpy()
        )


def _request(prompt: Sequence[int], *, noise: int = 0, top_logprobs: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        noise=noise,
        top_logprobs=top_logprobs,
    )


async def _all(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """Answers to requests that are made at once."""
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def _check_form(plain: _Plain, request: GenerateRequest, found: Generation, versions: Sequence[int]) -> None:
    """Check what every answer has: arrays of one length, a reason, an end token at the end alone."""
    count = len(found.ids)
    for name, kind in (("ids", np.int32), ("logprobs", np.float32), ("versions", np.int32)):
        array = getattr(found, name)
        assert isinstance(array, np.ndarray), f"{name} is no array: {array!r}"
        assert array.dtype == kind, f"{name} is an array of {array.dtype}: it must be of {kind.__name__}"
        assert array.shape == (count,), f"{name} has the shape {array.shape}, and there are {count} sampled ids"
    room = min(request.sampling.max_tokens, MAX_MODEL_LEN - len(request.prompt_ids))
    assert 1 <= count <= room, f"{count} tokens were sampled, and at most {room} may be"
    assert set(found.versions.tolist()) <= {*versions}, f"tokens of version {versions} say {found.versions.tolist()}"
    ends = [at for at, id_ in enumerate(found.ids.tolist()) if id_ in plain.end_ids]
    assert ends in ([], [count - 1]), f"an end token stands at {ends} of {count} sampled ids: it must be the last"
    if ends:
        assert found.finish_reason == "stop", (
            f"the last id is an end token, but finish_reason is {found.finish_reason!r}"
        )
    elif found.text is None:
        assert (found.finish_reason, count) == ("length", room), (
            f"{count} of {room} tokens, without an end token or a stop string, finished with {found.finish_reason!r}"
        )


def _check_close(plain: _Plain, found: Any, expected: Any, what: str) -> None:
    apart = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    assert np.all(apart <= plain.tolerance), (
        f"{what}: the logprobs {np.round(found, 5).tolist()} are not those of a plain forward pass, "
        f"{np.round(expected, 5).tolist()} (apart by {np.max(apart):.2g}, more than {plain.tolerance:g})"
    )


async def _check_logprobs(engine: Engine, plain: _Plain) -> None:
    """Ragged requests at once, then once more with what they sampled in the prompt; every kind of sampling."""
    version = engine.version
    prompts = [plain.prompt(length, seed=length // 10) for length in LENGTHS]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.2},
    ]
    for turn in range(2):
        requests = [
            _request(prompt, noise=100 * turn + at, **kinds[(at + turn) % len(kinds)])
            for at, prompt in enumerate(prompts)
        ]
        answers = await _all(engine, requests)
        for request, found in zip(requests, answers, strict=True):
            _check_form(plain, request, found, [version])
            prompt = request.prompt_ids.tolist()
            what = f"{request.sampling} after {len(prompt)} ids, version {version}"
            expected = plain.logprobs_S(prompt, found, request.sampling, later=version > 0)
            _check_close(plain, found.logprobs, expected, what)
            if request.sampling.temperature == 0.0:
                best = plain.logits_SV(prompt, found, later=version > 0)
                chosen = best[np.arange(len(found.ids)), found.ids.astype(np.int64)]
                assert np.all((best.max(-1).values - chosen).numpy() <= plain.tolerance), (
                    f"{what}: greedy tokens {found.ids.tolist()} are not the likeliest"
                )
        prompts = [[*prompt, *found.ids.tolist(), 5] for prompt, found in zip(prompts, answers, strict=True)]


async def _check_noise(engine: Engine, plain: _Plain) -> None:
    """The token at a position is a function of weights, prompt, noise and position alone."""
    prompt = plain.prompt(6)
    alone = [(await _all(engine, [_request(prompt, noise=noise)]))[0].ids.tolist() for noise in range(6)]
    together = await _all(engine, [_request(prompt, noise=noise) for noise in reversed(range(6))])
    for noise, found in zip(reversed(range(6)), together, strict=True):
        assert found.ids.tolist() == alone[noise], (
            f"noise {noise} sampled {alone[noise]} alone, and {found.ids.tolist()} beside other requests"
        )
    assert len({tuple(ids) for ids in alone}) > 1, f"six different `noise` all sampled {alone[0]}"
    (short,) = await _all(engine, [_request(prompt, noise=0, max_tokens=3)])
    assert short.ids.tolist() == alone[0][:3], (
        f"noise 0 sampled {alone[0]}, and with max_tokens 3 {short.ids.tolist()}: not its beginning"
    )


async def _check_alternatives(engine: Engine, plain: _Plain) -> None:
    prompt = plain.prompt(12)
    (found,) = await _all(engine, [_request(prompt, top_logprobs=4, max_tokens=5)])
    assert len(found.top_logprobs) == len(found.ids), (
        f"top_logprobs of {len(found.top_logprobs)} positions came with {len(found.ids)} ids"
    )
    best = plain.logits_SV(prompt, found, later=False).log_softmax(-1).topk(4)
    for pairs, logprobs in zip(found.top_logprobs, best.values.tolist(), strict=True):
        _check_close(plain, [logprob for _, logprob in pairs], logprobs, "top_logprobs, the likeliest first")
    (none,) = await _all(engine, [_request(prompt)])
    assert none.top_logprobs == (), "top_logprobs came without being asked for"


async def _check_stop_strings(engine: Engine, plain: _Plain) -> None:
    """A stop string ends the answer at the token that completes it; `text` is what stands before."""
    prompt, ended = plain.prompt(6), 0
    for noise in range(12):
        (free,) = await _all(engine, [_request(prompt, noise=noise, max_tokens=12)])
        ids = [id_ for id_ in free.ids.tolist() if id_ not in plain.end_ids]
        text = plain.tokenizer.decode(ids)
        stop = text[len(text) // 2 :][:1]
        if not stop.strip() or not stop.isascii():
            continue
        ended += 1
        told: list[int] = []
        request = _request(prompt, noise=noise, max_tokens=12, stop=(stop, "never written \u2603"))
        request = GenerateRequest(
            prompt_ids=request.prompt_ids, sampling=request.sampling, noise=noise, on_tokens=told.extend
        )
        (found,) = await _all(engine, [request])
        assert found.finish_reason == "stop", f"the stop string {stop!r} was sampled, but it is {found.finish_reason!r}"
        assert found.text == text[: text.find(stop)], (
            f"text before the stop string {stop!r} of {text!r} is {found.text!r}"
        )
        count = len(found.ids)
        assert found.ids.tolist() == free.ids.tolist()[:count], "other ids were sampled because of a stop string"
        assert stop in plain.tokenizer.decode(found.ids.tolist()), f"the ids end before the stop string {stop!r}"
        assert stop not in plain.tokenizer.decode(found.ids.tolist()[:-1]), f"ids follow the stop string {stop!r}"
        assert told == found.ids.tolist()[: len(told)], f"on_tokens was told {told}, sampled was {found.ids.tolist()}"
        assert len(told) >= count - 1, f"on_tokens was told {len(told)} ids of {count}: only the last may be missing"
        assert free.text is None, "text is set without a stop string"
    assert ended, "no text of this model could be used as a stop string: try a model with another vocabulary"


async def _check_limits(engine: Engine, plain: _Plain) -> None:
    """The context is kept: what fits is sampled, what does not is refused."""
    try:
        await _all(engine, [_request(plain.prompt(MAX_MODEL_LEN))])
    except ContextOverflowError:
        pass
    else:
        raise AssertionError(f"a prompt of {MAX_MODEL_LEN} ids, the whole context, was not refused")
    (last,) = await _all(engine, [_request(plain.prompt(MAX_MODEL_LEN - 1), max_tokens=50)])
    assert len(last.ids) == 1, f"{len(last.ids)} tokens were sampled where one had room"


async def _check_cancelling(engine: Engine, plain: _Plain) -> None:
    """Cancelled requests, running and waiting, leave their places to others and change none of them."""
    prompt, other = plain.prompt(3, seed=1), _request(plain.prompt(3, seed=2), noise=9)
    (expected,) = await _all(engine, [other])
    begun = asyncio.Event()
    for _ in range(2 * MAX_SLOTS):
        begun.clear()
        request = GenerateRequest(
            prompt_ids=np.asarray(prompt, np.int32),
            sampling=Sampling(max_tokens=MAX_MODEL_LEN),
            noise=1,
            on_tokens=lambda _: begun.set(),
        )
        running = [asyncio.ensure_future(engine.generate(request)) for _ in range(MAX_SLOTS)]
        waiting = asyncio.ensure_future(engine.generate(request))
        await begun.wait()
        for task in (*running, waiting):
            task.cancel()
        ended = await _ended([*running, waiting])
        wrong = [one for one in ended if not isinstance(one, asyncio.CancelledError | Generation)]
        assert not wrong, f"a cancelled request ended with {wrong[0]!r}"
    (after,) = await _all(engine, [other])
    assert after.ids.tolist() == expected.ids.tolist(), "after requests were cancelled, others are sampled differently"


async def _ended(tasks: Sequence[asyncio.Future[Generation]]) -> list[Any]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))


async def _check_refusals(engine: Engine, plain: _Plain) -> None:
    """A request that is no request is refused, and fails no other one."""
    bad = {
        "an empty prompt": _request([]),
        "an id beyond the vocabulary": _request([plain.vocab_size]),
        "temperature -1": _request([5], temperature=-1.0),
        "top_p 0": _request([5], top_p=0.0),
        "min_p 2": _request([5], min_p=2.0),
        "max_tokens 0": _request([5], max_tokens=0),
        "an empty stop string": _request([5], stop=("",)),
    }
    for what, request in bad.items():
        beside = asyncio.ensure_future(engine.generate(_request([5, 6])))
        (found,) = await _ended([asyncio.ensure_future(engine.generate(request))])
        assert isinstance(found, SamplingError), f"{what} is refused by a SamplingError, and here it gave {found!r}"
        await _ended([beside])
        assert beside.exception() is None, f"{what} made another request fail: {beside.exception()!r}"


async def _check_constraint(engine: Engine, plain: _Plain) -> None:
    """A constraint is kept, or refused: it is never left out in silence."""
    request = GenerateRequest(
        prompt_ids=np.asarray(plain.prompt(5), np.int32),
        sampling=Sampling(max_tokens=8),
        noise=3,
        constraint=Constraint(grammar='start: "yes" | "no"', origin="response_format"),
    )
    try:
        (found,) = await _all(engine, [request])
    except SamplingError:
        return
    text = plain.tokenizer.decode([id_ for id_ in found.ids.tolist() if id_ not in plain.end_ids])
    assert text in ("yes", "no"), f"constrained to yes or no, {text!r} was sampled"
    assert np.all(found.logprobs <= plain.tolerance), f"logprobs above 0: {found.logprobs.tolist()}"


async def _check_load(engine: Engine, plain: _Plain) -> None:
    """New weights come while requests run: each token is of the version that it says, with no memory of older ones."""
    told: list[int] = []
    prompts = [plain.prompt(length, seed=length) for length in (4, 20, 33)]
    requests = [
        GenerateRequest(
            prompt_ids=np.asarray(prompt, np.int32), sampling=Sampling(max_tokens=60), noise=at, on_tokens=told.extend
        )
        for at, prompt in enumerate(prompts)
    ]
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    while len(told) < 12 and not all(task.done() for task in tasks):
        await asyncio.sleep(0)
    await engine.load(7, plain.others)
    assert engine.version == 7, f"version is {engine.version} after version 7 was loaded"
    both = 0
    for request, found in zip(requests, await _ended(tasks), strict=True):
        assert isinstance(found, Generation), f"a request that ran while weights were loaded ended with {found!r}"
        _check_form(plain, request, found, [0, 7])
        versions = found.versions.tolist()
        assert versions == sorted(versions), f"versions go back: {versions}"
        both += len(set(versions)) == 2
        prompt = request.prompt_ids.tolist()
        old, new = (plain.logprobs_S(prompt, found, request.sampling, later=later) for later in (False, True))
        what = f"a request of versions {versions} (a token after a load may use nothing computed by older weights)"
        _check_close(plain, found.logprobs, np.where(found.versions == 7, new, old), what)
    part = dict(list(plain.others.items())[1:])
    try:
        await engine.load(8, part)
    except ModelError:
        assert engine.version == 7, f"version is {engine.version} after weights were refused: nothing may change"
    else:
        raise AssertionError(f"weights without {next(iter(plain.others))!r} were loaded: a ModelError must refuse them")
    assert both, "no request ran on while weights were loaded: load waits for them to end, or on_tokens is not called"


async def _check_closed(engine: Engine) -> None:
    """Close ends what runs; after it nothing is served, and closing again does nothing."""
    begun = asyncio.Event()
    request = GenerateRequest(
        prompt_ids=np.asarray([5], np.int32), sampling=Sampling(max_tokens=90), noise=1, on_tokens=lambda _: begun.set()
    )
    running = asyncio.ensure_future(engine.generate(request))
    await begun.wait()
    await engine.close()
    await engine.close()
    for what, task in (
        ("a request that ran while the engine was closed", running),
        ("a closed engine", asyncio.ensure_future(engine.generate(_request([5])))),
    ):
        (found,) = await _ended([task])
        assert isinstance(found, EngineError), f"{what} ends with an EngineError, and here it gave {found!r}"


CHECKS = (
    _check_logprobs,
    _check_noise,
    _check_alternatives,
    _check_stop_strings,
    _check_limits,
    _check_cancelling,
    _check_refusals,
    _check_constraint,
    _check_load,
    _check_logprobs,  # once more, with the new weights
)
