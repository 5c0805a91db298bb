"""Sessions of a bench that end by SIGKILL at each place of a step at which two writes belong together.

`python killed_bench.py FOLDER MODEL ROWS MOST` plays so many of each kind in forks, goes on from what each left, and
compares that with a run that nobody killed. Prints a line for each kill.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from aims import AIMS, Aim, Trap
from step_walks import STEPS, Bench, Place, content, records, rows_bench

from sharpen.learning.trainer.checkpoint import pointed, repair


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def places_of(aim: Aim, places: list[Place]) -> Iterator[Place]:
    """Where the thread that trains comes to an aim; the journal's writer is another thread."""
    return (place for place in places if place.file == aim.file and place.line in aim.numbers())


def killed_at(bench: Bench, run_dir: Path, aim: Aim, place: Place | None) -> int:
    """The exit code of a session that ends there."""
    child = os.fork()
    if child == 0:
        if place is None:
            Trap(aim._replace(time=2)).set()
        bench.play(run_dir, {} if place is None else {place: kill}, interval=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(bench: Bench, run_dir: Path) -> None:
    """What is there is whole, and leads to where the undisturbed run came."""
    repair(run_dir)
    for folder in run_dir.glob("global_step_*"):
        assert content(folder) == bench.whole[int(folder.name.removeprefix("global_step_"))]
    latest = pointed(run_dir, "latest")
    assert latest is not None
    assert bench.play(run_dir, interval=1).error is None
    assert content(run_dir / f"global_step_{STEPS}") == bench.whole[STEPS]
    assert records(run_dir) == records(bench.quiet)


def main(folder: Path, model: Path, rows: Path, most: int) -> None:
    with rows_bench(folder, model, rows, "sft") as bench:
        places = bench.places
        for kind, aims in AIMS.items():
            for aim in aims[:most]:
                place = next(places_of(aim, places), None)
                run_dir = bench.copy()
                code = killed_at(bench, run_dir, aim, place)
                if code == 0:  # not a place of this kind of run
                    continue
                assert code == -signal.SIGKILL, (aim, code)
                check(bench, run_dir)
                print(f"{kind}: at {aim.line}", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
