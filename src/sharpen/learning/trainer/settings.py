"""Checks that `trainer.optimizer` can be had with the other settings of the trainer, without importing anything heavy.

In: the trainer's settings. Out: nothing, or `ConfigError`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sharpen.config.extras import install_command
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError

# Checks that `trainer.optimizer` can be had with the other settings of the trainer, without importing anything heavy.
#
# In: the trainer's settings. Out: nothing, or `ConfigError`.


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


# Checks that the packages for `trainer.lora` are installed, without importing them.
#
# In: the trainer's settings. Out: nothing, or `ConfigError`.

OLDEST = (0, 18)
"""The oldest version of peft that works with the required version of transformers."""


def check_lora(config: TrainerConfig) -> None:
    """Raise `ConfigError` if `trainer.lora` is set and peft is missing or too old, or bitsandbytes for `nf4`; or with a
    balance loss or a trained tower."""
    if config.lora is None:
        return
    if config.balance_coef:
        raise ConfigError(
            f"trainer.balance_coef is {config.balance_coef:g}, but with trainer.lora the routers are frozen, and it "
            "would change other weights instead: leave one of the two out"
        )
    if config.train_towers:
        raise ConfigError(
            "trainer.train_towers trains the tower's own weights, but trainer.lora adapters of the text alone: leave "
            "one of the two out"
        )
    install = f"{install_command('lora')}, or leave trainer.lora out to train all weights"
    try:
        installed = version("peft")
    except PackageNotFoundError:
        raise ConfigError(f"trainer.lora needs the package peft, which is not installed: {install}") from None
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"trainer.lora needs peft {'.'.join(map(str, OLDEST))} or newer, but {installed} is installed: {install}"
        )
    if config.lora.base == "nf4":
        check_bitsandbytes("trainer.lora.base nf4", "use own or shared")
