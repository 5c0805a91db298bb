"""`sharpen show RUN_DIR --rollout ID`: a rollout as it was, for reading in a terminal; `--task ID` (`show_task`):
what the agent did with a held-out task before and after.

In: a run directory, the id of a rollout (or a unique end or beginning of it). Out: its messages by role, its tool
calls, and for each model call the sampled tokens, coloured by how likely they were, dimmed where they carry no loss.
At most 100 columns; plain text where the output is no terminal. Without `--rollout`: the last groups with their
rewards, and where the time went.

Shape suffixes: S sampled tokens of a call.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sharpen.errors import ConfigError, ModelError
from sharpen.experience.records import EVALUATIONS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sharpen.experience.reading import RolloutEntry, TrainedCall
    from sharpen.types import Call, IntArray, Rollout

WIDTH = 100
LISTED_GROUPS = 16
BANDS = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "bold red"))
"""Least probability of a sampled token, and its colour."""
_ROLE_STYLES = {"system": "magenta", "developer": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}
_CONTEXT_IDS, _MAX_PIECE = 4, 8

Decode = Callable[[Sequence[int]], str]


def add_show(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run, also of one that goes on")
    parser.add_argument(
        "--rollout", metavar="ID", help="its id, or a unique end or beginning of it (default: list the last groups)"
    )
    parser.add_argument("--task", metavar="ID", help="a held-out task as it went before and after the training")
    parser.add_argument(
        "--mode", choices=("sampled", "greedy"), default="sampled", help="which evaluation of it (default: sampled)"
    )
    parser.add_argument("--call", type=int, metavar="N", help="only this call, with its whole prompt")
    parser.add_argument("--tokens", action="store_true", help="the sampled tokens as a table")


def run_show(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print it. Raises `ConfigError` where there is no such run, rollout or call."""
    out = out or sys.stdout
    journal, evaluations = arguments.run_dir / "run.db", arguments.run_dir / EVALUATIONS
    if arguments.task is not None:
        from sharpen.cli.show_task import print_task

        console = _console(out)
        page = _Page(console, _decoder(console, arguments.run_dir), {}, "", untrained="an evaluation")
        print_task(evaluations, arguments.task, arguments.mode, page)
        return 0
    if not journal.exists():
        raise ConfigError(f"{arguments.run_dir} is not the directory of a run: it has no run.db")
    console = _console(out)
    if arguments.rollout is None:
        if arguments.call is not None or arguments.tokens:
            raise ConfigError("--call and --tokens belong to --rollout, which was not given")
        _list(console, journal, arguments.run_dir)
        return 0
    try:
        rollout = read_rollout(journal, arguments.rollout)
    except ConfigError:
        if not evaluations.exists():
            raise
        rollout = read_rollout(evaluations, arguments.rollout)
    if arguments.call is not None and not 0 <= arguments.call < len(rollout.calls):
        raise ConfigError(f"--call {arguments.call}: rollout {rollout.id} has {len(rollout.calls)} calls, from 0")
    decode, number = _decoder(console, arguments.run_dir), _number(arguments.run_dir)
    page = _Page(console, decode, _trained(journal, rollout), number)
    page.rollout(rollout, only=arguments.call, tokens=arguments.tokens)
    return 0


def read_rollout(journal: Path, name: str) -> Rollout:
    """The rollout of that id, or the only one whose id ends or begins with it; where a step was done again after an
    interruption, the later one. Raises `ConfigError` if there is none, or more than one.
    """
    from sharpen.experience.reading import find_rollouts, read_groups

    found = find_rollouts(journal, part=name)
    chosen = (
        [entry for entry in found if entry.id == name]
        or [entry for entry in found if entry.id.endswith(f"/{name}")]
        or [entry for entry in found if entry.id.startswith(name)]
    )
    names = sorted({entry.id for entry in chosen})
    if not names:
        near = ", ".join(dict.fromkeys(entry.id for entry in found[:3]))
        raise ConfigError(
            f"no rollout's id is, ends or begins with {name!r}"
            + (f"; ids that contain it: {near}" if near else " (sharpen show RUN_DIR lists the last ones)")
        )
    if len(names) > 1:
        raise ConfigError(f"{len(names)} rollouts fit {name!r}, e.g. {', '.join(names[:3])}: give more of the id")
    *_, group = read_groups(journal, group_id=chosen[-1].group_id)
    return next(rollout for rollout in group.with_baseline if rollout.id == names[0])


def _list(console: Console, journal: Path, run_dir: Path) -> None:
    from sharpen.experience.reading import find_rollouts, read_steps
    from sharpen.monitor import spent

    groups: dict[str, list[RolloutEntry]] = {}
    for entry in find_rollouts(journal, last=LISTED_GROUPS):
        groups.setdefault(entry.group_id, []).append(entry)
    width = max(map(len, groups), default=0)
    for group_id, entries in groups.items():
        rewards = " ".join(entry.outcome if entry.reward is None else f"{entry.reward:g}" for entry in entries)
        _print_wrapped(console, f"{group_id:<{width}}  {rewards}", hanging=width + 2)
    if shares := spent.shares(record.metrics for record in read_steps(journal)):
        console.print(f"\ntime of all steps: {spent.line(shares)}", markup=False)
    if not groups:
        console.print("no rollouts yet", markup=False)
    else:
        last = list(groups.values())[-1][0].id
        console.print(f"\nread one:  sharpen show {run_dir} --rollout {last}", markup=False, soft_wrap=True)


class _Page:
    """Prints one rollout. `trained` holds the calls that carried loss, by index, `number` says what their number is."""

    def __init__(
        self,
        console: Console,
        decode: Decode | None,
        trained: Mapping[int, TrainedCall],
        number: str,
        *,
        untrained: str = "its rollout was not trained",
    ) -> None:
        self._console = console
        self._decode = decode
        self._trained = trained
        self._number = number
        self._untrained = untrained

    def rollout(self, rollout: Rollout, *, only: int | None, tokens: bool) -> None:
        """All calls, or one with its whole prompt."""
        self._head(rollout)
        for call in rollout.calls:
            if only is None or call.index == only:
                before = rollout.calls[call.index - 1] if call.index and only is None else None
                self._call(call, before, _given(rollout, call.index), tokens=tokens)
        if not tokens and self._decode is not None and self._console.is_terminal:
            self._legend()

    def _head(self, rollout: Rollout) -> None:
        reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
        num_tokens = sum(len(call.sampled_ids_S) for call in rollout.calls)
        self.line(f"rollout {rollout.id}", "bold")
        self.line(
            f"task {rollout.task_id}   outcome {rollout.outcome.value}   reward {reward}   "
            f"calls {len(rollout.calls)}   sampled tokens {num_tokens}   {rollout.seconds:.2f} s"
            + (f"   attempt {rollout.attempt}" if rollout.attempt else "")
        )
        from sharpen.rollout.models import AUXILIARY, GATEWAY
        from sharpen.rollout.statistics import given

        if rollout.metrics:
            noticed = {name: value for name, value in rollout.metrics.items() if name.startswith((GATEWAY, AUXILIARY))}
            metrics = {**given(rollout.metrics), **noticed}
            self.line("metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
        if rollout.error:
            self.line(f"error: {rollout.error}", "red")

    def _call(self, call: Call, before: Call | None, given: Sequence[str], *, tokens: bool) -> None:
        new = _new_messages(call, before)
        if before is not None and len(new) == len(call.messages):
            self.line("")
            self.line("(a conversation of its own)", "dim")
        for message in new:
            self._message(message)
        self.line("")
        self.line(f"call {call.index}: {self._facts(call, given)}", "bold")
        if tokens:
            self._table(call)
        else:
            self._body(self._sampled(call))
        for used in call.response.get("tool_calls") or ():
            self._body(_tool_call(used), "bold")

    def _facts(self, call: Call, given: Sequence[str]) -> str:
        versions = sorted(set(call.versions_S.tolist()))
        spread = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))
        trained = self._trained.get(call.index)
        facts = [
            f"{len(call.sampled_ids_S)} tokens",
            f"version {spread or '-'}",
            f"temperature {call.sampling.temperature:g}",
            str(call.finish_reason),
            f"trained, {self._number} {trained.advantage:+.3g}"
            if trained
            else f"no loss ({_why_no_loss(call) or self._untrained})",
        ]
        if len(call.logprobs_S):
            facts.insert(1, f"logprob {float(call.logprobs_S.mean()):.3g}")
        return ", ".join((*facts, *given))

    def _message(self, message: Mapping[str, Any]) -> None:
        role = str(message.get("role", "?"))
        name = message.get("name")
        self.line("")
        self.line(role + (f" ({name})" if name and name != role else "") + ":", _ROLE_STYLES.get(role, ""))
        if message.get("reasoning_content"):
            self._body(f"(reasoning) {message['reasoning_content']}", "dim")
        text = _content(message.get("content"))
        if text:
            self._body(text)
        for used in message.get("tool_calls") or ():
            self._body(_tool_call(used), "bold")

    def _sampled(self, call: Call) -> Text:
        from rich.text import Text

        text = Text()
        for start, end, piece in pieces(call.sampled_ids_S, self._decode):
            style = self._style(call, float(call.logprobs_S[start:end].min()))
            text.append(clean(piece), style)
        return text

    def _table(self, call: Call) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        for name in ("number", "token", "id", "logprob", "version", "mask"):
            table.add_column(name, justify="left" if name == "token" else "right", overflow="fold")
        mask = int(call.index in self._trained)
        for start, end, piece in pieces(call.sampled_ids_S, self._decode):
            for place in range(start, end):
                shown = json.dumps(clean(piece), ensure_ascii=False) if place == end - 1 else "..."
                logprob = float(call.logprobs_S[place])
                cells = (str(place), shown, str(call.sampled_ids_S[place]), f"{logprob:.4f}")
                row = (*cells, str(call.versions_S[place]), str(mask))
                table.add_row(*(Text(cell) for cell in row), style=self._style(call, logprob))
        self._console.print(table)

    def _style(self, call: Call, logprob: float) -> str:
        colour = next((colour for least, colour in BANDS if math.exp(logprob) >= least), BANDS[-1][1])
        return colour if call.index in self._trained else f"dim {colour}"

    def _legend(self) -> None:
        from rich.text import Text

        text = Text("\nprobability: ")
        for (_, colour), name in zip(BANDS, ("0.9 to 1", "from 0.5", "from 0.1", "from 0.01", "less"), strict=True):
            text.append(name, colour).append("  ")
        self._console.print(text.append("dim: no loss", "dim"))

    def line(self, line: str, style: str = "") -> None:
        """One line, wrapped."""
        _print_wrapped(self._console, line, style=style)

    def _body(self, body: str | Text, style: str = "") -> None:
        from rich.text import Text

        text = Text(clean(body), style) if isinstance(body, str) else body
        for line in text.wrap(self._console, min(self._console.width, WIDTH) - 4, tab_size=4):
            line.rstrip()
            self._console.print(Text("    ").append_text(line), soft_wrap=True)


def pieces(ids_S: IntArray, decode: Decode | None) -> Iterator[tuple[int, int, str]]:
    """The sampled tokens as text: from token `start` to before `end`, mostly one token, more where a character is
    spread over several. Without `decode`, ids in angle brackets.
    """
    ids, start = ids_S.tolist(), 0
    for end in range(1, len(ids) + 1):
        if decode is None:
            text = f"<{ids[start]}>"
        else:
            context = ids[max(0, start - _CONTEXT_IDS) : start]
            text = decode([*context, *ids[start:end]])[len(decode(context)) :]
            if text.endswith("\ufffd") and end < len(ids) and end - start < _MAX_PIECE:
                continue
        yield start, end, text
        start = end


def clean(text: str) -> str:
    """Text whose control characters (but tabs and new lines) are written out: what a model says must not steer a
    terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found.group()):02x}", text)


def _new_messages(call: Call, before: Call | None) -> Sequence[Mapping[str, Any]]:
    """What came to the prompt since the call before; the whole prompt where that is no continuation."""
    if before is None or tuple(call.messages[: len(before.messages)]) != tuple(before.messages):
        return call.messages
    new = call.messages[len(before.messages) :]
    return new[1:] if new and new[0].get("role") == "assistant" else new  # what was sampled, shown already


def _content(content: Any) -> str:
    """A message's content as text; parts that are none are named in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return json.dumps(content, ensure_ascii=False)
    parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)


def _tool_call(used: Mapping[str, Any]) -> str:
    function = used.get("function", {})
    return f"-> {function.get('name')}({function.get('arguments')})"


def _given(rollout: Rollout, call: int) -> list[str]:
    """What the workflow gave with a call."""
    numbers = {"reward": rollout.call_rewards, "step reward": rollout.step_rewards}
    shown = [f"{name} {rewards[call]:g}" for name, rewards in numbers.items() if call in rewards]
    return [*shown, f"state {rollout.states[call]}"] if call in rollout.states else shown


def _why_no_loss(call: Call) -> str:
    if call.status != "used":
        return str(call.status.value)
    if call.sampling.temperature <= 0:
        return "temperature 0"
    return ""


def _trained(journal: Path, rollout: Rollout) -> dict[int, TrainedCall]:
    """The rollout's calls that carried loss, by index. Groups of step N are named `step-<N - 1>/...`."""
    from sharpen.experience.reading import read_trained

    number = re.match(r"step-(\d+)/", rollout.id)
    if number is None:
        return {}
    return {
        call.call: call
        for call in read_trained(journal, step=int(number.group(1)) + 1)
        if call.rollout_id == rollout.id
    }


def _number(run_dir: Path) -> str:
    """What is noted of a trained call: its advantage, or what its tokens' are made from with a critic or a teacher."""
    from sharpen.algorithm.advantages import ADVANTAGES
    from sharpen.algorithm.presets import PRESETS

    path = run_dir / "resolved.json"
    resolved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    given = {key: resolved.get(key, {}).get("value") for key in ("algorithm.algorithm_type", "loss.advantage")}
    preset = PRESETS.get(given["algorithm.algorithm_type"])
    name = given["loss.advantage"] or (preset.advantage if preset is not None else None)
    critic = name in ADVANTAGES and ADVANTAGES[name].of_tokens is not None
    if critic:
        return "reward for the critic"
    return "advantage before the teacher's" if preset is not None and preset.needs_teacher else "advantage"


def _decoder(console: Console, run_dir: Path) -> Decode | None:
    """Ids to text with the tokenizer of the latest checkpoint, else with that of the model before training."""
    from sharpen.execution.model_files import model_folder
    from sharpen.trainer.checkpoint import pointed

    folder = pointed(run_dir, "latest")
    try:
        if folder is None:
            resolved = json.loads((run_dir / "resolved.json").read_text(encoding="utf-8"))
            folder = model_folder(resolved["model.model_path"]["value"])
    except (ModelError, OSError) as error:
        console.print(f"tokens are shown as ids: {error}", markup=False, highlight=False)
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _console(out: IO[str]) -> Console:
    from rich.console import Console

    if out.isatty():
        console = Console(file=out, highlight=False)
        console.width = min(console.width, WIDTH)
        return console
    return Console(file=out, highlight=False, width=WIDTH, force_terminal=False, color_system=None)


def _print_wrapped(console: Console, line: str, *, style: str = "", hanging: int = 2) -> None:
    from rich.text import Text

    width = min(console.width, WIDTH)
    parts = Text(clean(line), style).wrap(console, width - hanging) if len(line) > width else [Text(clean(line), style)]
    for number, part in enumerate(parts):
        part.rstrip()
        console.print(Text(" " * hanging if number else "").append_text(part), soft_wrap=True)
