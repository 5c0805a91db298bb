"""Checks that `trainer.optimizer` can be had with the other settings of the trainer, without importing anything heavy.

In: the trainer's settings. Out: nothing, or `ConfigError`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sharpen.config.extras import install_command
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError


def check_optimizer(config: TrainerConfig) -> None:
    """Raise `ConfigError` for an optimizer whose package is missing, or that cannot update sharded weights."""
    kind = config.optimizer
    if kind == "adamw":
        return
    if config.has_ranks:
        raise ConfigError(
            f"trainer.optimizer is {kind}, which cannot update weights that are sharded over processes "
            f"(trainer.num_processes is {config.num_processes}, trainer.cpu_offload is {config.cpu_offload}): "
            "use adamw, or one process without cpu_offload"
        )
    if kind.endswith("_8bit"):
        check_bitsandbytes(f"trainer.optimizer {kind}", "use adamw or muon")


def check_bitsandbytes(setting: str, otherwise: str) -> None:
    """Raise `ConfigError` if bitsandbytes, which this setting needs, is not installed."""
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        raise ConfigError(
            f"{setting} needs the package bitsandbytes, which is not installed: {install_command('quant')}, or "
            f"{otherwise}"
        ) from None
