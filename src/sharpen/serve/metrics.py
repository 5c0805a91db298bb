"""What a server has done so far, as Prometheus reads it.

In: counts, on the serving loop. Out: text in Prometheus's format
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: its name without `sharpen_`, its kind (counter, gauge), and its value for each set of labels."""

    name: str
    kind: str
    text: str
    values: Mapping[Labels, float]


@dataclass(slots=True, kw_only=True)
class Requests:
    """The requests that have ended, by path and status; their seconds, from the first byte of the request to the last
    of the answer; their tokens; how many are running."""

    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: float = 0.0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    running: int = 0

    def metrics(self) -> Iterator[Metric]:
        """Yield them."""
        by_labels: dict[Labels, float] = {
            (("path", path), ("status", str(status))): n for (path, status), n in self.ended.items()
        }
        yield Metric(name="requests_total", kind="counter", text="Requests that have ended.", values=by_labels)
        for name, kind, text, value in (
            ("request_seconds_total", "counter", "Seconds of the requests that have ended.", self.seconds),
            ("prompt_tokens_total", "counter", "Tokens of the prompts.", self.prompt_tokens),
            ("sampled_tokens_total", "counter", "Tokens sampled.", self.sampled_tokens),
            ("requests_running", "gauge", "Requests that are being answered.", self.running),
        ):
            yield single(name, kind, text, value)


def single(name: str, kind: str, text: str, value: float) -> Metric:
    """Return a metric without labels."""
    return Metric(name=name, kind=kind, text=text, values={(): value})


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Return the metrics as Prometheus reads them."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP sharpen_{metric.name} {metric.text}", f"# TYPE sharpen_{metric.name} {metric.kind}"]
        for labels, value in metric.values.items():
            written = ",".join(f'{name}="{label.translate(_ESCAPES)}"' for name, label in labels)
            lines.append(f"sharpen_{metric.name}{f'{{{written}}}' if written else ''} {value}")
    return "".join(f"{line}\n" for line in lines).encode()
