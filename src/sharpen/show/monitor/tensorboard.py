"""Write TensorBoard's event files with its records, but without its writers.

In: a step and its numbers, samples, the run's settings. Out: an event file that TensorBoard shows as scalars, texts and
hyperparameters. A few numbers are what one looks at first; the others stand under `~debug/`, which TensorBoard sorts to
the end, and only those that change, none of them twice. The writers of TensorBoard and torch
take 0.25 s and 1.5 s to import and load plugins; the records alone take 0.04 s. The file format is simple: each record
is its length, a checksum of the length, the record, and a checksum of the record (little-endian).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING as _STRING
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

FIRST: Mapping[str, str] = {
    "reward/mean": "reward/mean",
    "eval/sampled/accuracy": "reward/held-out sampled",
    "eval/greedy/accuracy": "reward/held-out greedy",
    "eval/loss": "reward/held-out loss",
    "reward/std": "reward/std",
    "reward/flat_groups": "reward/flat_groups",
    "rollout/excluded_share": "rollouts/excluded share",
    "rollout/truncated_share": "rollouts/truncated share",
    "rollout/sampled_tokens": "rollouts/tokens",
    "rollout/seconds": "rollouts/seconds",
    "time/step_s": "time/step",
    "tokens/per_s": "time/tokens per second",
    "trainer/loss": "training/loss",
    "trainer/entropy": "training/entropy",
    "trainer/kl": "training/KL to the reference",
    "trainer/grad_norm": "training/gradient norm",
    "trainer/clip_fraction": "training/clipped share",
    "trainer/learning_rate": "training/learning rate",
}
"""The numbers to look at first, by their name in `metrics.jsonl`."""
OWN = ("judge/", "workflow/")
"""What the owner's functions measured is looked at first too, below `reward parts/`."""
TWICE = frozenset({"batch/reward_mean", "batch/reward_std", "batch/groups_zero_variance", "batch/rollouts"})
"""Numbers that other names have too."""


def tag_of(name: str) -> str:
    """Return the tag of a number in TensorBoard; an empty one for a number that is there already."""
    if name in TWICE:
        return ""
    return FIRST.get(name) or (f"reward parts/{name}" if name.startswith(OWN) else f"~debug/{name}")


class TensorBoardSink:
    """An event file in `folder`. With `resume_step`, it tells TensorBoard to forget the later steps of earlier
    files. `settings` are shown as hyperparameters."""

    def __init__(self, folder: Path, resume_step: int | None = None, settings: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        taken = len(list(folder.glob(f"{name}*")))
        self._file = (folder / f"{name}.{taken}").open("xb", buffering=0)
        self._num_bytes = 0
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))
        self._still: dict[str, tuple[int, float]] = {}
        self._moved: set[str] = set()
        if settings:
            self._write(Event(wall_time=time.time(), summary=Summary(value=[_hyperparameters(settings)])))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the numbers."""
        now: dict[str, float] = {}
        for name, value in metrics.items():
            tag = tag_of(name)
            if not tag.startswith("~") or tag in self._moved:
                now |= {tag: value} if tag else {}
            elif (first := self._still.setdefault(tag, (step, value)))[1] != value:  # it changes: write both
                self._moved.add(tag)
                self._scalars(first[0], {tag: first[1]})
                now[tag] = value
        self._scalars(step, now)

    def sample(self, step: int, text: str) -> None:
        """Append a text of this step, in Markdown."""
        tensor = TensorProto(dtype=_STRING, string_val=[text.encode()])
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="samples/best and worst of the step", metadata=about, tensor=tensor)
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def _scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        if numbers:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        record: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        data = length + _checksum(length) + record + _checksum(record)
        written = self._file.write(data)
        if written != len(data):  # a full disk: half a record would hide those after it
            self._file.truncate(self._num_bytes)
            self._file.seek(self._num_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._num_bytes += written


def _hyperparameters(settings: Mapping[str, Any]) -> Summary.Value:
    """Return the record of TensorBoard's HPARAMS page: numbers and truth values as they are, anything else as text."""
    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = "" if value is None else str(value)
    content = HParamsPluginData(version=0, session_start_info=start).SerializeToString()
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="hparams", content=content))
    return Summary.Value(tag="_hparams_/session_start_info", metadata=about)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C (Castagnoli), rotated and offset as the TFRecord format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))
