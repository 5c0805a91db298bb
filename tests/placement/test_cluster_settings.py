"""What can be said of a run with Ray before any Ray is there: settings, versions, and what a cluster has not got."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Qwen3VLConfig

from sharpen.config.extras import install_command
from sharpen.config.load import resolve
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.placement.cluster.connect import check_ray, check_size
from sharpen.placement.cluster.engine import to_arrays, to_tensors
from sharpen.placement.cluster.placement import engine_names, fit_widths, needs, num_ranks
from sharpen.placement.engine_choice import check_towers
from sharpen.run.decide import check_engine, decide_rollouts

Make = Callable[..., RunConfig]


@pytest.fixture
def make(toy_model_dir: Path) -> Make:
    def make(**settings: Any) -> RunConfig:
        tree = {"train_dataset.path": "none", "model": {"model_path": str(toy_model_dir), "max_model_len": 64}}
        return resolve(settings=tree | {name.replace("__", "."): value for name, value in settings.items()}).config

    return make


async def agent(task: Any, model: Any) -> None:
    """Is only looked at."""


def machine(cpus: float, gpus: float = 0, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus}}


def test_execution_is_ray_where_it_is_said_or_where_anything_is_set_in_cluster(make):
    assert not make().uses_ray
    assert make(execution="ray").uses_ray
    assert make(cluster__ray_address="auto").uses_ray
    assert make(cluster__num_workers=4).uses_ray
    with pytest.raises(ConfigError, match="settings of cluster have no effect with execution: local"):
        check_engine(make(execution="local", cluster__num_workers=4))


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_ray_that_is_not_installed_is_said_before_anything_is_loaded(make):
    with pytest.raises(ConfigError, match=re.escape(f"Ray is not installed: `{install_command('ray')}`")):
        check_engine(make(execution="ray"))


def test_another_line_of_ray_is_refused():
    check_ray("2.60.3")
    for found in ("2.6.0", "2.59.0", "3.0.0"):
        with pytest.raises(ConfigError, match=f"ray {found} is installed, but execution: ray needs 2.60"):
            check_ray(found)


def test_gpus_that_the_cluster_has_not_got_are_counted_by_role(make):
    config = make(execution="ray", trainer__num_processes=4, model__inference_engine_num=2)
    there = [machine(16, 4), machine(16, 4, alive=False)]
    check_size(needs(config, 6, "embedded"), [machine(16, 6)])
    with pytest.raises(ConfigError, match=r"needs 6 GPUs \(2 for engines, 4 for trainer ranks\), but .* has 4 on 1"):
        check_size(needs(config, 4, "embedded"), there)
    with pytest.raises(ConfigError, match=r"needs 5 CPUs .* has 4 on 2 machine"):
        check_size(needs(make(cluster__num_workers=4), 0, "embedded"), [machine(2), machine(2)])


def test_an_engine_is_on_one_machine(make):
    config = make(execution="ray", model__tensor_parallel_size=4, engine__type="vllm")
    with pytest.raises(ConfigError, match=r"one engine needs 4 GPUs on one machine .* has more than 3"):
        check_size(needs(config, 6, "vllm"), [machine(8, 3), machine(8, 3)])


def test_without_gpus_the_coordinator_trains_unless_there_are_several_ranks(make):
    assert num_ranks(make(), 0) == 0
    assert num_ranks(make(trainer__num_processes=2), 0) == 2
    assert num_ranks(make(), 1) == 1
    assert num_ranks(make(engine__device="cpu"), 1) == 0
    assert needs(make(engine__device="cpu"), 1, "embedded")["engine"] == [{"CPU": 1}]
    with pytest.raises(ConfigError, match="cpu_offload is true, but the trainer computes on the CPU"):
        num_ranks(make(trainer__cpu_offload=True), 0)


def test_colocated_engines_and_ranks_are_pairs_on_gpus(make):
    pairs = {"cluster__colocate": True, "trainer__num_processes": 2}
    assert needs(make(**pairs, model__inference_engine_num=2), 2, "embedded")["engine"] == [{"CPU": 2, "GPU": 1}] * 2
    with pytest.raises(ConfigError, match="nothing computes on GPUs"):
        needs(make(**pairs), 0, "embedded")
    with pytest.raises(ConfigError, match=r"1 engine\(s\) with 1 GPU\(s\) each .* and 2 rank\(s\)"):
        needs(make(**pairs), 2, "embedded")


def test_the_device_of_an_engine_is_ray_s_to_choose(make):
    with pytest.raises(ConfigError, match=r"engine.device is cuda:1, but Ray assigns the GPUs"):
        check_engine(make(engine__device="cuda:1", execution="ray"))


def test_no_tower_learns_from_a_vllm_that_is_given_no_images(make, tmp_path):
    """In another process too, where nobody has chosen the engine yet."""
    for kind, config in {"gemma3": Gemma3Config(), "qwen3_vl": Qwen3VLConfig()}.items():
        config.save_pretrained(tmp_path / kind)
    trains = {"trainer__train_towers": True, "model__model_path": str(tmp_path / "gemma3")}
    refused = r"trainer.train_towers is true.*vllm.*Gemma 3"
    with pytest.raises(ConfigError, match=refused):
        decide_rollouts(make(**trains, mode="train", name="n", engine__type="vllm"), agent, None)
    decide_rollouts(make(**trains, mode="train", name="n"), agent, None)
    decide_rollouts(make(**{**trains, "trainer__train_towers": False}, mode="train", name="n"), agent, None)
    with pytest.raises(ConfigError, match=refused):
        check_towers("vllm", tmp_path / "gemma3")
    check_towers("vllm", tmp_path / "qwen3_vl")


def test_auxiliary_models_have_engines_and_gpus_of_their_own_with_vllm(make):
    """Red when their numbers are left out: one engine each, on the CPU."""
    judge = {"model_path": "m", "max_model_len": 64, "inference_engine_num": 2, "tensor_parallel_size": 4}
    config = make(auxiliary_models={"judge": judge}, model__inference_engine_num=3)
    assert engine_names(config) == [None, None, None, "judge", "judge"]
    assert needs(config, 16, "vllm")["engine"] == [*[{"CPU": 1, "GPU": 1}] * 3, *[{"CPU": 1, "GPU": 4}] * 2]
    fitted, lines = fit_widths(config, "vllm")
    assert (fitted, lines) == (config, ())


def test_embedded_engines_in_actors_are_on_one_device_each_and_say_so(make):
    judge = {"model_path": "m", "max_model_len": 64, "inference_engine_num": 2, "tensor_parallel_size": 4}
    fitted, lines = fit_widths(make(auxiliary_models={"judge": judge}, model__inference_engine_num=3), "embedded")
    assert engine_names(fitted) == [None, None, None, "judge", "judge"]
    assert needs(fitted, 0, "embedded")["engine"] == [{"CPU": 1}] * 5
    (line,) = lines
    assert "auxiliary_models.judge.tensor_parallel_size = 4" in line
    assert "without effect" in line


def test_weights_keep_their_bits_and_share_memory_on_the_way():
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "scalar": torch.tensor(2.5)}
    arrays = to_arrays(tensors)
    assert arrays["a"][0].ctypes.data == tensors["a"].data_ptr()
    for name, tensor in to_tensors(arrays).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
