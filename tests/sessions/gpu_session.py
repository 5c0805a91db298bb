"""A pytest plugin for `make test-gpu`: says what the tests ran on, and what they need that is not here.

In: `-p gpu_session`. Out: a session without a GPU has failed, instead of having skipped everything. Tests that need two
GPUs, vLLM or a further package where those are missing are left out, each kind in one line.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

PACKAGES = {"vllm": "vllm", "liger": "liger_kernel", "lora": "peft"}
"""Packages of tests, by a word of their names."""


def num_gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def there(package: str) -> bool:
    """Whether it can be imported. A folder of tests with its name is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def missing(item: pytest.Item, gpus: int) -> str:
    """What the test needs that is not here; empty if nothing."""
    if item.get_closest_marker("two_gpus") is not None and gpus < 2:
        return "two GPUs"
    if item.get_closest_marker("vllm") is not None and not there("vllm"):
        return "vllm"
    return next((package for word, package in PACKAGES.items() if word in item.nodeid and not there(package)), "")


class GpuSession:
    """Leaves out what cannot run, and says so at the end."""

    def __init__(self) -> None:
        self.left_out: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gpus = num_gpus()
        if not gpus:
            pytest.exit("no GPU is here: `make test-gpu` needs one", returncode=1)
        kept, gone = [], []
        for item in items:
            need = missing(item, gpus)
            if need:
                self.left_out[need] = self.left_out.get(need, 0) + 1
            (gone if need else kept).append(item)
        config.hook.pytest_deselected(items=gone)
        items[:] = kept

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        terminalreporter.write_line(f"{name}, torch {torch.__version__}")
        for need, count in sorted(self.left_out.items()):
            terminalreporter.write_line(f"{count} test(s) not run: they need {need}, which is not here")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuSession(), "gpu-session")
