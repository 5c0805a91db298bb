"""Tries a family of models by one of its checkpoints: what its row says, and what engine, trainer, adapters and the
writing of checkpoints make of it, against transformers' own forward pass.

In: a `Family`, a folder with a small checkpoint. Out: nothing, or an `AssertionError`. Shape suffixes: S sampled tokens
of a call, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.contracts import GenerateRequest, Generation
from sharpen.errors import SharpenError
from sharpen.models.pieces import Piece, pieces_of
from sharpen.models.table import Family, family_of, missing_of, needs_of
from sharpen.types import Experience, Sampling

if TYPE_CHECKING:
    import torch

MAX_MODEL_LEN = 128
_TOLERANCE = 2e-4


def check_family(family: Family, folder: Path) -> None:
    """Raise `AssertionError` if a checkpoint of `family` is not computed here as transformers computes it.

    `folder` holds a small model of the family in float32 (random weights will do, also of norms and biases), which
    `AutoConfig` and transformers' classes for models load. What the row says is missing in a part is not tried there. A
    mixture of experts is tried in the engine alone: without recorded experts, its logprobs depend on rounding.
    """
    assert isinstance(family, Family), f"a family is a Family, got {type(family).__name__}"
    from sharpen.models.configuration import read_config
    from sharpen.models.files import quiet_transformers

    quiet_transformers()
    with _told("reading the configuration"):
        config = read_config(folder)
    kind = config.model_type
    assert kind in family.types, (
        f"{folder} has the model type {kind!r}, which {family.name} does not name: {family.types}"
    )
    assert family_of(config).name == family.name, (
        f"{kind!r} is known as {family_of(config).name}, not as {family.name}: name it in `families`, or `bring` it"
    )
    shown = pieces_of(config) - family.needs
    assert not shown, (
        f"the configuration of {folder} shows {', '.join(sorted(shown))}, which `needs` of {family.name} lacks"
    )
    assert family.always <= family.needs, f"`always` of {family.name} is more than its `needs`"
    if missing_of(config, "engine"):
        return
    with _told("the embedded engine"):
        _check_engine(folder, config)
    if missing_of(config, "trainer"):
        return
    with _told("LoRA"):
        _check_adapters(folder, config)
    if Piece.EXPERTS not in needs_of(config):
        with _told("the trainer"):
            _check_trainer(folder, config)
    with _told("writing a checkpoint"):
        _check_written(folder, config)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say in which part of the check something was refused, or raised by the family's own code."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, SharpenError) else f"{type(error).__name__}: "
        raise AssertionError(f"{what}: {kind}{error}") from error


def _plain(folder: Path, config: Any) -> Any:
    """The model as transformers computes it."""
    import torch

    from sharpen.models.modules import class_for
    from sharpen.models.stand_ins import with_stand_ins

    settings = with_stand_ins(config)
    return (
        class_for(config).from_pretrained(folder, config=settings, dtype=torch.float32, trust_remote_code=False).eval()
    )


def _check_engine(folder: Path, config: Any) -> None:
    """What it samples has the logprobs of a plain forward pass, prompt by prompt and beside each other."""
    import torch

    from sharpen.engine.embedded.engine import EmbeddedEngine

    model = _plain(folder, config)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=MAX_MODEL_LEN, dtype="float32", device="cpu")
    prompts = [_ids(config, length, seed) for seed, length in enumerate((5, 30, 31))]

    async def sample() -> Sequence[Generation]:
        try:
            return await asyncio.gather(
                *(engine.generate(_request(prompt, seed)) for seed, prompt in enumerate(prompts))
            )
        finally:
            await engine.close()

    for prompt, found in zip(prompts, asyncio.run(sample()), strict=True):
        logits_TV = _logits(model, np.concatenate([prompt, found.ids]))[len(prompt) - 1 : -1]
        expected_S = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(found.ids.astype(np.int64))[:, None])[:, 0]
        gap = float((torch.from_numpy(found.logprobs) - expected_S).abs().max())
        assert gap <= _TOLERANCE, (
            f"the engine's logprobs after a prompt of {len(prompt)} tokens differ from transformers' by {gap:.2g}"
        )


def _request(prompt: Any, noise: int) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=8), noise=noise)


def _check_trainer(folder: Path, config: Any) -> None:
    """A packed tree of rollouts has the logprobs and gradients of sequences that are computed one by one."""
    import torch

    from sharpen.learning.trainer.model import TrainedModel
    from sharpen.learning.trainer.packing import pack
    from sharpen.models.modules import text_parameters

    sequences = _sequences(config)
    (packed,) = pack(sequences, 10_000, min_shared_tokens=1)
    policy = TrainedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    scored = policy.score(packed).logprobs_E
    torch.autograd.backward(scored.sum() / 100)
    model = _plain(folder, config)
    plain = torch.stack([_logprobs(model, one).sum() for one in sequences]).sum()
    torch.autograd.backward(plain / 100)
    gap = abs(scored.sum().item() - plain.item()) / len(scored)
    assert gap <= _TOLERANCE, f"the trainer's logprobs differ from transformers' by {gap:.2g} per token"
    expected = {name: parameter.grad for name, parameter in text_parameters(model) if parameter.grad is not None}
    found = {name: parameter.grad for name, parameter in policy.parameters() if name in expected}
    assert found.keys() == expected.keys(), f"the trainer does not train {sorted(expected.keys() - found.keys())[:5]}"
    for name, gradient in found.items():
        assert gradient is not None, f"the trainer gives {name} no gradient"
        scale = float(expected[name].abs().max())
        gap = float((gradient - expected[name]).abs().max())
        assert gap <= 2e-3 * scale + 1e-5, f"the trainer's gradient of {name} differs from transformers' by {gap:.2g}"


def _check_adapters(folder: Path, config: Any) -> None:
    """Adapters have no effect at first, and are those that an engine expects."""
    import torch

    from sharpen.config.trainer import LoraConfig
    from sharpen.learning.trainer.lora import AdaptedModel
    from sharpen.learning.trainer.model import TrainedModel, read_module
    from sharpen.learning.trainer.packing import pack
    from sharpen.models.adapters import adapter_shapes, check_adapters
    from sharpen.models.modules import skeleton

    (packed,) = pack(_sequences(config), 10_000, min_shared_tokens=1)
    lora, cpu = LoraConfig(rank=2, alpha=4), torch.device("cpu")
    with torch.no_grad():
        before = TrainedModel.load(folder, dtype="float32", device=cpu).score(packed).logprobs_E
        policy = AdaptedModel(read_module(folder, cpu), lora=lora, compute_dtype=torch.float32)
        gap = float((policy.score(packed).logprobs_E - before).abs().max())
    assert gap <= 1e-5, f"adapters that have learned nothing change logprobs by {gap:.2g}"
    policy.alone = True
    check_adapters(adapter_shapes(skeleton(config), lora), policy.state_tensors())


def _check_written(folder: Path, config: Any) -> None:
    """What is written has the names and shapes of what was read, and transformers loads it."""
    import torch
    from safetensors import safe_open

    from sharpen.learning.trainer.model import TrainedModel

    def shapes(place: Path) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in place.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    policy = TrainedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    tensors = {name: tensor.detach() for part in policy.checkpoint_parts() for name, tensor in part.items()}
    with tempfile.TemporaryDirectory() as name:
        written = Path(name)
        policy.write(written, policy.checkpoint_parts(most=1))  # layer by layer, as a large model
        before, after = shapes(folder), shapes(written)
        assert after == before, (
            f"a checkpoint is written with other tensors than it came: {sorted(before.items() ^ after.items())[:5]}"
        )
        again = _plain(written, config).state_dict()
        for one, tensor in tensors.items():
            assert again[one].equal(tensor), f"{one} is not what was written"


def _ids(config: Any, length: int, seed: int) -> Any:
    """Ids at random, none of the first, which are special in many vocabularies."""
    size = config.get_text_config(decoder=True).vocab_size
    return np.random.default_rng(seed).integers(3, size, length).astype(np.int32)


def _sequences(config: Any) -> list[Experience]:
    """Rollouts of two groups: all with the same beginning, those of a group with the same prompt, each with two calls
    and a reply of the environment between them."""
    sequences = []
    for group in range(2):
        prompt = np.concatenate([_ids(config, 10, 0), _ids(config, 5 + group, 1 + group)])
        for index in range(3):
            seed = 10 + 3 * group + index
            first, reply, second = (
                _ids(config, 6 + index, seed),
                _ids(config, 4, 2 * seed),
                _ids(config, 3 + group, seed),
            )
            ids_T = np.concatenate([prompt, first, reply, second])
            mask_T = np.zeros(len(ids_T), np.bool_)
            calls_T = np.full(len(ids_T), -1, np.int32)
            at = len(prompt)
            for call, (start, length) in enumerate(((at, len(first)), (at + len(first) + 4, len(second)))):
                mask_T[start : start + length] = True
                calls_T[start : start + length] = call
            sequences.append(
                Experience(
                    rollout_id=f"g{group}/{index}",
                    group_id=f"g{group}",
                    task_id=f"g{group}",
                    ids_T=ids_T,
                    loss_mask_T=mask_T,
                    logprobs_T=np.where(mask_T, np.float32(-1), np.float32(0)),
                    versions_T=np.where(mask_T, 0, -1).astype(np.int32),
                    calls_T=calls_T,
                    temperatures_T=np.ones(len(ids_T), np.float32),
                    advantages_T=mask_T.astype(np.float32),
                    weights_T=mask_T.astype(np.float32),
                )
            )
    return sequences


def _logits(model: Any, ids: Any) -> torch.Tensor:
    import torch

    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.float()


def _logprobs(model: Any, one: Experience) -> torch.Tensor:
    """The logprobs of the tokens with loss, from a forward pass over one sequence."""
    import torch

    ids_T = torch.from_numpy(one.ids_T.astype(np.int64))
    targets = np.flatnonzero(one.loss_mask_T)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
    found: torch.Tensor = logits_TV[targets - 1].log_softmax(-1)[torch.arange(len(targets)), ids_T[targets]]
    return found
