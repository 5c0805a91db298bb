"""Checks that a run continues with the settings, model and datasets that it started with.

In: the settings recorded in the directory (`resolved.json`), the configuration, the identities of model and datasets.
Out: a line for each change that is allowed; `ConfigError` with both values for those that are not. Settings from before
a change are kept: steps up to 7 were made with `resolved.until_step_7.json`, later ones with the next such file, or
with `resolved.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from sharpen.config.explain import section_at
from sharpen.config.load import CHOSEN, hidden_values, shown, shown_settings
from sharpen.config.resuming import ANOTHER_NAME, may_change, recorded_settings, setting_of
from sharpen.config.run import RunConfig
from sharpen.config.secrets import HIDDEN, is_same
from sharpen.errors import ConfigError
from sharpen.files import write_whole
from sharpen.models.identity import Identity

IDENTITY = "identity."
"""Prefix of the derived entries of `resolved.json` that hold the identities of model and datasets."""
_IDENTITY_OF = {
    "model.model_path": "model",
    "train_dataset.path": "train_dataset",
    "eval_dataset.path": "held_out",
    "expert.dataset.path": "expert",
    "distill.teacher_path": "teacher",
}
"""Settings that are compared by the identity of their files, where that was recorded, and not by their value. A part
that the user brings has its identity under the setting's own name."""
_BY_LAST_NAME = ("path", "model_path", "teacher_path", "workflow", "judge")
"""Settings that name a file or folder. Without an identity only the last part of the path is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting, or the content of its files, that has changed; `before` and `now` are the same if a secret has."""

    setting: str
    before: Any
    now: Any

    @property
    def of_secret(self) -> bool:
        """Whether nothing but a secret has changed."""
        return bool(self.before == self.now)

    def __str__(self) -> str:
        if self.of_secret:
            return f"{self.setting}: {_show(self.before)}, of which the hidden part is another one now"
        return f"{self.setting}: {_show(self.before)} -> {_show(self.now)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The settings of a run by dotted name, without secrets, which may change; and the identities of its model and
    datasets. Of values with secrets a record has the fingerprints, or the values themselves (`hidden`). `chosen` are
    the names of the settings that the run chose by itself."""

    values: Mapping[str, Any]
    identities: Mapping[str, Identity]
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict, repr=False)
    chosen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: RunConfig, identities: Mapping[str, Identity]) -> RunRecord:
        """Return the record of a configuration."""
        values = json.loads(json.dumps(shown_settings(config)))
        return cls(values=values, identities=identities, hidden=hidden_values(config))


def read_recorded(path: Path) -> RunRecord | None:
    """Return the record with which the run in `path` last started; None if there is none. Raises `ConfigError` if it
    cannot be read."""
    file = path / "resolved.json"
    if not file.exists():
        return None
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        derived = {name: entry["value"] for name, entry in entries.items() if entry["origin"] == "derived"}
        values = {name: shown(tuple(name.split(".")), value) for name, value in recorded_settings(entries).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read {file} ({error}), so the settings of the run are not known. Restore the file; or move it "
            "away, and the run goes on without comparing its settings"
        ) from error
    identities = {name.removeprefix(IDENTITY): value for name, value in derived.items() if name.startswith(IDENTITY)}
    fingerprints = {name: str(entry["fingerprint"]) for name, entry in entries.items() if "fingerprint" in entry}
    chosen = frozenset(name for name, entry in entries.items() if entry["origin"] == CHOSEN)
    return RunRecord(values=values, identities=identities, fingerprints=fingerprints, chosen=chosen)


def changes(before: RunRecord, now: RunRecord) -> list[Change]:
    """Return all differences except files and folders that have only moved. A setting missing from `before` counts as
    its default, if its section was there; one that no longer exists is not compared."""
    found = []
    defaults = _defaults()
    for name in sorted(before.values.keys() | now.values.keys()):
        change = Change(setting=name, before=_value(name, before, defaults), now=now.values.get(name))
        if name in before.fingerprints and name in now.values:
            same = is_same(now.hidden.get(name, change.now), before.fingerprints[name])
        else:
            same = _agree(change.before, change.now)
        if not same and setting_of(name) is not None and (change.of_secret or not _moved(change, before, now)):
            found.append(change)
    for name in sorted(before.identities.keys() & now.identities.keys()):
        if (earlier := before.identities[name]) != (later := now.identities[name]):
            found.append(Change(setting=f"what {name} holds", before=earlier, now=later))
    return found


def check_same_run(path: Path, before: RunRecord, now: RunRecord) -> list[str]:
    """Return a line for each change since the run in `path` last started. Raises `ConfigError` for changes that a run
    may not make."""
    found = changes(before, now)
    if refused := [change for change in found if not (change.of_secret or may_change(change.setting))]:
        lines = "\n".join(f"  - {change}" for change in refused)
        raise ConfigError(
            f"the run {path.name!r} exists, and these settings cannot change when it continues (was -> is):\n"
            f"{lines}\nRestore them (from {path / 'resolved.json'}), or choose {ANOTHER_NAME}; to train on "
            f"from this run's weights, give its checkpoint as model_path ({path / 'latest'})"
        )
    return [f"changed since the run last started: {change}" for change in found]


def keep_settings(path: Path, step: int) -> None:
    """Copy the settings of the steps up to `step` to `resolved.until_step_<step>.json`, before they are replaced.
    Settings whose steps were all undone since are deleted."""
    target = path / f"resolved.until_step_{step}.json"
    kept = {int(re.findall(r"\d+", file.name)[-1]): file for file in path.glob("resolved.until_step_*.json")}
    reaching = sorted(until for until in kept if until >= step)
    if not reaching:
        write_whole(target, _without_secrets((path / "resolved.json").read_bytes()))
        return
    kept[reaching[0]].replace(target)
    for until in reaching[1:]:
        kept[until].unlink()


def _without_secrets(content: bytes) -> bytes:
    """Return a `resolved.json` without the secrets that somebody wrote into it, or an earlier version did."""
    entries = json.loads(content)
    for name, entry in entries.items():
        entry["value"] = shown(tuple(name.split(".")), entry["value"])
    return f"{json.dumps(entries, indent=2, ensure_ascii=False, sort_keys=True)}\n".encode()


def _defaults() -> dict[str, Any]:
    """Return the defaults of the settings that have one."""
    smallest = {"train_dataset": {"path": ""}, "model": {"model_path": "", "max_model_len": 2}}
    return dict(RunRecord.of(RunConfig.model_validate(smallest), {}).values)


def _value(name: str, before: RunRecord, defaults: Mapping[str, Any]) -> Any:
    """Return the recorded value of a setting, or the default of one that is newer than the record. In an optional
    section only that which was there has defaults: `trainer.lora`, `auxiliary_models.judge`."""
    if name in before.values or name in defaults:
        return before.values.get(name, defaults.get(name))
    section, _, last = name.rpartition(".")
    if (setting_of(name) or "").count(".") != name.count("."):  # a key that the user named, as in `workflow_args`
        return None
    if not any(other.startswith(f"{section}.") for other in before.values):
        return None
    default = section_at(RunConfig, section.split(".")).model_fields[last].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else json.loads(json.dumps(default))


def _agree(before: Any, now: Any) -> bool:
    """Whether two values are the same, as far as the earlier one is known: `***` without a fingerprint is not."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_agree(before[key], now[key]) for key in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_agree, before, now))
    return bool(before == now or (before == HIDDEN and now is not None))


def _moved(change: Change, before: RunRecord, now: RunRecord) -> bool:
    """Whether a setting names the same file or folder at another path: the same identity where that was recorded, else
    the same last part of the path."""
    if change.setting in ("workflow", "judge") and None in (change.before, change.now):
        return True  # a function passed in Python has no name in the settings
    known = _IDENTITY_OF.get(change.setting, change.setting)
    if known in before.identities and known in now.identities:
        return before.identities[known] == now.identities[known]
    if not isinstance(change.before, str) or not isinstance(change.now, str):
        return False
    by_name = change.setting.rpartition(".")[2] in _BY_LAST_NAME
    return by_name and Path(change.before).name == Path(change.now).name


def _show(value: Any) -> str:
    if isinstance(value, Mapping) and "digest" in value:
        return ", ".join(f"{value[name]} {name}" for name in value if name != "digest") + f" (digest {value['digest']})"
    text = "none" if value is None else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
