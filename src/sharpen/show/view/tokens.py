"""The text of token ids: the tokenizer of a run.

In: a run's folder and settings. Out: a function from ids to text, and why there is none where there is none. Only the
tokenizer's file is read, never a model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from sharpen.agent.transcript import Decode
from sharpen.show.view.files import RunFiles

FILE = "tokenizer.json"


class Decoders:
    """The decoders of runs, each made once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Path, Decode] = {}

    def of(self, files: RunFiles) -> tuple[Decode | None, str]:
        """Return a run's decoder, or None and the reason."""
        file = next((folder / FILE for folder in _folders(files) if (folder / FILE).is_file()), None)
        if file is None:
            model = files.setting("model.model_path")
            return None, f"tokens are shown as ids: there is no {FILE} in the run's checkpoints, nor in {model}"
        with self._lock:
            if file not in self._found:
                try:
                    self._found[file] = _decoder(file)
                except Exception as error:  # what the library raises for a damaged file is its own business
                    return None, f"tokens are shown as ids: {file} cannot be read ({error})"
            return self._found[file], ""


def _folders(files: RunFiles) -> Iterator[Path]:
    """The places where the tokenizer may be: checkpoints, the model before training, or its copy from the hub."""
    yield from (files.path / name for name in ("latest", "best"))
    yield from sorted(files.path.glob("global_step_*"), reverse=True)
    model = files.setting("model.model_path")
    if isinstance(model, str):
        yield Path(model).expanduser()
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, FILE)
        except HFValidationError:  # a path
            return
        if isinstance(cached, str):
            yield Path(cached).parent


def _decoder(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
