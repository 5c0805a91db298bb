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
    word = draft.given.get(_STYLE)
    return _STYLES.get(word.lower()) if isinstance(word, str) else "fixed"


def synchronizer(draft: Draft) -> None:
    """Style, interval and offset."""
    found = style(draft)
    if found is None:
        draft.wrong(_STYLE, f"must be one of {', '.join(_STYLES)}, but {draft.given[_STYLE]!r} came")
        found = "fixed"
    elif draft.word(_STYLE) is not None:
        draft.set("sync.style", found, _STYLE)
    draft.same(_STYLE)
    _interval(draft, found)
    if found == "fully_async" and draft.whole(_OFFSET):
        draft.idle(_OFFSET, "with fully_async nobody waits, there and here (sync.max_staleness bounds how far ahead)")
    elif found != "fully_async" and draft.given.get(_OFFSET) is not None:
        draft.set("sync.offset", draft.given[_OFFSET], _OFFSET)
    draft.same(_OFFSET)


def _interval(draft: Draft, found: str) -> None:
    """That of the side that asks; of the explorer where both do."""
    asks, other = (_TRAINER, _EXPLORER) if found in ("dynamic_by_trainer", "fully_async") else (_EXPLORER, _TRAINER)
    key = asks if draft.given.get(asks) is not None else _INTERVAL
    for left in (other, _INTERVAL):
        if left != key and draft.given.get(left) is not None:
            draft.idle(left, f"weights move after the steps that {key} counts (sync.interval)")
    draft.same(asks, other, _INTERVAL)
    number = draft.whole(key)
    if number is None:
        return
    updates = draft.tree.get("trainer", {}).get("num_minibatches", 1) if asks == _TRAINER else 1
    steps = -(-number // updates)
    draft.set("sync.interval", steps, key)
    if steps != number:
        draft.say(f"that many updates are {steps} step{'s' if steps > 1 else ''} of {updates} (sync.interval)", key)
