"""`make bench-memory`: what a run of a real size holds, against its plan and the bounds set for it.

In: nothing (models of Qwen3's shapes with random weights are made here, in `--folder` to keep them). Out: a table and
`bench/out/memory.json`. Each case is a whole run in a process of its own, with nothing set but model, agent, algorithm,
bfloat16 (which a run chooses where it is faster) and what its name says: 4 tasks x 8 rollouts a step (`--tasks`,
`--group`), prompts of about 200 tokens, two calls of 64 tokens, and `model.max_model_len: 1024`. The run chooses the
rest, compares gradients with the certificate's plain loop, and makes a step; two where all weights train, whose moments
are there from the first update on.

- measured: the peak of the process and all below it, looked at every 100 ms; each page counts once for those that share
  it (PSS, by Linux).
- planned: the plan's peak, with the lengths that came; `before` as it was said at the start.
- bounds, in GB of 10**9 bytes: 0.6B with adapters 4, all weights 14; 1.7B with adapters 9, in 4 bits 5.

Planned over measured within 10% is a target; so are the bounds.

    python bench/memory.py [--cases 0.6B-lora 1.7B-nf4 …] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import growth
import plain
import psutil
import report

from sharpen.machine import filling_gaps

TRAINERS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 16}},
    "nf4": {"lora": {"rank": 16, "base": "nf4"}},
    "all": {},
}
BOUNDS_GB: dict[str, float | None] = {
    "0.6B-lora": 4.0,
    "0.6B-all": 14.0,
    "1.7B-lora": 9.0,
    "1.7B-nf4": 5.0,
    "4B-nf4": None,
    "tiny-lora": None,
}
"""The cases: a shape of `real.py`, and a trainer. Tiny is for tests."""
WITHIN = 0.10
PROMPT, SAMPLED = 200, 64


def make_model(size: str, folder: Path) -> Path:
    """Write a checkpoint with random weights in bfloat16 and the quickstart's tokenizer, unless it is there. The
    tokens that the tokenizer lacks are words that no text has."""
    from real import make_model as random_model

    path = folder / size
    if (path / "tokenizer.json").exists():
        return path
    model = random_model(size)
    source = plain.QUICKSTART / "model"
    own = json.loads((source / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, own.get(name))
    model.save_pretrained(path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(source / name, path / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    missing = (place for place in range(model.config.vocab_size) if place not in known)
    tokenizer["model"]["vocab"] |= {f"w{place}": place for place in missing}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def run_case(arguments: argparse.Namespace) -> None:
    """Make the run of a case, in this process."""
    from transformers import AutoTokenizer

    from sharpen import DatasetConfig, tune

    name: str = arguments.case
    model = arguments.folder / name.split("-")[0]
    talker = growth.Talker(len(AutoTokenizer.from_pretrained(model)(growth.WORDS).input_ids), sampled=SAMPLED)
    talker.shape = growth.Shape(turns=2, prompt=PROMPT)
    tune(
        workflow_func=talker.talk,
        judge_func=talker.judge,
        train_dataset=DatasetConfig(path=str(plain.QUICKSTART / "data"), split="train", total_steps=arguments.steps),
        settings={
            "checkpoint_root_dir": str(arguments.runs),
            "name": name,
            "model": {"model_path": str(model), "max_model_len": 1024},
            "algorithm": {
                "algorithm_type": "grpo",
                "batch_size": arguments.tasks,
                "group_size": arguments.group,
            },
            "trainer": {"dtype": "bfloat16", **TRAINERS[name.split("-")[1]]},
            "engine.dtype": "bfloat16",
            "evaluation.hold_out": False,
            "check.enabled": False,
        },
    )


def tree_bytes(process: psutil.Process, *, in_parts: bool) -> int:
    """Return what a process and all below it hold, each shared page in parts or in full."""
    held = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            held += one.memory_full_info().pss if in_parts else one.memory_info().rss
    return held


def watch(command: list[str]) -> tuple[int, float]:
    """Run a command. Returns the peak of its tree in bytes, and its seconds. Raises `RuntimeError` if it fails."""
    began = time.perf_counter()
    peak = full = 0
    with subprocess.Popen(command, env=filling_gaps(os.environ)) as started:  # as `sharpen run` does
        process = psutil.Process(started.pid)
        while started.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                # counting parts walks over all pages, a third of a core: only where more is held than ever before
                if (now := tree_bytes(process, in_parts=False)) > 1.002 * full:
                    peak, full = max(peak, tree_bytes(process, in_parts=True)), now
            time.sleep(0.1)
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {started.returncode}")
    return peak, time.perf_counter() - began


def measure(name: str, models: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return planned and measured bytes of a case, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        model = models / name.split("-")[0]
        steps = 2 if name.endswith("-all") else 1
        sizes = [f"--steps={steps}", f"--tasks={arguments.tasks}", f"--group={arguments.group}"]
        command = [sys.executable, __file__, "--case", name, "--folder", str(models), "--runs", folder, *sizes]
        peak, seconds = watch(command)
        found = json.loads(next(Path(folder).rglob("plan.json")).read_text())
        resolved = json.loads(next(Path(folder).rglob("resolved.json")).read_text())
    planned = {when: max(place["peak_mb"] for place in found[when]["places"]) * 2**20 for when in ("before", "known")}
    return {
        "case": name,
        "model": model.name,
        "measured": peak,
        "planned": planned["known"],
        "before": planned["before"],
        "process": found["measured"]["peak_memory_mb"] * 2**20,
        "step_s": found["measured"]["step_s"],
        "planned_step_s": found["known"]["step_s"],
        "seconds": seconds,
        "chosen": resolved.get("chosen"),
    }


def main() -> int:
    """Measure each case, print, write `bench/out/memory.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(BOUNDS_GB), default=list(BOUNDS_GB)[:-1])
    parser.add_argument("--tasks", type=int, default=4, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a task")
    parser.add_argument("--folder", type=Path, help="where the models are kept (default: they are not)")
    parser.add_argument("--case", choices=list(BOUNDS_GB), help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments)
        return 0
    with contextlib.ExitStack() as stack:
        models = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = []
        for name in arguments.cases:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its memory is nobody's then
                pool.submit(make_model, name.split("-")[0], models).result()
            found.append(one := measure(name, models, arguments))
            print(f"  {one}", flush=True)
    return summarize(found)


def summarize(found: list[dict[str, Any]]) -> int:
    """Print the table, judge planned against measured and the bounds."""
    rows = [
        (one["case"], *(one[key] / 1e9 for key in ("measured", "planned", "before", "process")), one["step_s"])
        for one in found
    ]
    errors = {f"{one['case']}: planned/measured": one["planned"] / one["measured"] for one in found}
    held = {f"{one['case']}: GB": one["measured"] / 1e9 for one in found}
    bounds = {f"{name}: GB": bound for name, bound in BOUNDS_GB.items() if bound and f"{name}: GB" in held}
    header = ("case", "measured GB", "planned GB", "before GB", "the run's process GB", "step s")
    return report.finish(
        "memory",
        header=header,
        rows=rows,
        ratios={**errors, **held},
        at_least=dict.fromkeys(errors, 1 - WITHIN),
        at_most={**dict.fromkeys(errors, 1 + WITHIN), **bounds},
        extra={"cases": found},
    )


if __name__ == "__main__":
    sys.exit(main())
