"""Further policies over the trained model, which answer the agents of their names (docs/use/policies.md).

In: `policies`, the embedded engine. Out: an engine that serves their weights beside the trained ones, and the adapter
of each policy for the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharpen.config.run import PolicyConfig
from sharpen.config.trainer import LoraConfig
from sharpen.contracts import ORIGINAL

if TYPE_CHECKING:
    from sharpen.contracts import Engine

Policies = Mapping[str, PolicyConfig]


def train_beside(engine: Engine, policies: Policies, lora: LoraConfig | None) -> None:
    """Let the engine keep the original weights and snapshots beside the trained ones, if there are policies
    (`run.decide`)."""
    if not policies:
        return
    from sharpen.engine.embedded.engine import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine)
    assert lora is not None
    engine.train_beside(lora, snapshots_of(policies))


def adapters_of(policies: Policies) -> Mapping[str, str]:
    """Return the adapter that answers each policy's calls."""
    return {name: ORIGINAL if one.every is None else _snapshot(one.every) for name, one in policies.items()}


def snapshots_of(policies: Policies) -> dict[str, int]:
    """Return after how many versions each snapshot is renewed, by its adapter's name; policies may share one."""
    return {_snapshot(one.every): one.every for one in policies.values() if one.every is not None}


def _snapshot(every: int) -> str:
    return f"snapshot_{every}"
