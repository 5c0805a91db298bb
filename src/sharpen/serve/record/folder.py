"""The folder of a recording: what it says of itself, and its contents in numbers.

In: the folder. Out: `record.json`; lines for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sharpen import __version__
from sharpen.errors import ConfigError
from sharpen.files import write_whole
from sharpen.learning.experience.recorded import count_recorded, is_recording

ABOUT, JOURNAL = "record.json", "run.db"
"""The files of a recording: what was recorded, and the calls."""


def open_folder(folder: Path, upstream: str, model: str | None) -> None:
    """Note what is recorded in a folder. Raises `ConfigError` if it is another run's."""
    journal = folder / JOURNAL
    if journal.exists() and not is_recording(journal):
        raise ConfigError(f"--dir {folder} is the folder of a run, not of a recording: name another")
    about = {"upstream": upstream, "model": model, "version": __version__}
    write_whole(folder / ABOUT, f"{json.dumps(about, indent=2)}\n".encode())


def is_record(folder: Path) -> bool:
    """Whether a folder is that of a recording."""
    return (folder / ABOUT).is_file()


def model_of_record(folder: Path) -> str | None:
    """Return the model whose tokenizer shows a recording's tokens, if one was named. Raises `ConfigError`."""
    try:
        model = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / ABOUT} cannot be read: {error}") from error
    return None if model is None else str(model)


def summary(folder: Path) -> Iterator[str]:
    """Yield lines on what a recording holds, and what of it cannot be used."""
    found = count_recorded(folder / JOURNAL)
    reward = f", mean {found.mean_reward:.3g}" if found.mean_reward is not None else ""
    yield (
        f"{found.sessions} sessions ({found.open} open, {found.rated} with a reward{reward}), {found.calls} calls, "
        f"{found.prompt_tokens} prompt and {found.sampled_tokens} sampled tokens"
    )
    for number, what in (
        (found.without_ids, "have no token ids: nothing but their text is known"),
        (found.abandoned, "did not reach their client whole, and teach nothing"),
        (found.cut, "stopped at their token limit"),
        (found.apart, "do not begin with the ids of an earlier call of their session (its first call aside): a "
                      "sub-agent, a shortened history, or a chat template that writes earlier turns anew"),
    ):  # fmt: skip
        if number:
            yield f"{number} of {found.calls} calls {what}"
