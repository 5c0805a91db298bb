"""The images of the recorded calls: whether their files are what the calls name, and where their tokens are.

In: a run directory and its groups. Out: what does not hold, in words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from sharpen.types import Call, Group

MAX_BYTES = 1 << 30
"""Of the file of an image: no request may send more (`gateway.max_body_mb`)."""
TOKEN_NAMES = ("image_token_id", "image_token_index")


class ImageFiles:
    """Compares calls with the files of a run. Each file is read once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "images"
        self._token_id = _image_token(run_dir)
        self._known: dict[str, str | None] = {}

    def problems(self, step: int, groups: Iterable[Group]) -> Iterator[str]:
        """Yield each thing that does not hold in the groups of a step."""
        for group in groups:
            for rollout in group.with_baseline:
                for call in rollout.calls:
                    for problem in self._call(call):
                        yield f"step {step}: rollout {rollout.id}, call {call.index}: {problem}"

    def _call(self, call: Call) -> Iterator[str]:
        after = 0
        for span in call.pictures:
            name = span.picture.sha256
            if name not in self._known:
                self._known[name] = self._file(name)
            if (problem := self._known[name]) is not None:
                yield problem
            place = f"image {name[:12]} at the tokens {span.start} to {span.start + span.length - 1}"
            if span.length < 1 or span.start < after or span.start + span.length > len(call.prompt_ids_P):
                yield f"{place} is not in the prompt, or in another image"
                continue
            after = span.start + span.length
            ends = {int(call.prompt_ids_P[span.start]), int(call.prompt_ids_P[after - 1])}
            if len(ends) > 1 or self._token_id not in (None, *ends):
                yield f"{place} begins or ends with a token that is none of an image"

    def _file(self, name: str) -> str | None:
        try:
            with (self._folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_BYTES:
                    return f"the file images/{name} is too large: more than {MAX_BYTES >> 20} MiB"
                content = file.read(MAX_BYTES)
        except OSError:
            return f"the file images/{name} is missing"
        return None if sha256(content).hexdigest() == name else f"the file images/{name} has been changed"


def _image_token(run_dir: Path) -> int | None:
    """Return the id of the model's image token, if a checkpoint of the run says it."""
    for path in sorted(run_dir.glob("global_step_*/config.json")):
        settings = json.loads(path.read_text())
        for name in TOKEN_NAMES:
            if isinstance(settings.get(name), int):
                return int(settings[name])
    return None
