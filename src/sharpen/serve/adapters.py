"""The adapters that a server has beside its model, each by a name that clients ask for.

In: `NAME=PATH`s, the model that is served. Out: `NamedAdapter`s that fit it; the line that says what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sharpen.errors import ConfigError, ModelError
from sharpen.learning.trainer.lora import FOLDER
from sharpen.models.adapter_files import CONFIG, NamedAdapter, check_fit, read_adapter
from sharpen.models.configuration import read_config
from sharpen.models.modules import skeleton


def adapter_folder(path: str, checkpoint: Path) -> Path:
    """Return the folder of adapters in peft's format: in the `checkpoint` that was found at `path`, or that itself.
    Raises `ModelError` if there are none."""
    for folder in (checkpoint, checkpoint / FOLDER):
        if (folder / CONFIG).is_file():
            return folder
    raise ModelError(
        f"{path} has no adapters: neither {CONFIG} nor {FOLDER}/{CONFIG} is in {checkpoint}. Give a run or a "
        "checkpoint that was trained with trainer.lora, or a folder that peft wrote"
    )


def read_adapters(folders: Sequence[tuple[str, Path]], base: str) -> list[NamedAdapter]:
    """Read adapters, each by its name; `base` is the name of the model. Raises `ConfigError` for a name that is not one
    adapter's alone, `ModelError` for files that are no adapter."""
    names = [base, *(name for name, _ in folders)]
    if taken := sorted({name for name in names if names.count(name) > 1}):
        owner = "the model's own name (--name gives it another)" if taken[0] == base else "given twice"
        raise ConfigError(f"--adapter {taken[0]}=…: the name is {owner}; each must be one adapter's alone")
    return [read_adapter(name, folder) for name, folder in folders]


def check_adapters(adapters: Sequence[NamedAdapter], folder: Path, given: str, engine: str) -> None:
    """Check that the `engine` serves adapters, and that they fit the model in `folder`, before it is loaded. Raises
    `ConfigError` or `ModelError`."""
    if not adapters:
        return
    if engine != "embedded":
        raise ConfigError(
            f"--adapter is given, but the engine {engine} serves no adapters by name: give --engine embedded, or serve "
            "each merged checkpoint by itself"
        )
    module = skeleton(read_config(folder))
    for adapter in adapters:
        check_fit(adapter, module, folder, given)


def adapters_line(adapters: Sequence[NamedAdapter], num_bytes: int) -> str:
    """Return a line about the adapters and their memory."""
    named = ", ".join(f"{one.name} (rank {one.rank})" for one in adapters)
    return f"adapters beside it: {named}; together {num_bytes / 2**20:.1f} MB. A request's model chooses"
