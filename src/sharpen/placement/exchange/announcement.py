"""What an explorer says of itself before its first batch, so that a trainer can tell whether both do the same run.

In: the settings that both must share, a probe of the engine. Out: JSON, as content 0 of the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.types import Experience

_SHARED = (
    *("algorithm.algorithm_type", "algorithm.batch_size", "algorithm.group_size"),
    *("model.temperature", "model.max_model_len", "engine.dtype", "trainer.train_towers"),
)
"""Settings that explorer and trainer must agree on; the announcement of an earlier version may not have all."""
_ARRAYS = {
    "ids_T": np.int32,
    "loss_mask_T": np.bool_,
    "logprobs_T": np.float32,
    "versions_T": np.int32,
    "calls_T": np.int32,
    "temperatures_T": np.float32,
    "advantages_T": np.float32,
    "weights_T": np.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """`total_steps` is how many batches the explorer rolls out; `model` identifies the model's files; `settings` are
    those that must agree, by dotted name; `probe` is what the engine sampled with the weights of the files."""

    total_steps: int
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    probe: Sequence[Experience]

    @classmethod
    def of(
        cls, config: RunConfig, *, total_steps: int, model: Mapping[str, Any], probe: Sequence[Experience]
    ) -> Announcement:
        """The announcement of an explorer with these settings."""
        return cls(total_steps=total_steps, model=dict(model), settings=_shared(config), probe=probe)

    def check(self, config: RunConfig, model: Mapping[str, Any], *, who: str = "the explorer and this trainer") -> None:
        """Raise `ConfigError` if a trainer with these settings and this model is not of the same run; or another
        server, by `who`."""
        now = _shared(config)
        wrong = [
            f"{name}: {self.settings[name]!r} there, {now[name]!r} here"
            for name in _SHARED
            if self.settings.get(name, now[name]) != now[name]
        ]
        if dict(self.model) != json.loads(json.dumps(dict(model))):
            wrong.append(f"model: {dict(self.model)} there, {dict(model)} here")
        if wrong:
            raise ConfigError(
                f"{who} do not do the same run: " + "; ".join(wrong) + ". Give both the same "
                "settings, or this one another name"
            )

    def to_bytes(self) -> bytes:
        """The announcement as JSON."""
        content = {
            "total_steps": self.total_steps,
            "model": dict(self.model),
            "settings": dict(self.settings),
            "probe": [_probe_to_json(one) for one in self.probe],
        }
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Announcement:
        """Read an announcement back."""
        fields = json.loads(content)
        return cls(**{**fields, "probe": [_probe_from_json(one) for one in fields["probe"]]})


def _shared(config: RunConfig) -> dict[str, Any]:
    found = {}
    for name in _SHARED:
        section, _, key = name.partition(".")
        found[name] = getattr(getattr(config, section), key)
    return found


def _probe_to_json(probe: Experience) -> dict[str, Any]:
    """Plain lists: a float32 is exactly a float64, which JSON writes so that it reads back the same."""
    names = ("rollout_id", "group_id", "task_id")
    return {name: getattr(probe, name) for name in names} | {name: getattr(probe, name).tolist() for name in _ARRAYS}


def _probe_from_json(content: Mapping[str, Any]) -> Experience:
    arrays: dict[str, Any] = {name: np.asarray(content[name], dtype) for name, dtype in _ARRAYS.items()}
    return Experience(**{**content, **arrays})
