"""Checkpoints of several processes: the directory that one process writes, whole or not there, for any number of
processes to go on from."""

import json

import pytest
import torch
from group_toys import (
    assert_same_numbers,
    assert_same_weights,
    group_of,
    make_plan,
    make_toy,
    one_process,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sharpen.errors import CheckpointError

pytestmark = pytest.mark.distributed


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, lora):
    """Two steps in two processes, then one in one; and the other way round: the same as three in one. The files are
    those that one process writes, of the adapters at the start too; the merged model of adapters is what transformers
    loads.

    Red when a rank restores the whole optimizer state as its own part (`shard_like` in `load_state_tensors`)."""
    toy = make_toy(tmp_path / "model", "llama")
    (tmp_path / "model" / "chat_template.jinja").write_text("template")
    plan = make_plan(toy, loss={"kl": "k3", "kl_coef": 0.1}, lora=lora, rate=1e-2)
    one = one_process(plan)
    group = group_of(plan)
    for name, trainer in (("one_start", one), ("many_start", group)):
        (tmp_path / name).mkdir()
        trainer.save_start(tmp_path / name)
    assert files(tmp_path / "one_start") == ([] if lora is None else ["adapters_at_start.safetensors"])
    assert files(tmp_path / "many_start") == files(tmp_path / "one_start")
    for name in files(tmp_path / "one_start"):
        assert (tmp_path / "one_start" / name).read_bytes() == (tmp_path / "many_start" / name).read_bytes()
    for _ in range(2):
        one.train_step(toy.batches())
        group.train_step(toy.batches())
    one.save(tmp_path / "one", {"step": 2})
    group.save(tmp_path / "many", {"step": 2})
    group.save(tmp_path / "many", {"step": 2})  # replaces what is there
    assert files(tmp_path / "one") == files(tmp_path / "many")
    for name in files(tmp_path / "one"):
        if name.endswith(".safetensors") and "random" not in name:
            expected, found = load_file(tmp_path / "one" / name), load_file(tmp_path / "many" / name)
            assert expected.keys() == found.keys(), name
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=0.0, msg=f"{name} {key}")
    for name in ("config.json", "chat_template.jinja", "trainer_state/state.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    expected = one.train_step(toy.batches())
    alone = one_process(plan)
    assert alone.restore(tmp_path / "many") == {"step": 2}
    assert_same_numbers(expected, alone.train_step(toy.batches()))
    assert_same_weights(one, alone)
    group.train_step(toy.batches())  # away from the checkpoint
    assert group.restore(tmp_path / "one") == {"step": 2}
    assert group.version == 2
    assert_same_numbers(expected, group.train_step(toy.batches()))
    assert_same_weights(one, group)
    with pytest.raises(CheckpointError, match=r"cannot resume from .*nowhere"):
        group.restore(tmp_path / "nowhere")
    assert group.version == 3
    acting = AutoModelForCausalLM.from_pretrained(tmp_path / "many").state_dict()
    for name, tensor in load_file(tmp_path / "many" / "model.safetensors").items():
        assert torch.equal(acting[name], tensor)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_the_ranks_in_use(tmp_path):
    """Only the first rank sees what stops it; all must hear of it, or the others would wait for a gathered tensor.

    Red when `checkpoint.save` does not go through the pieces that were not written."""
    toy = make_toy(tmp_path / "model")
    plan = make_plan(toy)
    group = group_of(plan)
    group.train_step(toy.batches())
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="could not write the checkpoint"):
        group.save(tmp_path / "file" / "checkpoint", {})
    group.save(tmp_path / "checkpoint", {"a": 1})
    assert json.loads((tmp_path / "checkpoint" / "trainer_state" / "state.json").read_text())["version"] == 1
    group.train_step(toy.batches())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "file", "model"]
