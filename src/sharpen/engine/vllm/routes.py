"""The experts that vLLM returns, in the form in which Sharpen's own engine records them.

In: a mixture of experts on the meta device; vLLM's array of a request. Out: `RouteArray`s.

Shape suffixes: N tokens of prompt and continuation but the last, L layers with a router, K experts of a token; H hidden
layers of the model, with a router or not.
"""

from __future__ import annotations

from typing import Any

from sharpen.errors import EngineError
from sharpen.models.routing import Routing
from sharpen.types import RouteArray


class Routes:
    """Reads the experts of one model."""

    def __init__(self, routing: Routing) -> None:
        self._shape = routing.shape
        self._layers = routing.layers

    def read(self, returned: Any, num_tokens: int) -> RouteArray:
        """Return the experts of `num_tokens` tokens (N, L, K) out of `returned`, a shape of (at least N, H, K). What is
        before the last N is of tokens that were computed again later.

        Raises `EngineError` if some are missing: nothing is trained on a routing that is not known.
        """
        num_returned = 0 if returned is None else len(returned)
        if num_returned < num_tokens:
            raise EngineError(f"vLLM returned the experts of {num_returned} tokens, not of {num_tokens}")
        routes_NLK: RouteArray = returned[num_returned - num_tokens :, self._layers].astype(self._shape.dtype)
        return routes_NLK
