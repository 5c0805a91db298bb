"""One GPU, measured: the whole table of docs/use/gpu.md by one command.

In: nothing (a Qwen3 model in the shape of Qwen3-0.6B is made here with random weights; the quickstart's model is the
shipped one). Out: a table, and `bench/out/gpu.json`, written anew after every part, so that a run that is cut off
leaves what it measured. Each part runs in a process of its own with a time limit: one that fails, runs out of memory
or hangs is named in the table with its last line, and the next one goes on. The exit code is 1 if a part failed or an
aim was missed. Formulas (MFU, the bound by memory) are in `formulas.py`.

    python bench/gpu/run.py [--only engine,sync] [--skip quickstart] [--out DIR] [--part-limit-s 300]
    python bench/gpu/run.py --smoke      # the same code on a CPU, in small: it tells whether it runs, not how fast
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import report

HERE = Path(__file__).parent
PARTS = (
    "device",
    "engine",
    "parity",
    "sync",
    "training-0",
    "training-1",
    "training-tree",
    "training-2",
    "attention",
    "training-flash",
    "transformers",
    "quickstart",
    "vllm",
)
"""In the order of their worth, should time run out."""
REPETITIVE = {"training-1", "training-2"}
"""Left out of the smoke run: training-0 with other lengths."""
AIMS = {
    "MFU, one sequence of 16384": (">=", 0.4),
    "engine against trainer, mean |logprob gap|": ("<=", 0.01),
    "weights into the engine, from the trainer's tensors": ("<=", 10.0),
}


def run_part(name: str, *, smoke: bool) -> list[dict[str, Any]]:
    """Measure one part in this process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import measures
    import torch
    import training

    setting = measures.make_setting(smoke=smoke)
    if smoke:
        torch.set_num_threads(1)
    kinds: dict[str, Callable[[measures.Setting], list[measures.Row]]] = {
        "device": measures.device_part,
        "engine": measures.engine_part,
        "transformers": measures.transformers_part,
        "vllm": measures.vllm_part,
        "attention": training.attention_part,
        "parity": training.parity_part,
        "sync": training.sync_part,
        "quickstart": training.quickstart_part,
        "training-tree": training.tree_part,
        "training-flash": training.flash_part,
    }
    for index in range(3):
        kinds[f"training-{index}"] = training.sequence_part(index)
    return [asdict(row) for row in kinds[name](setting)]


def part_in_process(name: str, *, smoke: bool, out: Path, limit_s: float) -> dict[str, Any]:
    """The part's rows, or how it failed; its output goes to `out`."""
    result, log = out / f"gpu_{name}.json", out / f"gpu_{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "run.py"), "--part", name, "--out", str(out), *(["--smoke"] if smoke else [])]
    environment = {**os.environ, "SHARPEN_BENCH_OUT": str(out)}
    began = time.monotonic()
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:g} s"
        finally:
            end_group(process)
    part: dict[str, Any] = {"part": name, "seconds": round(time.monotonic() - began, 1), "rows": []}
    if code == 0 and result.exists():
        return {**part, "rows": json.loads(result.read_text())}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {**part, "failed": f"{code}: {lines[-1] if lines else 'no output'}"}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the part and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdicts(parts: Sequence[dict[str, Any]]) -> list[tuple[str, bool | None]]:
    """Each aim, and whether it was met (None: no figure)."""
    found = {row["measure"]: row["value"] for part in parts for row in part["rows"]}
    judged: list[tuple[str, bool | None]] = []
    for measure, (sign, aim) in AIMS.items():
        value = found.get(measure)
        met = None if value is None else (value >= aim if sign == ">=" else value <= aim)
        judged.append((f"{measure} {sign} {aim:g}", met))
    return judged


def show(parts: Sequence[dict[str, Any]]) -> str:
    """The table, failed parts included."""
    rows: list[list[object]] = []
    for part in parts:
        for row in part["rows"]:
            small = row["value"] is not None and 0 < abs(row["value"]) < 0.01
            value = f"{row['value']:.2e}" if small else row["value"]
            rows.append([part["part"], row["measure"], value, row["unit"], row["note"]])
        if "failed" in part:
            rows.append([part["part"], "FAILED", None, "", part["failed"][:120]])
    return report.table(("part", "measure", "value", "unit", "note"), rows)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", default="", help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--skip", default="", help="parts to leave out")
    parser.add_argument("--out", type=Path, default=report.OUT)
    parser.add_argument("--part-limit-s", type=float, default=300.0)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part is not None:
        rows = run_part(arguments.part, smoke=arguments.smoke)
        (arguments.out / f"gpu_{arguments.part}.json").write_text(json.dumps(rows))
        return 0
    only, skip = ({name for name in text.split(",") if name} for text in (arguments.only, arguments.skip))
    if unknown := (only | skip) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    described, parts = report.machine(), []
    name = "gpu_smoke" if arguments.smoke else "gpu"
    for part in PARTS:
        if (only and part not in only) or part in skip or (arguments.smoke and not only and part in REPETITIVE):
            continue
        parts.append(part_in_process(part, smoke=arguments.smoke, out=arguments.out, limit_s=arguments.part_limit_s))
        print(f"{part}: {parts[-1]['seconds']:g} s {parts[-1].get('failed', '')}", flush=True)
        content = {"machine": described, "smoke": arguments.smoke, "parts": parts}
        (arguments.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{described['gpu'] or described['processor']}, torch {described['torch']}\n")
    print(show(parts))
    failed = [part["part"] for part in parts if "failed" in part]
    missed = False
    for text, met in [] if arguments.smoke else verdicts(parts):
        print(f"  {'no figure' if met is None else 'ok' if met else 'MISSED'}: {text}")
        missed |= met is False
    print(f"\nwritten to {arguments.out / f'{name}.json'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
