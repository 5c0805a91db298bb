"""Finds the files of a model on this machine.

In: `model_path` as configured: a folder, or a model name on the Hugging Face hub. Out: a local folder with a chat
template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharpen.errors import ModelError
from sharpen.files import near_path


def model_folder(model_path: str, setting: str = "model_path") -> Path:
    """Return the folder, or that of the hub's model of this name, downloaded once into the hub's own cache. `setting`
    names the setting in errors.

    Raises `ModelError` if there is no such folder or name, or if it is not a Hugging Face model.
    """
    check_model_path(model_path, setting)
    folder = Path(model_path).expanduser().absolute()  # user code may change the working folder
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{setting} {model_path!r} is not a folder, and could not be downloaded from the Hugging Face hub: "
            f"{reason}{near_path(model_path)}"
        ) from error


def check_model_path(model_path: str, setting: str = "model_path") -> None:
    """Raise `ModelError` for a wrong model path, as far as this can be checked without the network."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"{setting} {model_path!r} has no config.json: it must be a Hugging Face model directory")
        if problems := broken_files(folder):
            raise ModelError(
                f"{setting} {model_path!r} has files that cannot be read: {'; '.join(problems)}. Copy or download the "
                "model again"
            )
    elif folder.exists():
        raise ModelError(f"{setting} {model_path!r} is a file: it must be a Hugging Face model directory")
    elif not _looks_like_hub_name(model_path):
        raise ModelError(f"{setting} {model_path!r} does not exist{near_path(model_path)}")


def broken_files(folder: Path) -> list[str]:
    """Return what is wrong with the files of a model directory, as far as it is seen without reading the weights: JSON
    files that are torn, a configuration of no model, safetensors files that are cut short or missing."""
    problems = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{path.name}: {error or 'nested too deep'}")
            continue
        if path.name == "config.json" and not (isinstance(content, dict) and content.get("model_type")):
            problems.append("config.json: it has no model_type")
        if path.name == "model.safetensors.index.json" and not (folder / "model.safetensors").exists():
            problems += [f"{path.name} {problem}" for problem in _missing_parts(folder, content)]
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if reason := _torn(path):
                problems.append(f"{path.name}: {reason}")
        except OSError as error:
            problems.append(f"{path.name}: {error.strerror}")
    return problems


def _missing_parts(folder: Path, index: Any) -> list[str]:
    """Return what an index of weights names that is not there."""
    parts = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(parts, dict):
        return ["has no weight_map"]
    names = sorted({str(name) for name in parts.values()})
    return [f"names {name}, which is missing" for name in names if not (folder / name).is_file()]


def _torn(path: Path) -> str:
    """Return what is wrong with the length or the header of a safetensors file: 8 bytes with the header's length, the
    header, which says where each tensor ends, and the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return f"its header is cut short at {size} bytes"
        try:
            header = json.loads(file.read(length))
            end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
        except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
            return "its header is not that of a safetensors file"
    needed = 8 + length + end
    return f"it has {size} of {needed} bytes" if size < needed else ""


def quiet_transformers() -> None:
    """Turn off the progress bars of transformers, which would mix with ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _looks_like_hub_name(model_path: str) -> bool:
    parts = model_path.split("/")
    return len(parts) <= 2 and all(parts) and not model_path.startswith((".", "~"))
