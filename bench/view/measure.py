"""How quick `sharpen view` is over a run of 100,000 rollouts: the first paint, while the index is made and after it, a
rollout, searches.

In: nothing (the run is made here, by `shop_runs`, or kept with --keep). Out: a table, `bench/out/view.json`; an exit
code of 1 if a limit is missed. Times are of whole requests over a socket, against the server as the command starts it,
in a process of its own. What a browser adds to draw a page is not in them.

    python bench/view/measure.py [--rollouts 100000] [--repeats 9] [--keep DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import httpx
from report import finish
from shop_runs import Maker, RunSize, make_run, photograph

FIRST_PAINT_S, ROLLOUT_S, SEARCH_S = 1.0, 0.2, 1.0
GROUP, BATCH = 16, 16
PICTURES = 500
"""How many different ones the tasks show; each call of a rollout has one in its prompt, and each trained token its
entropy."""


def main() -> int:
    """Make the run, measure, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--keep", type=Path, help="make the run here, or use the one that is here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sharpen-bench-view-") as folder:
        run = _run((options.keep or Path(folder)) / "huge", options.rollouts)
        cache = Path(folder) / "cache"
        times: dict[str, list[float]] = {}
        with _server(run, cache) as (client, key):
            index_s = _while_made(client, key, times, options.rollouts)
            for _ in range(options.repeats):
                _look(client, key, times, options.rollouts)
        size_mb = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 2**20
        journal_mb = (run / "run.db").stat().st_size / 2**20
        with closing(sqlite3.connect(run / "run.db")) as journal:
            tables = ("calls", "entropies", "call_pictures")
            rows = {table: journal.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables}
    print(", ".join(f"{count:,} rows of {table}" for table, count in rows.items()))
    return _report(times, index_s, size_mb, journal_mb, options.rollouts)


def _run(path: Path, rollouts: int) -> Path:
    if not (path / "summary.json").exists():
        steps = -(-rollouts // (GROUP * BATCH))
        size = RunSize(
            steps=steps, batch_size=BATCH, group_size=GROUP, tasks=2000, held_out=256, evaluations=(steps // 2,)
        )
        started = time.perf_counter()
        make_run(path, Maker(size=size, pictures=PICTURES))
        print(f"made {size.rollouts:,} rollouts in {time.perf_counter() - started:.0f} s", flush=True)
    return path


@contextmanager
def _server(run: Path, cache: Path) -> Iterator[tuple[httpx.Client, str]]:
    """Start the command, and yield a client of it and the run's key."""
    command = [sys.executable, "-m", "sharpen.cli.main", "view", "--no-browser", str(run)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"(http://\S+)/\?token=(\S+)", process.stdout.readline())
            assert found is not None, "the command printed no address"
            headers = {"authorization": f"Bearer {found.group(2)}"}
            with httpx.Client(base_url=found.group(1), headers=headers, timeout=60.0) as client:
                yield client, client.get("/", params={"format": "json"}).json()["rows"][0]["key"]
        finally:
            process.terminate()


def _while_made(client: httpx.Client, key: str, times: dict[str, list[float]], rollouts: int) -> float:
    """Open pages while the index is being made, and return how long that took."""
    started = time.perf_counter()
    while True:
        page = _timed(client, f"/run/{key}/rollouts?format=json", times, "rollouts, index being made").json()
        _timed(client, f"/run/{key}", times, "one run, index being made")
        _timed(client, f"/run/{key}/rollout/t{rollouts // 2}", times, "a rollout, index being made")
        if page["index"]["indexed"] >= page["index"]["total"]:
            return time.perf_counter() - started
        time.sleep(1.0)


def _look(client: httpx.Client, key: str, times: dict[str, list[float]], rollouts: int) -> None:
    place = len(times.get("a rollout", ())) * 7919 % rollouts + 1
    for name, address in (
        ("runs", "/"),
        ("one run", f"/run/{key}"),
        ("tasks", f"/run/{key}/tasks?of=training"),
        ("a step", f"/run/{key}/step/{min(100, -(-rollouts // (GROUP * BATCH)))}"),
        ("rollouts", f"/run/{key}/rollouts"),
        ("a rollout", f"/run/{key}/rollout/t{place}"),
        ("its tokens", f"/run/{key}/rollout/t{place}/tokens.json?call=1"),
        ("a picture", f"/run/{key}/image/{photograph(place % PICTURES).sha256}"),
        ("search: two words, few hits", f"/run/{key}/rollouts?text=shelf+1{place % 900}"),
        ("search: a word of all rollouts", f"/run/{key}/rollouts?text=shelf"),
        ("search: a word and filters", f"/run/{key}/rollouts?text=candles&outcome=ok&reward_low=1&tool=look_up"),
        ("highest reward that rose lately", f"/run/{key}/rollouts?order=rising"),
    ):
        _timed(client, address, times, name)


def _timed(client: httpx.Client, address: str, times: dict[str, list[float]], name: str) -> httpx.Response:
    started = time.perf_counter()
    response = client.get(address)
    times.setdefault(name, []).append(time.perf_counter() - started)
    assert response.status_code == 200, (address, response.status_code, response.text[:200])
    return response


def _report(times: dict[str, list[float]], index_s: float, size_mb: float, journal_mb: float, rollouts: int) -> int:
    medians = {name: statistics.median(values) for name, values in times.items()}
    slowest = {name: max(values) for name, values in times.items()}
    limits = dict.fromkeys(medians, FIRST_PAINT_S)
    limits |= {name: ROLLOUT_S for name in medians if name.startswith(("a rollout", "its tokens", "a picture"))}
    rows = [
        (name, 1000 * medians[name], 1000 * slowest[name], 1000 * limits[name], len(times[name])) for name in medians
    ]
    print(f"\n{rollouts:,} rollouts: run.db {journal_mb:,.0f} MB; index {size_mb:,.0f} MB, made in {index_s:.0f} s")
    return finish(
        "view",
        header=("page", "median ms", "slowest ms", "limit ms", "times"),
        rows=rows,
        ratios={f"{name}, s": value for name, value in medians.items()} | {"index, s": index_s},
        at_most={f"{name}, s": limit for name, limit in limits.items()},
        extra={"times_s": times, "index_mb": size_mb, "journal_mb": journal_mb, "rollouts": rollouts},
    )


if __name__ == "__main__":
    sys.exit(main())
