"""Counts of the calls and tokens of auxiliary models, per attempt and for the whole run, and the run's token cap.

In: counts from whatever serves a call (our engine's gateway, an endpoint's transport), on any thread. Out: a `Tally`
for each attempt, a total for the run, and `TokenCapError` for a call made after the cap is reached.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from sharpen.errors import TokenCapError
from sharpen.gateway.requests import ApiError


class Meter:
    """The tokens (prompt plus sampled) that the whole run has used of one auxiliary model.

    `max_total_tokens` None means no limit. Calls in flight when the cap is reached are completed and counted, so the
    total may exceed the cap by their tokens.
    """

    def __init__(self, name: str, model_path: str, max_total_tokens: int | None) -> None:
        self.name, self.model_path = name, model_path
        self.max_total_tokens = max_total_tokens
        self.total_tokens = 0
        self._lock = threading.Lock()

    def add(self, num_tokens: int) -> None:
        """Add tokens to the run's total."""
        with self._lock:
            self.total_tokens += num_tokens

    def refusal(self) -> TokenCapError | None:
        """Return the error for a call after the cap is reached; None before."""
        if self.max_total_tokens is None or self.total_tokens < self.max_total_tokens:
            return None
        return TokenCapError(
            f"the auxiliary model {self.name!r} ({self.model_path}) has used {self.total_tokens} tokens, and "
            f"auxiliary_models.{self.name}.max_total_tokens is {self.max_total_tokens}: raise the cap, or leave it out "
            "for no limit"
        )


class Tally:
    """The calls and tokens that one attempt has used of one auxiliary model.

    `refused` is set when the run's cap refused one of its calls.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.num_calls = 0
        self.num_tokens = 0
        self.refused: TokenCapError | None = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[str, float]:
        """Calls and tokens (prompt plus sampled) of this attempt."""
        return {"calls": float(self.num_calls), "tokens": float(self.num_tokens)}

    def admit(self) -> ApiError | None:
        """Return the error to answer a call with if no tokens are left; else None. Called before each call."""
        refusal = self.meter.refusal()
        if refusal is None:
            return None
        self.refused = refusal
        return ApiError(str(refusal), status=403, code="token_cap_reached", kind="permission_error")

    def add(self, *, calls: int = 0, tokens: int = 0) -> None:
        """Add to the counts of this attempt and of the run."""
        with self._lock:
            self.num_calls += calls
            self.num_tokens += tokens
        self.meter.add(tokens)


# The time during which at least one request was at the engine.
#
# In: the start and end of every request, on the serving loop. Out: seconds, readable from any thread.


class BusyClock:
    """A clock that runs while at least one `with` block of it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0
        self.num_ended = 0
        """How many blocks have ended."""

    def __enter__(self) -> None:
        with self._lock:
            if self._open == 0:
                self._since = time.perf_counter()
            self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open -= 1
            self.num_ended += 1
            if self._open == 0:
                self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the seconds so far, including those of requests still open."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)
