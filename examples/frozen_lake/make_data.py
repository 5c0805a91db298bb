"""The lakes: maps made by Gymnasium's own generator.

In: size of the maps, whether they are slippery, a seed. Out: a folder with `train.jsonl` and `test.jsonl`; no map of
one is in the other. The same arguments write the same bytes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from parts.rows import write_rows

NUM_TRAIN, NUM_TEST = 512, 64
ICE_SHARE = 0.8


def write_lakes(folder: Path, *, size: int = 4, slippery: bool = False, seed: int = 0) -> Path:
    """Write both files; gives the folder."""
    lakes = distinct_lakes(size, slippery, seed)
    test = [next(lakes) for _ in range(NUM_TEST)]
    return write_rows(folder, {"train": [next(lakes) for _ in range(NUM_TRAIN)], "test": test})


def distinct_lakes(size: int, slippery: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Tasks without end, no map twice. A size below 4 has too few maps."""
    if size < 4:
        raise ValueError(f"size is {size}: a lake has at least 4 rows")
    seen: set[tuple[str, ...]] = set()
    number = seed * 1_000_000
    while True:
        number += 1
        rows = generate_random_map(size=size, p=ICE_SHARE, seed=number)
        if tuple(rows) not in seen:
            seen.add(tuple(rows))
            moves = shortest_way(rows)
            yield {"map": rows, "slippery": slippery, "seed": number, "max_turns": moves * (6 if slippery else 2)}


def shortest_way(rows: Sequence[str]) -> int:
    """Moves from S to G at least. ValueError where G cannot be reached."""
    size = len(rows)
    distance = {(0, 0): 0}
    queue = deque(distance)
    while queue:
        row, column = queue.popleft()
        if rows[row][column] == "G":
            return distance[row, column]
        for near in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= near[0] < size and 0 <= near[1] < size
            if inside and near not in distance and rows[near[0]][near[1]] != "H":
                distance[near] = distance[row, column] + 1
                queue.append(near)
    raise ValueError(f"no way to the goal in {rows}")
