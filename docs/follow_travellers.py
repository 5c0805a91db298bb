"""Follows four travellers through a toy run, and counts their ways: the table of docs/understand/architecture.md.

The travellers: a request of the agent, until its call is recorded; a rollout, until the optimizer takes its gradient;
new weights, until the engine serves them; the configuration, to each function that is handed it, or what holds it.
In: `src/sharpen`, which runs here for two steps. Out: for each traveller the files on its way, how often it moves from
a file to another, climbs (to a file on a higher floor: above all that it imports) and returns (to a file where it was
before). A function counts when it is called first, so that loops and numbers of tokens do not; a property is only read.

    python docs/follow_travellers.py [--way NAME] [--source FOLDER]
"""

from __future__ import annotations

import argparse
import dis
import itertools
import json
import runpy
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).parent
TRAVELLERS = {
    "request": "a request of the agent, to its recorded call",
    "rollout": "a rollout, to the gradient",
    "weights": "new weights, to the engine",
    "configuration": "the whole configuration, to each place that reads it",
    "settings": "the same with its sections, when they go by themselves",
}


class Follower:
    """Notes the functions of the package as they are entered, for the travellers that are on their way."""

    def __init__(self, source: Path) -> None:
        from sharpen.config.public import Strict
        from sharpen.config.run import RunConfig

        self._root = f"{source}/sharpen/"
        self._kinds = {"configuration": RunConfig, "settings": Strict}
        self._seen: dict[str, set[CodeType]] = {name: set() for name in TRAVELLERS}
        self.ways: dict[str, list[tuple[str, str]]] = {name: [] for name in TRAVELLERS}
        self.readers: dict[str, set[str]] = {name: set() for name in self._kinds}
        self._open: set[str] = set()
        self._done: set[str] = set()
        self._watch_reads(Strict)

    def begin(self, name: str) -> None:
        """A traveller sets out, if it has not done so yet."""
        if name not in self._done:
            self._open.add(name)

    def end(self, name: str) -> None:
        """A traveller has arrived."""
        if name in self._open:
            self._open.remove(name)
            self._done.add(name)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What `sys.setprofile` calls."""
        code = frame.f_code
        is_ours = code.co_filename.startswith(self._root) and code.co_filename.endswith(".py")
        if not is_ours or code.co_name.startswith("<") or (event == "call" and _is_read(frame)):
            return
        place = (code.co_filename.rpartition("/")[2], code.co_name)
        if event == "call":
            if place == ("local.py", "publish"):
                self.begin("weights")
            if place == ("optimizer.py", "norm"):
                self.end("rollout")
            for name in tuple(self._open):
                self._note(name, frame)
            for name, kind in self._kinds.items():
                if code not in self._seen[name] and any(_bears(value, kind) for value in _arguments(frame)):
                    self._note(name, frame)
        elif event == "return" and place == ("local.py", "publish"):
            self.end("weights")

    def _note(self, name: str, frame: FrameType) -> None:
        code = frame.f_code
        if code not in self._seen[name]:
            self._seen[name].add(code)
            self.ways[name].append((code.co_filename.removeprefix(self._root), code.co_qualname))

    def _watch_reads(self, base: type) -> None:
        """Note the files that read a setting: the class of the settings looks at who asks it for one."""
        plain = object.__getattribute__

        def read(settings: Any, name: str) -> Any:
            file = sys._getframe(1).f_code.co_filename
            is_setting = name in type(settings).__pydantic_fields__ or isinstance(
                getattr(type(settings), name, None), property
            )
            if file.startswith(self._root) and is_setting:
                for way, kind in self._kinds.items():
                    if isinstance(settings, kind):
                        self.readers[way].add(file.removeprefix(self._root))
            return plain(settings, name)

        base.__getattribute__ = read  # type: ignore[assignment, method-assign]


def _is_read(frame: FrameType) -> bool:
    """Whether a frame is that of a property, which is read like any attribute and not called."""
    caller = frame.f_back
    return caller is not None and dis.opname[caller.f_code.co_code[caller.f_lasti]] == "LOAD_ATTR"


def _arguments(frame: FrameType) -> Iterator[Any]:
    """The values that a function got, but for the object whose method it is."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
    yield from (values.get(name) for name in names if name not in ("self", "cls"))


def _bears(value: Any, kind: type, depth: int = 3) -> bool:
    """Whether a value is of a kind, or a record or a tuple that holds one."""
    if isinstance(value, kind):
        return True
    if depth and type(value) is tuple:
        return any(_bears(one, kind, depth - 1) for one in value)
    if depth and hasattr(type(value), "__dataclass_fields__") and type(value).__dataclass_params__.frozen:
        return any(_bears(getattr(value, name, None), kind, depth - 1) for name in type(value).__dataclass_fields__)
    return False


def floors(source: Path) -> Mapping[str, int]:
    """The floor of each file: above all that it imports."""
    house = runpy.run_path(str(HERE / "make_architecture.py"))
    house["imports"].__wrapped__.__globals__["ROOT"] = source / "sharpen"
    needs, found = house["imports"](), {"__init__.py": 0}

    def floor(path: str) -> int:
        if path not in found:
            found[path] = 1 + max((floor(other) for other in needs.get(path, ())), default=0)
        return found[path]

    return {path: floor(path) for path in needs} | {"__init__.py": 0}


def toy_run(follower: Follower, folder: Path) -> None:
    """Two steps of a model of a few thousand parameters, one rollout at a time."""
    from toy_model import make_toy_model

    from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune

    rows = [json.dumps({"question": f"question {number}"}) for number in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows))

    rollouts = itertools.count(1)

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        last = next(rollouts) == 4  # of the first step: what is made once is there, and no other comes between
        if last:
            follower.begin("request")
        reply = await model.client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
        )
        follower.end("request")
        if last:
            follower.begin("rollout")
        return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)

    tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(folder / "train.jsonl"), total_steps=2),
        model=TunerModelConfig(model_path=str(make_toy_model(folder / "model")), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=2, batch_size=2, learning_rate=2e-2),
        settings={
            "checkpoint_root_dir": str(folder),
            "rollout.max_concurrent_rollouts": 1,
            "evaluation.before_and_after": False,
            "check.enabled": False,
        },
    )


def counts(way: list[str], height: Mapping[str, int]) -> tuple[int, int, int, int]:
    """The files, moves, climbs and returns of a way, which is the file of each function on it."""
    files = [file for file, _ in itertools.groupby(way)]
    climbs = sum(height[b] > height[a] for a, b in itertools.pairwise(files))
    return len(set(files)), len(files) - 1, climbs, len(files) - len(set(files))


def main() -> None:
    """Print the counts, or one way function by function."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--way", choices=TRAVELLERS, help="print this way, function by function")
    parser.add_argument("--source", type=Path, default=HERE.parent / "src", help="the `src` of another checkout")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    sys.path[:0] = [str(source), str(HERE.parent / "tests")]
    follower = Follower(source)
    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(follower)
        sys.setprofile(follower)
        toy_run(follower, Path(folder))
        sys.setprofile(None)
    height = floors(source)
    if arguments.way:
        for file, function in follower.ways[arguments.way]:
            print(f"{height[file]:3} {file:50} {function}")
        return
    print("| | files | moves | climbs | returns |\n|---|---|---|---|---|")
    for name, said in TRAVELLERS.items():
        numbers = counts([file for file, _ in follower.ways[name]], height)
        print(f"| {said} | {' | '.join(map(str, numbers))} |")
    for name, readers in follower.readers.items():
        only = {file for file, _ in follower.ways[name]} - readers
        print(f"\nhanded the {name}, and reading none of it: {', '.join(sorted(only)) or 'no file'}")


if __name__ == "__main__":
    main()
