"""Shared end of every bench script: describe the machine, print a table, write `bench/out/NAME.json`, judge the
targets.

In: measured rows and ratios. Out: a table on stdout, a JSON file with `ratios` and `ok`, an exit code. The folder is
`bench/out`, or what the variable BENCH_OUT names.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("BENCH_OUT") or Path(__file__).parent / "out")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and library versions of this machine."""
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain text columns, numbers right-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(header[i]), *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True))]
    for row, values in zip(cells, rows, strict=True):
        parts = [
            cell.rjust(width) if isinstance(value, int | float) else cell.ljust(width)
            for cell, value, width in zip(row, values, widths, strict=True)
        ]
        lines.append("  ".join(parts))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def finish(
    name: str,
    *,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    ratios: Mapping[str, float],
    at_least: Mapping[str, float] | None = None,
    at_most: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> int:
    """Print the table and the verdict on each target, write `bench/out/NAME.json`; 0 if every target is met, else 1."""
    described = machine()
    print(f"\n{described['processor']}, {described['threads']} threads, torch {described['torch']}\n")
    print(table(header, rows))
    print()
    ok = True
    for key, target in (at_least or {}).items():
        ok &= _verdict(key, ratios[key], target, ratios[key] >= target, ">=")
    for key, target in (at_most or {}).items():
        ok &= _verdict(key, ratios[key], target, ratios[key] <= target, "<=")
    for key in ratios.keys() - {*(at_least or {}), *(at_most or {})}:
        print(f"  {key} = {ratios[key]:.3f} (reported)")
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    content = {"ratios": dict(ratios), "ok": ok, "machine": described, **(extra or {})}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return 0 if ok else 1


def _verdict(key: str, value: float, target: float, met: bool, sign: str) -> bool:
    print(f"  {'ok    ' if met else 'MISSED'} {key} = {value:.3f} (target {sign} {target})")
    return met
