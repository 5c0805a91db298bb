"""Draws the pictures of the tasks: a few shapes on a grid, and a question about one kind of them.

In: a seed. Out: a folder with `tasks/train.jsonl`, `tasks/test.jsonl` and the pictures that their rows name. The test's
pictures are of other seeds; a picture of so few pixels may still come twice.
"""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SHAPES = ("circle", "square")
SIDE, CELL = 16, 8
"""Pixels of a picture and of a cell: each cell holds one shape at most."""
NUM_CELLS = (SIDE // CELL) ** 2
MOST = NUM_CELLS - 1
COLOURS = ((220, 60, 50), (40, 140, 70), (50, 90, 210), (160, 60, 180))


def draw_picture(rng: random.Random) -> tuple[Image.Image, dict[str, int]]:
    """A picture, and how many shapes of each kind are on it: 1 to `MOST`."""
    picture = Image.new("RGB", (SIDE, SIDE), (250, 250, 245))
    pen = ImageDraw.Draw(picture)
    circles = rng.randint(1, MOST)
    counts = {"circle": circles, "square": rng.randint(1, NUM_CELLS - circles)}
    shapes = [shape for shape, count in counts.items() for _ in range(count)]
    cells = rng.sample([(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)], len(shapes))
    for shape, (left, top) in zip(shapes, cells, strict=True):
        box = (left + 1, top + 1, left + CELL - 2, top + CELL - 2)
        colour = rng.choice(COLOURS)
        if shape == "circle":
            pen.ellipse(box, outline=colour)
        else:
            pen.rectangle(box, fill=colour)
    return picture, counts


def write_pictures(folder: Path, *, train: int = 512, test: int = 64, seed: int = 0) -> Path:
    """Write the pictures and the tasks; gives the folder of the tasks, which holds nothing else: a folder with pictures
    would be read as a dataset of pictures."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    for split, number in (("train", train), ("test", test)):
        pictures = folder / "pictures" / split
        pictures.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, Any]] = []
        for place in range(number):
            rng = random.Random(f"{seed}/{split}/{place}")
            picture, counts = draw_picture(rng)
            path = (pictures / f"{place:04}.png").resolve()
            picture.save(path)
            shape = rng.choice(SHAPES)
            rows.append({"picture": str(path), "shape": shape, "count": counts[shape]})
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tasks / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tasks
