"""The quickstart's tasks: arithmetic word problems in GSM8K's JSON format.

Role: the only source of questions, for the data files here and for the SFT traces of `build_model.py`.
In: a seed. Out: `data/train.jsonl`, `data/test.jsonl` and `data/further.jsonl`, one
`{"question": ..., "answer": "... #### 42"}` a line; the same seed writes the same bytes.

Every problem takes one operation on two numbers. No test question occurs in the training file or among the SFT
questions. The 'further' file uses sentence patterns and number ranges that occur in neither.

    python problems.py
"""

import json
import random
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
NUM_TRAIN, NUM_TEST, NUM_FURTHER = 4000, 512, 256

NAMES = ("Mia", "Tom", "Sara", "Omar", "Lena", "Ivan", "Nora", "Ben")
ITEMS = ("coins", "books", "apples", "cards", "pens", "stamps", "shells", "eggs")

# Pattern texts by operation; {x} and {y} are the operands of "{x} op {y}", not always in this order.
PATTERNS: dict[str, tuple[str, ...]] = {
    "+": (
        "{n} has {x} {i}. {m} gives {n} {y} more. How many {i} does {n} have now?",
        "{n} has {x} {i} and {m} has {y}. How many {i} do they have in total?",
        "There are {x} {i} in a box. {n} puts in {y} more. How many {i} are in the box now?",
        "{n} found {x} {i} today and {y} before. How many {i} did {n} find?",
        "A shop sold {x} {i} in the morning and {y} in the evening. How many {i} did the shop sell?",
        "{m} has {x} {i}. {n} has {y} more than {m}. How many {i} does {n} have?",
        "{n} has {y} {i} more than {m}, and {m} has {x}. How many {i} does {n} have?",
        "One bag has {x} {i}, another has {y}. How many {i} are in both bags?",
        "After {n} gave away {x} {i}, {y} are left. How many {i} did {n} have before?",
    ),
    "-": (
        "{n} has {x} {i}. {n} gives {y} of them to {m}. How many {i} are left?",
        "There were {x} {i} in a box. {n} took out {y}. How many {i} are in the box now?",
        "{n} lost {y} of the {x} {i} in a bag. How many {i} are left?",
        "A shop had {x} {i} and sold {y}. How many {i} does the shop have now?",
        "{n} has {x} {i} and {m} has {y}. How many more {i} does {n} have than {m}?",
        "{n} needs {x} {i} and has {y}. How many more {i} does {n} need?",
        "{m} has {y} {i}, but {n} has {x}. How many more does {n} have?",
        "From a box of {x} {i}, {m} takes {y}. How many {i} are left in the box?",
        "{n} found {x} {i} in two days, {y} of them today. How many {i} did {n} find before?",
    ),
    "*": (
        "{n} has {x} boxes with {y} {i} in each box. How many {i} does {n} have in total?",
        "There are {y} {i} in each bag. {n} has {x} bags. How many {i} does {n} have?",
        "{n} finds {x} {i} each day. How many {i} does {n} find in {y} days?",
        "A shop sold {x} bags of {y} {i} each. How many {i} did the shop sell?",
        "{m} has {x} {i}. {n} has {y} times as many. How many {i} does {n} have?",
        "Each of {y} children has {x} {i}. How many {i} do they have in total?",
        "In {y} days {n} sold {x} {i} a day. How many {i} did {n} sell?",
        "{n} needs {y} {i} for each of {x} boxes. How many {i} does {n} need?",
        "One box has {x} {i}. How many {i} are in {y} boxes?",
    ),
    "/": (
        "{n} shares {x} {i} between {y} children. How many {i} does each child get?",
        "{n} puts {x} {i} into {y} boxes, as many in each. How many {i} are in each box?",
        "There are {y} children and {x} {i} to share. How many {i} does each child get?",
        "A shop has {x} {i} in bags of {y}. How many bags are there?",
        "{n} finds {x} {i} in {y} days, as many each day. How many {i} did {n} find each day?",
        "{n} has {x} {i}, {y} times as many as {m} has. How many {i} does {m} have?",
        "In {y} boxes there are {x} {i}. How many {i} are in one box?",
        "{n} sold {x} {i}, {y} a day. How many days was that?",
        "From {x} {i}, {n} makes bags with {y} in each. How many bags does {n} get?",
    ),
}
FURTHER_PATTERNS: dict[str, tuple[str, ...]] = {
    "+": (
        "How many {i} do {n} and {m} have in total, if {n} has {x} and {m} has {y}?",
        "{n} had {x} {i} in the morning, and then found {y} more. How many {i} are there now?",
    ),
    "-": (
        "Of {x} {i}, {n} sold {y} today. How many {i} are left?",
        "How many {i} are left in a bag of {x}, if {m} took {y} of them?",
    ),
    "*": (
        "How many {i} are there in {x} bags, if each bag has {y}?",
        "{n} gives {y} {i} to each of {x} children. How many {i} does {n} give away?",
    ),
    "/": (
        "How many {i} does each of {y} children get, if {n} shares {x} between them?",
        "{n} has {x} {i} to put in boxes of {y} each. How many boxes does {n} need?",
    ),
}
# In a 'further' problem the first operand is one of these numbers; they are operands nowhere else.
FURTHER_NUMBERS = range(400, 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One word problem: its text, the expression that solves it (`"12 + 5"`), and the result."""

    question: str
    left: int
    operation: str
    right: int
    result: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operation} {self.right}"

    def row(self) -> dict[str, str]:
        """The problem as a GSM8K row."""
        tight = self.expression.replace(" ", "")
        return {
            "question": self.question,
            "answer": f"{self.expression} = <<{tight}={self.result}>>{self.result}\n#### {self.result}",
        }


def operands(rng: random.Random, operation: str) -> tuple[int, int, int]:
    """Two operands and the result."""
    if operation == "+":
        x, y = rng.randint(2, 999), rng.randint(2, 999)
        return x, y, x + y
    if operation == "-":
        y, x = sorted(rng.sample(range(2, 1000), 2))
        return x, y, x - y
    small = rng.randint(2, 12)
    if operation == "*":
        large = rng.randint(2, 999)
        return large, small, large * small
    quotient = rng.randint(2, 99)
    return quotient * small, small, quotient


def draw(rng: random.Random, *, further: bool) -> Problem:
    """One random problem."""
    operation = rng.choice("+-*/")
    while True:
        x, y, result = operands(rng, operation)
        if x in FURTHER_NUMBERS if further else not {x, y} & set(FURTHER_NUMBERS):
            break
    pattern = rng.choice((FURTHER_PATTERNS if further else PATTERNS)[operation])
    name, other = rng.sample(NAMES, 2)
    question = pattern.format(n=name, m=other, i=rng.choice(ITEMS), x=x, y=y)
    return Problem(question=question, left=x, operation=operation, right=y, result=result)


def stream(seed: str, *, further: bool = False, without: Set[str] = frozenset()) -> Iterator[Problem]:
    """Problems without end, none twice and none whose question is in `without`."""
    rng, seen = random.Random(seed), set(without)
    while True:
        problem = draw(rng, further=further)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def splits(seed: int = 0) -> dict[str, list[Problem]]:
    """The three data sets by name; questions of different sets are disjoint."""
    test_source = stream(f"{seed}/test")
    test = [next(test_source) for _ in range(NUM_TEST)]
    train_source = stream(f"{seed}/train", without={problem.question for problem in test})
    further_source = stream(f"{seed}/further", further=True)
    return {
        "train": [next(train_source) for _ in range(NUM_TRAIN)],
        "test": test,
        "further": [next(further_source) for _ in range(NUM_FURTHER)],
    }


def main() -> None:
    """Write the data files."""
    DATA.mkdir(exist_ok=True)
    for name, problems in splits().items():
        path = DATA / f"{name}.jsonl"
        path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems), encoding="utf-8")
        print(f"data/{path.name}: {len(problems)} tasks")


if __name__ == "__main__":
    main()
