"""The diagnoses of runs, made beside the pages: the rules read rollouts, and bring heavy libraries with them.

In: a run's folder. Out: its findings as soon as they are there; until then, that they are being made.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sharpen.show.view.folders import Folder

if TYPE_CHECKING:
    from sharpen.evidence.diagnose.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a diagnosis found; `pending` if it is not done, `problem` says why it cannot be made."""

    findings: tuple[Finding, ...] = ()
    pending: bool = False
    problem: str = ""


class Diagnoses:
    """The diagnoses of runs, each made anew when its run has changed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._made: dict[Path, tuple[object, Diagnosis]] = {}
        self._busy: set[Path] = set()
        self.count = 0
        """How many were made: tells whether there is something new to show."""

    def of(self, folder: Folder, stamp: object, *, wait_s: float = 0.0) -> Diagnosis:
        """Return the diagnosis of a run whose files look like `stamp`; of one that has changed, the last until the new
        one is there. Waits for it so long at most."""
        with self._changed:
            made = self._made.get(folder.path)
            if made is not None and made[0] == stamp:
                return made[1]
            if folder.path not in self._busy:
                self._busy.add(folder.path)
                threading.Thread(target=self._make, args=(folder, stamp), name="sharpen-diagnosis", daemon=True).start()
            self._changed.wait_for(lambda: folder.path not in self._busy, wait_s)
            made = self._made.get(folder.path)
            return Diagnosis(pending=True) if made is None else made[1]

    def _make(self, folder: Folder, stamp: object) -> None:
        diagnosis = diagnosed(folder)
        with self._changed:
            self._made[folder.path] = (stamp, diagnosis)
            self._busy.discard(folder.path)
            self.count += 1
            self._changed.notify_all()


def diagnosed(folder: Folder) -> Diagnosis:
    """Diagnose a run, whatever state its records are in."""
    from sharpen.evidence.diagnose.diagnosis import diagnose, read_run

    try:
        return Diagnosis(findings=diagnose(read_run(folder.path)))
    except Exception as error:  # whatever damaged records lead to: the page says it
        return Diagnosis(problem=(str(error).strip() or type(error).__name__).splitlines()[0])
