"""Finds the files of a model on this machine.

In: `model_path` as configured: a folder, or a model name on the Hugging Face hub. Out: a local folder with a chat
template.
"""

from __future__ import annotations

from pathlib import Path

from sharpen.errors import ModelError


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
            f"{setting} {model_path!r} is not a folder, and could not be downloaded from the Hugging Face hub: {reason}"
        ) from error


def check_model_path(model_path: str, setting: str = "model_path") -> None:
    """Raise `ModelError` for a wrong model path, as far as this can be checked without the network."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"{setting} {model_path!r} has no config.json: it must be a Hugging Face model directory")
    elif not _looks_like_hub_name(model_path):
        raise ModelError(f"{setting} {model_path!r} does not exist")


def quiet_transformers() -> None:
    """Turn off the progress bars of transformers, which would mix with ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _looks_like_hub_name(model_path: str) -> bool:
    parts = model_path.split("/")
    return len(parts) <= 2 and all(parts) and not model_path.startswith((".", "~"))
