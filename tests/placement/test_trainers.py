"""Processes that cannot be had, and settings without effect, are refused before anything is loaded."""

import pickle

import pytest
import torch

from sharpen.config.load import resolve
from sharpen.errors import ConfigError, RankError
from sharpen.placement.ranks.processes import SharedFile, lay_out, view
from sharpen.placement.ranks.rank import WeightSpec
from sharpen.placement.trainers import check_processes, check_trainer


def config(**settings):
    arguments = {"train_dataset": {"path": "rows.jsonl"}, "model": {"model_path": "m", "max_model_len": 64}}
    found = resolve(None, {f"{name.replace('__', '.')}": value for name, value in settings.items()}, arguments).config
    return found.trainer, found.engine.device


def test_more_processes_than_gpus():
    check_processes(*config(trainer__num_processes=2), num_gpus=2)
    with pytest.raises(ConfigError, match=r"num_processes is 3, but .* 2 GPU\(s\) and each process needs one"):
        check_processes(*config(trainer__num_processes=3), num_gpus=2)
    with pytest.raises(ConfigError, match=r"num_processes is 2, but .* 0 GPU\(s\)"):
        check_processes(*config(trainer__num_processes=2, engine__device="cuda"), num_gpus=0)


def test_on_the_cpu_there_may_be_any_number():
    check_processes(*config(trainer__num_processes=64), num_gpus=0)
    check_processes(*config(trainer__num_processes=64, engine__device="cpu"), num_gpus=2)


def test_offloading_to_the_cpu_what_is_there_already():
    check_processes(*config(trainer__cpu_offload=True), num_gpus=1)
    with pytest.raises(ConfigError, match=r"trainer.cpu_offload is true, but the trainer computes on the CPU"):
        check_processes(*config(trainer__cpu_offload=True), num_gpus=0)
    with pytest.raises(ConfigError, match=r"engine.device 'cpu', 2 GPUs here"):
        check_processes(*config(trainer__cpu_offload=True, engine__device="cpu"), num_gpus=2)


def test_offloaded_activations_need_a_gpu_and_layers_that_are_computed_again():
    both = config(trainer__offload_activations=True, trainer__gradient_checkpointing=True)
    check_processes(*both, num_gpus=1)
    with pytest.raises(ConfigError, match=r"offload_activations is true, but the trainer computes on the CPU"):
        check_trainer(*config(engine__device="cpu", trainer__offload_activations=True))
    with pytest.raises(ConfigError, match=r"offload_activations is true without trainer\.gradient_checkpointing"):
        check_processes(*config(trainer__offload_activations=True), num_gpus=1)


def test_weights_lie_side_by_side_in_shared_memory():
    """Tensors of several types keep their places and values; a second mapping sees what the first one writes, a private
    one keeps its own."""
    specs = [
        WeightSpec(name="a", shape=(3, 5), dtype=torch.bfloat16),
        WeightSpec(name="b", shape=(7,), dtype=torch.float32),
        WeightSpec(name="c", shape=(1, 2, 2), dtype=torch.float64),
    ]
    layout, size = lay_out(specs)
    file = SharedFile.create()
    try:
        file.grow(size)
        file.grow(1)
        first, second = file.map(), file.map()
        written = {spec.name: view(first, spec, offset) for spec, offset in layout}
        for number, tensor in enumerate(written.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
        read = {spec.name: view(second, spec, offset) for spec, offset in layout}
        for number, (spec, tensor) in enumerate(zip(specs, read.values(), strict=True)):
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
            assert tensor.flatten().tolist() == [value + number for value in range(tensor.numel())]
        own = view(file.map(private=True), *layout[0])
        own.zero_()
        assert written["a"].sum() > 0
    finally:
        file.close()


def test_the_error_of_a_lost_rank_crosses_processes():
    assert str(pickle.loads(pickle.dumps(RankError("rank 1")))) == "rank 1"
