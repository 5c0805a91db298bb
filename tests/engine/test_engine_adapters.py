"""Adapters by name beside a model's own weights: rows of several in one step, each with the numbers of its own merged
model, no KV in common, and new weights for one while the others go on.

Tolerance of logprobs: 1e-4 in fp32, as everywhere else against transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_toys import make_hybrid
from toy_engines import make_engine, make_model, request, run_all, scored
from trainer_toys import VOCABULARY

from sharpen.config.trainer import LoraConfig
from sharpen.contracts import ORIGINAL, GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ModelError, SamplingError
from sharpen.models.adapter_files import NamedAdapter
from sharpen.models.adapters import PREFIX, LowRank, names_to_adapt

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: make_model("qwen2"),  # our own forward pass, with biases
    "gemma3": lambda: make_model("gemma3"),  # the model's own modules
    "qwen3_5_text": lambda: make_hybrid("qwen3_5_text"),
    "bamba": lambda: make_hybrid("bamba"),
}
RANKS = {"one": 2, "two": 5, "three": 3}
TARGETS = {"one": None, "two": ("q_proj", "up_proj"), "three": None}
"""Other ranks, and of one fewer layers."""


def adapter(name: str, model: Any, seed: int, size: float = 0.3) -> NamedAdapter:
    generator, layers = torch.Generator().manual_seed(seed), {}
    for layer in names_to_adapt(model, LoraConfig(target_modules=TARGETS.get(name))):
        module, rank = model.get_submodule(layer), RANKS[name]
        layers[layer] = LowRank(
            down_AC=torch.randn(rank, module.in_features, generator=generator) * size,
            up_OA=torch.randn(module.out_features, rank, generator=generator) * size,
            scale=2.0 / rank,
        )
    return NamedAdapter(name=name, folder=Path(name), base="", layers=layers)


def merged(model: Any, one: NamedAdapter | None) -> Any:
    """The model with W + scale x up down in place of W."""
    if one is not None:
        with torch.no_grad():
            for name, part in one.layers.items():
                model.get_submodule(name).weight += part.scale * (part.up_OA @ part.down_AC)
    return model


def tensors_of(one: NamedAdapter) -> dict[str, torch.Tensor]:
    named = {}
    for name, part in one.layers.items():
        named[f"{PREFIX}{name}.lora_A.weight"] = part.down_AC
        named[f"{PREFIX}{name}.lora_B.weight"] = part.up_OA
    return named


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids that every toy has, no special ones."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


class Served:
    """An engine with three adapters, and what each of its names must compute."""

    def __init__(self, family: str, **settings: Any) -> None:
        self.make = FAMILIES[family]
        self.adapters = [adapter(name, self.make(), seed) for seed, name in enumerate(RANKS)]
        self.references = {one.name: merged(self.make(), one) for one in self.adapters} | {"": self.make()}
        self.engine = make_engine(self.make(), **settings)
        self.engine.serve_beside(self.adapters)

    def worst(self, requests: Sequence[GenerateRequest], generations: Sequence[Generation]) -> float:
        """The largest difference of a logprob to the merged model's."""
        return max(
            float(
                (torch.tensor(generation.logprobs) - scored(self.references[one.adapter], ids, generation)).abs().max()
            )
            for one, generation in zip(requests, generations, strict=True)
            for ids in [one.prompt_ids.tolist()]
        )


def requests_of(prompt: Sequence[int], names: Sequence[str], **sampling: Any) -> list[GenerateRequest]:
    return [replace(request(prompt, noise=noise, **sampling), adapter=name) for noise, name in enumerate(names)]


NAMES = ("one", "", "two", "three", "one", "two", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_adapters_in_one_step_have_the_numbers_of_each_alone(family: str) -> None:
    """The same prompt for all, so that any KV or state in common would show; then their continuations. Red when rows
    take the mask of another row, and when `common_prefix` or snapshots do not ask for the adapter."""
    served = Served(family)
    served.engine._stepper.prompt_tokens_per_step = 50
    requests = requests_of(prompt_of(40, 4), NAMES, max_tokens=12)
    generations = run_all(served.engine, requests)
    assert served.worst(requests, generations) < 1e-4
    again = [
        replace(one, prompt_ids=np.array([*one.prompt_ids, *generation.ids, *prompt_of(3, 5)], np.int32))
        for one, generation in zip(requests, generations, strict=True)
    ]
    before = served.engine.stats.reused_tokens
    assert served.worst(again, run_all(served.engine, again)) < 1e-4
    assert served.engine.stats.reused_tokens > before, "its own KV is used again"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cached_of_one_adapter_is_not_used_for_another(family: str) -> None:
    served = Served(family)
    for name in ("one", "two", "", "three", "one"):
        requests = requests_of(prompt_of(60, 1), [name])
        assert served.worst(requests, run_all(served.engine, requests)) < 1e-4
    assert served.engine.stats.reused_tokens == 59 or served.engine._scheduler.states is not None
    assert 0 < served.engine.stats.reused_tokens < 60, "the last request alone, of the first one's"


def test_the_state_after_a_prompt_is_kept_for_its_own_adapter_alone() -> None:
    """One keeps the state after 39 ids; two has KV of these and later ones, but no state there. Red when a snapshot is
    found by its ids alone."""
    served = Served("qwen3_5_text")
    begin = prompt_of(40, 1)
    for name, prompt in (("one", begin), ("two", begin + prompt_of(20, 2)), ("two", begin[:39] + prompt_of(11, 3))):
        requests = requests_of(prompt, [name])
        assert served.worst(requests, run_all(served.engine, requests)) < 1e-4
    assert served.engine.stats.reused_tokens == 0


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_in_the_deterministic_mode_company_changes_no_bit(family: str) -> None:
    served = Served(family, deterministic=True)
    requests = requests_of(prompt_of(30, 2), NAMES, max_tokens=10)
    together = run_all(served.engine, requests)
    alone = [run_all(Served(family, deterministic=True).engine, [one])[0] for one in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
    assert served.worst(requests, together) < 1e-4


def test_columns_are_computed_as_rows_are() -> None:
    served = Served("qwen2")
    served.engine._stepper._forward._columns_faster = True  # type: ignore[attr-defined]
    requests = requests_of(prompt_of(9, 3), NAMES[:4], max_tokens=12)
    assert served.worst(requests, run_all(served.engine, requests)) < 1e-4


def test_an_adapter_that_no_request_names_costs_no_column() -> None:
    served = Served("qwen2")
    beside = served.engine._stepper.adapters
    assert beside is not None
    assert beside.span(np.array([0, 2, 2, 0])) == (2, 3)
    assert beside.span(np.array([0, 0])) == (0, 0)
    beside.lay_out(np.array([0, 0]), torch.device("cpu"))
    assert beside.rows is None
    beside.lay_out(np.array([2, 0]), torch.device("cpu"))
    columns = next(iter(beside._columns.values()))
    assert beside.rows is not None
    part = beside.rows.part(columns)
    assert part is not None
    assert part[1].shape == (2, part[0].stop - part[0].start)
    assert set(columns.adapter_A[part[0]].tolist()) == {2}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_new_weights_of_one_adapter_while_the_others_go_on(family: str) -> None:
    """Calls that run: those of the adapter have tokens of both versions, and its later tokens the new weights' numbers
    over the whole prefix; the others keep theirs. Red when its slots are not suspended, and when all versions move."""
    served = Served(family)
    old, new = served.references["one"], adapter("one", served.make(), 77)
    updated = merged(served.make(), new)
    requests = requests_of(prompt_of(30, 6), ("one", "two", ""), max_tokens=40)

    async def scenario() -> list[Generation]:
        loaded = asyncio.Event()
        seen: list[int] = []

        def note(ids: Sequence[int]) -> None:
            seen.extend(ids)
            if len(seen) == 5:
                loaded.set()

        calls = [asyncio.create_task(served.engine.generate(replace(one, on_tokens=note))) for one in requests]
        await loaded.wait()
        await served.engine.load_adapter("one", 3, tensors_of(new))
        return list(await asyncio.gather(*calls))

    changed, *others = asyncio.run(scenario())
    assert set(changed.versions.tolist()) == {0, 3}
    assert [set(one.versions.tolist()) for one in others] == [{0}, {0}]
    assert served.worst(requests[1:], others) < 1e-4
    first = int((changed.versions == 0).sum())
    prompt = requests[0].prompt_ids.tolist()
    got = torch.tensor(changed.logprobs)
    torch.testing.assert_close(got[:first], scored(old, prompt, changed)[:first], atol=1e-4, rtol=0)
    torch.testing.assert_close(got[first:], scored(updated, prompt, changed)[first:], atol=1e-4, rtol=0)
    served.references["one"] = updated
    later = requests_of(prompt_of(30, 6), ("one", "two"))
    assert served.worst(later, run_all(served.engine, later)) < 1e-4, "nothing of the old weights is cached"
    assert served.engine.version == 0


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_original_stays_beside_the_weights_that_are_trained(family: str) -> None:
    """Before any update both are the same. Then a call that names no adapter has the new weights and their version, one
    for the original the old ones and version 0, in one step. Red when `load` changes the model's own weights, and when
    a call without a name gets these."""
    make, one = FAMILIES[family], adapter("one", FAMILIES[family](), 9)
    engine, references = make_engine(make()), {"": merged(make(), one), ORIGINAL: make()}
    engine.train_beside(LoraConfig(rank=2, alpha=2))
    assert engine.takes_adapters
    assert not engine.shares_base
    requests = requests_of(prompt_of(40, 4), ("", ORIGINAL, "", ORIGINAL), max_tokens=12)

    def worst(generations: Sequence[Generation], models: Mapping[str, Any]) -> float:
        return max(
            float(
                (torch.tensor(got.logprobs) - scored(models[asked.adapter], asked.prompt_ids.tolist(), got)).abs().max()
            )
            for asked, got in zip(requests, generations, strict=True)
        )

    assert worst(run_all(engine, requests), {"": make(), ORIGINAL: make()}) < 1e-4
    asyncio.run(engine.load(3, tensors_of(one)))
    generations = run_all(engine, requests)
    assert worst(generations, references) < 1e-4
    assert [set(got.versions.tolist()) for got in generations] == [{3}, {0}, {3}, {0}]
    assert engine.version == 3


def test_a_snapshot_has_the_weights_of_an_earlier_version_and_is_renewed() -> None:
    """Renewed every two versions: beside the versions 0 to 5 it is of 0, 0, 0, 2, 2 and 4. Red when it gets the new
    weights in place of those that they replace, and when it has their version alone."""
    make = FAMILIES["qwen2"]
    engine, loaded = make_engine(make()), {0: make()}
    engine.train_beside(LoraConfig(rank=2, alpha=2), {"yesterday": 2})
    requests = requests_of(prompt_of(20, 4), ("", "yesterday"), max_tokens=6)
    versions = []
    for version in range(6):
        if version:
            weights = adapter("one", make(), 20 + version)
            loaded[version] = merged(make(), weights)
            asyncio.run(engine.load(version, tensors_of(weights)))
        generations = run_all(engine, requests)
        for asked, got in zip(requests, generations, strict=True):
            (sampled_by,) = set(got.versions.tolist())
            reference = scored(loaded[sampled_by], asked.prompt_ids.tolist(), got)
            assert float((torch.tensor(got.logprobs) - reference).abs().max()) < 1e-4
        versions.append(tuple(int(got.versions[0]) for got in generations))
    assert versions == [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4)]
    assert engine.adapter("yesterday")[0] == 4


def test_weights_that_do_not_fit_an_adapter_change_nothing() -> None:
    served = Served("qwen2")
    tensors = tensors_of(served.adapters[1])
    with pytest.raises(ModelError, match="do not match"):
        asyncio.run(served.engine.load_adapter("one", 1, tensors))
    with pytest.raises(ModelError, match=r"no adapter 'four'.*one, two, three"):
        asyncio.run(served.engine.load_adapter("four", 1, tensors))
    requests = requests_of(prompt_of(9, 3), NAMES[:4])
    assert served.worst(requests, run_all(served.engine, requests)) < 1e-4


def test_a_name_that_the_engine_does_not_have_is_refused() -> None:
    served, plain = Served("qwen2"), make_engine(make_model("qwen2"))
    unknown = requests_of(prompt_of(5, 0), ["four"])
    with pytest.raises(SamplingError, match=r"no adapter 'four'.*one, two, three"):
        run_all(served.engine, unknown)
    with pytest.raises(SamplingError, match="none by name"):
        run_all(plain, unknown)


def test_base_weights_that_change_reach_every_adapter() -> None:
    served = Served("qwen2")
    torch.manual_seed(5)
    weights: Mapping[str, torch.Tensor] = {
        name: tensor + torch.randn_like(tensor) * 0.01 for name, tensor in served.make().named_parameters()
    }
    asyncio.run(served.engine.load(2, {name: tensor.detach() for name, tensor in weights.items()}))
    for one in (None, *served.adapters):
        model = served.make()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        served.references["" if one is None else one.name] = merged(model, one)
    requests = requests_of(prompt_of(20, 4), NAMES)
    generations = run_all(served.engine, requests)
    assert served.worst(requests, generations) < 1e-4
    assert isinstance(served.engine, EmbeddedEngine)
