"""When weights move in a Trinity-RFT file: its section `synchronizer`.

In: a draft with every key that the file gives. Out: the draft, with those of style, intervals and offset answered for.
A batch of the explorer's there is a step here; the trainer's steps there are updates, of which a step may have several.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft

_STYLES = {
    "fixed": "fixed",
    "explorer_driven": "dynamic_by_explorer",
    "trainer_driven": "dynamic_by_trainer",
    "dynamic_by_explorer": "dynamic_by_explorer",
    "dynamic_by_trainer": "dynamic_by_trainer",
    "fully_async": "fully_async",
}
_STYLE, _INTERVAL, _OFFSET = (f"synchronizer.{name}" for name in ("sync_style", "sync_interval", "sync_offset"))
_EXPLORER, _TRAINER = (f"synchronizer.{side}_sync_interval" for side in ("explorer", "trainer"))


def style(draft: Draft) -> str | None:
    """Ours for the file's style; None where there is no such style."""
    return _STYLES.get(draft.given.get(_STYLE, "fixed").lower())


def synchronizer(draft: Draft) -> None:
    """Style, interval and offset."""
    found, given = style(draft), draft.get(_STYLE)
    if draft.in_two_processes:
        draft.idle(
            "the explorer takes the newest weights, and never waits (docs/use/two-processes.md)", _STYLE, _OFFSET
        )
        _interval(draft, "dynamic_by_trainer")
        return
    if found is None:
        draft.wrong(_STYLE, f"must be one of {', '.join(_STYLES)}, got {given!r}")
    elif given is not None:
        draft.set("sync.style", found, _STYLE)
    _interval(draft, found)
    if found != "fully_async":
        draft.move(_OFFSET, "sync.offset")
    elif draft.get(_OFFSET):
        draft.idle("with fully_async nobody waits, there and here (sync.max_staleness bounds how far ahead)", _OFFSET)


def _interval(draft: Draft, found: str | None) -> None:
    """That of the side that asks; of the explorer where both do."""
    asks, other = (_TRAINER, _EXPLORER) if found in ("dynamic_by_trainer", "fully_async") else (_EXPLORER, _TRAINER)
    key = asks if asks in draft.given else _INTERVAL
    left = (other,) if key == _INTERVAL else (other, _INTERVAL)
    draft.idle(f"weights move after the steps that {key} counts (sync.interval)", *left)
    number = draft.get(key)
    if number is not None:
        updates = draft.tree.get("trainer", {}).get("num_minibatches", 1) if asks == _TRAINER else 1
        steps = -(-number // updates)
        draft.set("sync.interval", steps, key)
        if steps != number:
            draft.say(f"that many updates are {steps} step{'s' if steps > 1 else ''} of {updates} (sync.interval)", key)
