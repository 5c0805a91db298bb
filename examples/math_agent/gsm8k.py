"""Local tasks in the layout of `openai/gsm8k` on the Hugging Face hub, so that the example needs no download.

Role: stands in for the real data. In: the quickstart's tasks. Out: a folder that `datasets.load_dataset(folder,
"main")` reads as it reads the hub's: a README.md that names the configuration, and `main/{train,test}-*.parquet` with
the columns `question` and `answer` (which ends in `#### 42`).

    python gsm8k.py [FOLDER]
"""

import argparse
from pathlib import Path

import pyarrow.json
import pyarrow.parquet

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
TASKS = HERE.parent / "quickstart" / "data"

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
Arithmetic word problems of `examples/quickstart/problems.py`, in the layout of GSM8K.
"""


def write_data(folder: Path = DATA) -> Path:
    """Write the folder, unless it is there already, and return it."""
    card = folder / "README.md"  # written last: where it is, the rest is
    if not card.exists():
        (folder / "main").mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            rows = pyarrow.json.read_json(TASKS / f"{split}.jsonl")
            pyarrow.parquet.write_table(rows, folder / "main" / f"{split}-00000-of-00001.parquet")
        card.write_text(CARD, encoding="utf-8")
    return folder


def main() -> None:
    """Write the folder named on the command line, by default `data/` beside this file."""
    parser = argparse.ArgumentParser(description="Write local tasks in the layout of GSM8K.")
    parser.add_argument("folder", nargs="?", type=Path, default=DATA)
    print(write_data(parser.parse_args().folder))


if __name__ == "__main__":
    main()
