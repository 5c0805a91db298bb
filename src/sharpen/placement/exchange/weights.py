"""The trainer's weights on their way to an explorer: a file in the store that both use.

In: tensors by name, the step and the policy version that they are of. Out: the newest file, by a note (`trainer.json`)
that is replaced in one move.

A trainer that begins again after a crash counts its versions from its checkpoint on, so that a version alone may name
two sets of weights. Weights are named by session and version, and the note lists which versions of which session led to
the weights of today; what was sampled by any others is not to be trained on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from sharpen.errors import CheckpointError, JournalError
from sharpen.placement.exchange.store import Store

if TYPE_CHECKING:
    import torch

_FOLDER, _NOTE = "weights", "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpan:
    """The versions of one session that led to the trainer's weights: up to `last`, or without an end (None)."""

    session: str
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerNote:
    """How far the trainer is. `session`, `version` and `step` are those of the published weights, `trained` are the
    steps done; `spans` list the sessions from the first to the present one."""

    session: str
    version: int
    step: int
    trained: int
    spans: tuple[SessionSpan, ...]

    def leads_here(self, session: str, version: int) -> bool:
        """Whether the weights of this name led to those of today. The model's files (no session) always did."""
        if not session:
            return True
        span = next((one for one in self.spans if one.session == session), None)
        return span is not None and (span.last is None or version <= span.last)


class WeightPublisher:
    """The trainer's side: publishes weights, and says how far the training is."""

    def __init__(self, store: Store, *, step: int, version: int) -> None:
        """Begin a session after `step`, with weights of this version; later ones of earlier sessions no longer
        count."""
        self._store = store
        before = read_note(store)
        self._there = None if before is None else before.session
        self._last = None if before is None else _name(before.session, before.version)
        spans = () if before is None else _ended(before.spans, version)
        session = secrets.token_hex(4)
        self._note = TrainerNote(
            session=session, version=version, step=step, trained=step, spans=(*spans, SessionSpan(session=session))
        )

    @property
    def note(self) -> TrainerNote:
        """What an explorer reads."""
        return self._note

    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Offer the weights that `step` led to. The last but one stay, which an explorer may be reading, older ones are
        removed. Raises `CheckpointError` if they cannot be written, or another trainer uses the exchange."""
        name = _name(self._note.session, version)
        try:
            self._store.put(name, _content(tensors))
            self._write(replace(self._note, version=version, step=step, trained=step))
            for old in set(self._store.names(_FOLDER)) - {name, self._last}:
                self._store.remove(old)
        except CheckpointError:
            raise
        except (JournalError, OSError) as error:
            raise CheckpointError(f"the weights of step {step} could not be handed to the explorer: {error}") from error
        self._last = name

    def trained(self, step: int) -> None:
        """Say that a step has trained whose weights are not published. Raises as `publish`."""
        self._write(replace(self._note, trained=step))

    def _write(self, note: TrainerNote) -> None:
        """Replace the note, unless somebody else has since this session last looked."""
        there = read_note(self._store)
        if there is not None and there.session != self._there:
            raise CheckpointError(
                f"another trainer uses the same exchange ({self._store.where}): {_NOTE} there is of session "
                f"{there.session} now, and this one is {note.session}. One trainer may go on; the other needs another "
                "name, or an exchange of its own. Of several servers that share one, only one has mode both, and none "
                "if the trainer is started by itself"
            )
        self._store.put(_NOTE, json.dumps(asdict(note), indent=2).encode())
        self._note, self._there = note, note.session


class PublishedWeights:
    """The explorer's side: the newest weights, if they are not those that serve already."""

    def __init__(self, store: Store) -> None:
        """Nothing of the trainer's serves yet: the engine has the model's files."""
        self._store = store
        self.session, self.version, self.step = "", 0, 0

    def newer(self) -> dict[str, torch.Tensor] | None:
        """Return the trainer's weights and take over their name; None if they serve already, or there are none."""
        from safetensors.torch import load_file

        note = read_note(self._store)
        if note is None or (note.session, note.version) == (self.session, self.version):
            return None
        try:
            with self._store.file(_name(note.session, note.version)) as file:
                if file is None:  # still newer ones have replaced them
                    return None
                tensors: dict[str, torch.Tensor] = load_file(file)
        except FileNotFoundError:  # meanwhile
            return None
        self.session, self.version, self.step = note.session, note.version, note.step
        return tensors


def read_note(store: Store) -> TrainerNote | None:
    """Read how far the trainer is; None if none has begun."""
    found = store.get(_NOTE)
    if found is None:
        return None
    content = json.loads(found)
    spans = tuple(SessionSpan(**span) for span in content.pop("spans"))
    return TrainerNote(spans=spans, **content)


def _ended(spans: tuple[SessionSpan, ...], version: int) -> tuple[SessionSpan, ...]:
    """Earlier sessions, each up to `version` at most: what they trained behind it is gone."""
    return tuple(replace(one, last=version if one.last is None else min(one.last, version)) for one in spans)


def _name(session: str, version: int) -> str:
    return f"{_FOLDER}/{session}-{version}.safetensors"


def _content(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the tensors as a file. Tied ones, which share memory, are in it each by itself."""
    from safetensors.torch import save

    content: bytes = save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
    return content
