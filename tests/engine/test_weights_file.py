"""Weights for other processes: what they read, and what is left behind."""

import sys
from pathlib import Path

import pytest
import torch
from processes import forked

from sharpen.engine.vllm.transfer import WeightsFile

READ = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    print({name: (str(file.get_tensor(name).dtype), file.get_tensor(name).tolist()) for name in sorted(file.keys())})
"""


def read(path: Path) -> object:
    with forked("-c", READ, str(path)) as process:
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return eval(said)


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
def test_another_process_reads_each_write_and_nothing_stays():
    """Red when `write` keeps to the values of the first time (`view.copy_`), or `close` to the memory."""
    file = WeightsFile()
    one = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)}
    path = file.write(one, torch.bfloat16)
    expected = {name: ("torch.bfloat16", tensor.tolist()) for name, tensor in one.items()}
    assert read(path) == expected
    two = {name: tensor.t().contiguous().t() + 1 for name, tensor in one.items()}
    assert file.write(two, torch.bfloat16) == path
    assert read(path) == {name: ("torch.bfloat16", tensor.tolist()) for name, tensor in two.items()}
    with pytest.raises(ValueError, match=r"other names than at first: \['c'\]"):
        file.write({**two, "c": one["a"]}, torch.bfloat16)
    file.close()
    file.close()
    assert not path.exists()
