"""Further policies over the trained model, which answer the agents of their names (docs/use/policies.md).

In: `policies`, the embedded engine. Out: an engine that serves their weights beside the trained ones, and the adapter
of each policy for the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharpen.config.run import PolicyConfig
from sharpen.config.trainer import LoraConfig

if TYPE_CHECKING:
    from sharpen.contracts import Engine


def train_beside(engine: Engine, policies: Mapping[str, PolicyConfig], lora: LoraConfig | None) -> None:
    """Let the engine keep the original weights beside the trained ones, if there are policies (`run.decide`)."""
    if not policies:
        return
    from sharpen.engine.embedded.engine import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine)
    assert lora is not None
    engine.train_beside(lora)


def adapters_of(policies: Mapping[str, PolicyConfig]) -> Mapping[str, str]:
    """Return the adapter that answers each policy's calls."""
    return {name: policy.follow for name, policy in policies.items()}
