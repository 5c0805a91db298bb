"""Requests to an assistant with an address book; half of them fit two people.

In: a seed. Out: a folder with `train.jsonl` and `test.jsonl`; the same seed writes the same bytes. A row holds the
book, the request, whom the user means (only the user knows), the true answer, and whether the request is ambiguous.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts.rows import write_rows

NUM_TRAIN, NUM_TEST = 400, 64
FIRST_NAMES = ("Sam", "Kim", "Alex", "Robin", "Nico", "Jo", "Max", "Lou")
LAST_NAMES = ("Berg", "Costa", "Dahl", "Evans", "Falk", "Gray", "Hill", "Ito", "Juul", "Koch", "Lind", "Moss")


def write_requests(folder: Path, seed: int = 0) -> Path:
    """Write both files; gives the folder."""
    requests = make_requests(random.Random(seed))
    test = [next(requests) for _ in range(NUM_TEST)]
    return write_rows(folder, {"train": [next(requests) for _ in range(NUM_TRAIN)], "test": test})


def make_requests(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Requests without end, ambiguous ones and clear ones by turns."""
    ambiguous = False
    while True:
        ambiguous = not ambiguous
        twice, *others = rng.sample(FIRST_NAMES, 3)
        last_names = rng.sample(LAST_NAMES, 4)
        names = [f"{first} {last}" for first, last in zip((twice, twice, *others), last_names, strict=True)]
        book = {name: str(rng.randint(1000, 9999)) for name in rng.sample(names, len(names))}
        meant = rng.choice(names[:2])
        yield {
            "book": [f"{name}: {extension}" for name, extension in book.items()],
            "request": f"What is the extension of {twice if ambiguous else meant}?",
            "meant": meant,
            "answer": book[meant],
            "ambiguous": ambiguous,
        }
