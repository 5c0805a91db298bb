"""The checks of `sharpen doctor`: each looks at one thing that a run needs.

In: the machine (files of the kernel, installed packages, the environment, the network); for `run_alone`, a command that
prints JSON as its last line, in a process of its own. Out: a `Finding` each: in order, a warning (a run is possible,
but not any run), or a problem (no run is possible until it is solved), with what to do about it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from sharpen.machine import available_bytes, total_bytes

GIB = 2**30
ENOUGH_MEMORY = 2 * GIB
"""A run of the tiny model takes about 1 GiB, most of it torch and transformers themselves."""
ENOUGH_DISK = 10 * GIB
"""A checkpoint with its optimizer takes 12 to 16 bytes a parameter: 7 to 10 GB for 0.6 billion."""
HUB = "https://huggingface.co"
EXTRAS = ("vllm", "ray", "peft", "liger-kernel", "math-verify", "wandb", "mlflow", "swanlab", "dspy", "optuna")
"""Optional packages whose versions are shown where they are installed."""

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found. `todo` says what to do, and is empty if nothing is wrong."""

    name: str
    state: State
    what: str
    todo: str = ""


def python_check(release: tuple[int, ...] = sys.version_info[:3], system: str = platform.system()) -> Finding:
    """Whether this Python and this system are supported."""
    what = f"Python {'.'.join(map(str, release))} on {system} {platform.machine()}, {os.cpu_count()} processors"
    if not (3, 11) <= release[:2] <= (3, 13):
        return Finding(name="python", state="problem", what=what, todo="install Python 3.11, 3.12 or 3.13")
    if system != "Linux":
        todo = "Linux is what is tested; for other systems see docs/start/install.md"
        return Finding(name="python", state="warning", what=what, todo=todo)
    return Finding(name="python", state="ok", what=what)


def packages_check(needed: list[str] | None = None) -> Finding:
    """Whether the packages that Sharpen needs are installed in the versions that it needs."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in (_needed() if needed is None else needed)]
    wrong, shown = [], []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found or 'is missing'} (needed: {requirement.specifier})")
    for name in ("sharpen", "torch", "transformers", *EXTRAS):
        if found := _version(name):
            shown.append(f"{name} {found}")
    if wrong:
        names = " ".join(f"'{requirement}'" for requirement in wanted if any(requirement.name in w for w in wrong))
        return Finding(name="packages", state="problem", what="; ".join(wrong), todo=f"pip install {names}")
    return Finding(name="packages", state="ok", what=", ".join(shown))


def _needed() -> list[str]:
    try:
        return requires("sharpen") or []
    except PackageNotFoundError:  # run from its source folder, not installed
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpu_check(driver: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    """Which GPUs torch can use, and whether there is one that it cannot use."""
    import torch

    if torch.cuda.is_available():
        parts = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            parts.append(f"{name} ({free / GIB:.1f} of {total / GIB:.1f} GiB free)")
        return Finding(name="gpu", state="ok", what=", ".join(parts))
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    if driver.exists() or shutil.which("nvidia-smi"):
        return Finding(
            name="gpu",
            state="warning",
            what=f"an NVIDIA driver is here, but this torch ({torch.__version__}, built for {built}) cannot use a GPU",
            todo="install the torch for your driver (https://pytorch.org/get-started); is CUDA_VISIBLE_DEVICES set?",
        )
    return Finding(name="gpu", state="ok", what="none: runs use the processor, which is enough for small models")


def memory_check(available: int | None = None) -> Finding:
    """Whether there is memory for anything at all; `sharpen plan` predicts that of a run."""
    available = available_bytes() if available is None else available
    what = f"{available / GIB:.1f} GiB free of {total_bytes() / GIB:.1f} GiB"
    if available < ENOUGH_MEMORY:
        todo = f"free some: a first run needs about {ENOUGH_MEMORY // GIB} GiB"
        return Finding(name="memory", state="problem", what=what, todo=todo)
    return Finding(name="memory", state="ok", what=what)


def disk_check(folder: Path, free: int | None = None) -> Finding:
    """Whether there is room for checkpoints in the folder, or the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free if free is None else free
    what = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(
            name="disk", state="problem", what=f"{folder} cannot be written", todo="set checkpoint_root_dir to another"
        )
    if free < ENOUGH_DISK:
        todo = "a checkpoint takes about 16 bytes a parameter: set checkpoint_root_dir to a larger disk, or keep fewer"
        return Finding(name="disk", state="warning", what=what, todo=todo)
    return Finding(name="disk", state="ok", what=what)


def hub_check(environment: Mapping[str, str] = os.environ, timeout_s: float = 5.0) -> Finding:
    """Whether models and datasets can be downloaded."""
    import httpx

    endpoint = environment.get("HF_ENDPOINT", HUB).rstrip("/")
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        todo = "only folders and what was downloaded before can be used; unset it to download"
        return Finding(name="hub", state="warning", what="HF_HUB_OFFLINE is set", todo=todo)
    try:
        status = httpx.head(endpoint, timeout=timeout_s, follow_redirects=True).status_code
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # no request can be made so
        return Finding(
            name="hub",
            state="warning",
            what=f"{endpoint} cannot be asked: {error}",
            todo="correct HF_ENDPOINT and the proxies in the environment (ALL_PROXY, HTTPS_PROXY, HTTP_PROXY)",
        )
    except httpx.HTTPError as error:
        return Finding(
            name="hub",
            state="warning",
            what=f"{endpoint} cannot be reached ({type(error).__name__})",
            todo="name models and datasets by folder, or a mirror by HF_ENDPOINT; `sharpen init` makes a tiny model",
        )
    if status >= 500:
        todo = "try again later, or name models and datasets by folder"
        return Finding(name="hub", state="warning", what=f"{endpoint} answers with {status}", todo=todo)
    return Finding(name="hub", state="ok", what=f"{endpoint} answers")


def proxy_check(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether calls of an agent to its model, which is on this machine, would go to a proxy."""
    names = [name for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy") if environment.get(name)]
    exempt = ",".join(environment.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    if names and not any(host in exempt for host in ("127.0.0.1", "127.0.0.0/8", "*")):
        return Finding(
            name="proxy",
            state="warning",
            what=f"{names[0]} is set, and NO_PROXY does not name 127.0.0.1",
            todo="export NO_PROXY=127.0.0.1,localhost: else an agent that calls its model by URL asks the proxy for it",
        )
    return Finding(name="proxy", state="ok", what="calls to this machine go to no proxy")


def run_alone(command: Sequence[str], name: str, what: str, timeout_s: float) -> Finding | dict[str, Any]:
    """Run a command. `name` and `what` say in a finding what was being done."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            name=name,
            state="problem",
            what=f"{what} did not end within {timeout_s:.0f} s",
            todo="is the machine busy? try again",
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        todo = f"run `{shlex.join(command)}` to see all of it"
        return Finding(name=name, state="problem", what=f"{what} failed: {reason}", todo=todo)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
