"""Writes a model as its checkpoint came: trained tensors new, all others byte for byte.

In: a module with the folder that it was loaded from, and its tensors by name, some at a time. Out: weights and
configuration in a folder, under the names of the source's files, so that whatever loaded the source loads this. Towers,
and tensors that transformers does not load (heads for several tokens), are copied, in their own dtype.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from sharpen.models.modules import has_towers, text_prefixes, trained_parameters

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG = "config.json"
SHARD_BYTES = 10**9
"""The most bytes that are held while a model is written, and those of a file; but a layer is never divided."""
_LAYER = re.compile(r"(.*?\.\d+)\.")


def in_parts(
    module: Any, tensors: Iterable[tuple[str, torch.Tensor]], most: int = SHARD_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a model's tensors into the parts in which `write_checkpoint` takes them, each made when it is asked for: of
    at most so many bytes, but of whole layers, since transformers stores the experts of one in another way; or one of
    all, if there are towers. A parameter with two names is in one part alone, by the first."""
    part: dict[str, torch.Tensor] = {}
    size, layer, divides = 0, "", not has_towers(module.config)
    earlier: set[int] = set()
    for name, tensor in tensors:
        found = _LAYER.match(name)
        before, layer = layer, found[1] if found else ""
        if divides and part and size + tensor.nbytes > most and not (layer and layer == before):
            earlier |= {id(one) for one in part.values() if isinstance(one, torch.nn.Parameter)}
            yield part
            part, size = {}, 0
        if id(tensor) not in earlier:
            part[name] = tensor
            size += tensor.nbytes
    if part:
        yield part


def write_checkpoint(
    directory: Path, module: Any, parts: Iterable[dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write what is trained (the text, maybe a tower) in `dtype`, the others as they are in the folder that `module`
    was loaded from, and the configuration. Without such a folder, or if its tensors have other names than transformers
    writes, all tensors of the module are written. `parts` are those of `in_parts`, gathered; each is emptied when it is
    written, before the next one is asked for."""
    source = Path(module.config._name_or_path)
    before = tensor_files(source)
    names = {name for name, _ in trained_parameters(module)}
    prefixes = text_prefixes(module)
    written: dict[str, Path] = {}
    for number, tensors in enumerate(parts):
        trained = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes) or name in names}
        _save(directory, module, trained, dtype)
        if has_towers(module.config) and not tensor_files(directory).keys() <= before.keys():
            _save(directory, module, tensors, dtype)
        written |= _set_aside(directory, number)
        tensors.clear()
        trained.clear()
    files: dict[Path, list[str]] = {}
    for name, file in written.items():
        files.setdefault(file, []).append(name)
    if written.keys() <= before.keys():
        files |= _copies(directory, _untouched(before, written, module))
    _name_files(directory, files)
    keep_config = has_towers(module.config) and (source / _CONFIG).is_file()
    _write_config(source / _CONFIG if keep_config else directory / _CONFIG, directory, dtype)


def published(module: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names and in the shapes of the family's published checkpoints: experts one by one, where
    transformers holds all of a layer in one tensor. `module` may be a skeleton."""
    named: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(tensors))
    return named


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model; nothing if it has no safetensors files under the usual names."""
    if (folder / _FILE).is_file():
        with safe_open(folder / _FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / _FILE)
    if (folder / _INDEX).is_file():
        names = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    return {}


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Return a tensor of a safetensors file, by its name there. The file is closed again: all that was read of one that
    stays open, mapped, counts as memory of the process. Raises `OSError`, or safetensors' error."""
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name).clone()  # type: ignore[no-any-return]


def stored_types(folder: Path) -> set[str]:
    """Return the types of the tensors in the files of a checkpoint, as safetensors calls them (`BF16`); nothing if it
    has no such files under the usual names."""
    files = tensor_files(folder)
    found = set()
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def _save(directory: Path, module: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write tensors under the names that transformers writes."""
    cast: dict[int, torch.Tensor] = {}  # tied weights must stay one tensor to be written once
    state_dict = {
        name: cast.setdefault(tensor.data_ptr(), tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in tensors.items()
    }
    module.save_pretrained(directory, state_dict=state_dict)


def _untouched(before: Mapping[str, Path], written: Collection[str], module: Any) -> dict[str, Path]:
    """Return the source's tensors that were not written: none of a written layer (scales of a quantized source), nor an
    output layer that is the embedding."""
    layers = {name.rpartition(".")[0] for name in written}
    others = {name: file for name, file in before.items() if name.rpartition(".")[0] not in layers}
    head = module.get_output_embeddings()
    if head.weight is not module.get_input_embeddings().weight:
        return others
    tied = next(name for name, part in module.named_modules() if part is head).rpartition(".")[2]
    return {name: file for name, file in others.items() if not f".{name}".endswith(f".{tied}.weight")}


def _set_aside(directory: Path, number: int) -> dict[str, Path]:
    """Rename the files that transformers has written, so that the next ones do not replace them. Return the file of
    each tensor."""
    found = tensor_files(directory)
    renamed = {file: file.rename(file.with_name(f"written-{number}-{file.name}")) for file in set(found.values())}
    (directory / _INDEX).unlink(missing_ok=True)
    return {name: renamed[file] for name, file in found.items()}


def _copies(directory: Path, others: Mapping[str, Path]) -> dict[Path, list[str]]:
    """Write copies of tensors in files of their own. Return the names in each."""
    names: dict[Path, list[str]] = {}
    group: dict[str, torch.Tensor] = {}
    for name in sorted(others):
        with safe_open(others[name], framework="pt") as file:
            group[name] = file.get_tensor(name)
        if name == max(others) or sum(tensor.nbytes for tensor in group.values()) >= SHARD_BYTES:
            added = directory / f"copied-{len(names)}.safetensors"
            save_file(group, added, metadata={"format": "pt"})
            names[added] = [*group]
            group = {}
    return names


def _name_files(directory: Path, files: Mapping[Path, list[str]]) -> None:
    """Give a model's files the names by which it is loaded, with an index of the tensors in each if there are
    several."""
    if len(files) == 1:
        next(iter(files)).rename(directory / _FILE)
        return
    weight_map = {}
    for number, (file, held) in enumerate(files.items(), start=1):
        shard = file.rename(directory / f"model-{number:05}-of-{len(files):05}.safetensors")
        weight_map.update(dict.fromkeys(held, shard.name))
    size = sum((directory / shard).stat().st_size for shard in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write a configuration into `directory`, with the dtype of the written weights."""
    config = json.loads(source.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    if "dtype" in config.get("text_config", {}):
        config["text_config"]["dtype"] = config["dtype"]
    config.pop("torch_dtype", None)  # the name before transformers 5
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
