"""Hands a run's model on: as a GGUF file, by llama.cpp's own converter, or to the Hugging Face hub.

In: a model's folder. Out: a file, or a repository on the hub.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONVERTER = "convert_hf_to_gguf.py"
LEFT_OUT = ("trainer_state/*",)
"""What only a resumed run reads: the optimizer and the random state."""


def chosen_model(run_dir: Path) -> Path:
    """Return the folder of the model that the verdict recommends. Raises `ConfigError` if that is the original, or the
    run has not ended."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{run_dir} has no summary.json that can be read: the run has not ended") from error
    summary = summary if isinstance(summary, dict) else {}
    found = summary.get("verdict")
    verdict = found if isinstance(found, dict) else {}
    if verdict.get("original"):
        raise ConfigError(
            f"the verdict of {run_dir} recommends the original model, {verdict.get('model')}: {verdict.get('text')}"
        )
    name = Path(str(verdict.get("model") or summary.get("model_dir") or "")).name
    place = run_dir / name  # the run may have moved, and what it names elsewhere is not its own
    if name in ("", "..") or not (place / "config.json").is_file():
        raise ConfigError(f"{name or 'a model'}, the model of {run_dir}, is not there any more")
    return place


def to_gguf(model: Path, path: Path, converter: str | None = None, *, replace: bool = False) -> None:
    """Convert a model; a file that is there is replaced, if that is asked for, when the new one is whole. Raises
    `ConfigError` if llama.cpp's converter is not there, or fails."""
    converter = converter or shutil.which(CONVERTER)
    if converter is None:
        raise ConfigError(
            f"--for gguf needs llama.cpp's {CONVERTER} in a folder of PATH: git clone "
            "https://github.com/ggml-org/llama.cpp, and add that folder"
        )
    if path.exists() and not replace:
        raise ConfigError(f"--to {path} is there already: --force writes over it")
    made = path.with_name(f".{path.name}.partial") if path.exists() else path
    command = [sys.executable, converter, str(model), "--outfile", str(made)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not made.exists():
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{converter} could not convert {model}: {reason}")
    made.replace(path)


def to_hub(model: Path, name: str, api: HfApi | None = None) -> str:
    """Upload a model to a private repository of the hub, which is created if it is not there, and return its address.
    Raises `ConfigError` if the hub refuses."""
    import huggingface_hub

    api = api or huggingface_hub.HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=model, ignore_patterns=list(LEFT_OUT))
    except Exception as error:  # the hub's refusals, those of its HTTP client and of its uploader: no type has them all
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{name!r} could not be uploaded: {reason}; `hf auth login` sets who you are") from error
    return str(repository)
