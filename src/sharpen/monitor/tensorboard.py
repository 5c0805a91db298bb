"""Write TensorBoard's event files with its records, but without its writers.

In: a step and its numbers. Out: an event file that TensorBoard shows as scalars. The writers of TensorBoard and torch
take 0.25 s and 1.5 s to import and load plugins; the records alone take 0.04 s. The file format is simple: each record
is its length, a checksum of the length, the record, and a checksum of the record (little-endian).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoardSink:
    """An event file in `folder`. With `resume_step`, it tells TensorBoard to forget the later steps of earlier
    files."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        taken = len(list(folder.glob(f"{name}*")))
        self._file = (folder / f"{name}.{taken}").open("xb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one event with all numbers and flush it."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        record: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        self._file.write(length + _checksum(length) + record + _checksum(record))
        self._file.flush()


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
