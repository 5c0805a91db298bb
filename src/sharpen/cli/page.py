"""Print a rollout: its messages by role, its tool calls, and the sampled tokens of each model call.

In: a console, a rollout, the calls that carried loss. Out: text as wide as the screen; sampled tokens are
coloured by their probability, and dimmed if they carry no loss.

Shape suffix: S sampled tokens of a call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from sharpen.agent.transcript import TRIMMED, Decode, clean, content_text, pieces
from sharpen.errors import ImageError
from sharpen.screen import fitted, text_width
from sharpen.types import Call

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sharpen.learning.experience.entropies import TokenRatios
    from sharpen.learning.experience.reading import TrainedCall
    from sharpen.types import Call, FloatArray, Rollout


# How the calls of a rollout belong together, for `sharpen show`: an agent may ask for a title, start sub-agents or
# compact its history in between.
#
# In: a rollout's calls. Out: for each call the earlier one that it continues, and what they share; and the rollout's
# conversations, with what each was asked. All of it comes from the records: which ids and which messages are the same.

_ASKED = 60
"""How many characters of what a conversation was asked are shown: its end, before which agents put notes of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The calls that continue a first one, by index, in order; the end of its last user message; its tools by name."""

    calls: tuple[int, ...]
    asked: str
    tools: tuple[str, ...]


def continued(calls: Sequence[Call], call: Call) -> Call | None:
    """Return the earlier call that this one continues: its parent, else the latest one all of whose messages it
    repeats."""
    if call.parent is not None:
        return calls[call.parent]
    return next((one for one in reversed(calls[: call.index]) if _repeats(call, one)), None)


def conversations(calls: Sequence[Call]) -> list[Conversation]:
    """Group the calls by the first one that each of them goes back to."""
    first: dict[int, int] = {}
    for call in calls:
        before = continued(calls, call)
        first[call.index] = call.index if before is None else first[before.index]
    return [
        Conversation(
            calls=tuple(index for index, root in first.items() if root == call.index),
            asked=_asked(call),
            tools=_tools(call),
        )
        for call in calls
        if first[call.index] == call.index
    ]


def relation(calls: Sequence[Call], call: Call) -> str:
    """Describe what a call has to do with the earlier ones; empty for the first call and for one that goes on where the
    call before it ended."""
    before = continued(calls, call)
    if before is None:
        return f"a separate conversation: {_shared(calls[: call.index], call)}" if call.index else ""
    if call.parent is not None:
        return "" if before.index == call.index - 1 else f"continues call {before.index}"
    if len(call.messages) == len(before.messages):
        return f"asks the same as call {before.index}"
    return f"continues call {before.index} in words, not token by token: a sequence of its own"


def _repeats(call: Call, earlier: Call) -> bool:
    return tuple(call.messages[: len(earlier.messages)]) == tuple(earlier.messages)


def _shared(earlier: Sequence[Call], call: Call) -> str:
    """Describe which of the earlier calls' system prompts and tools a call has."""
    system, tools = _system(call), _tools(call)
    named = ", ".join(tools) if len(tools) <= 4 else f"{len(tools)} tools"
    now = f"tools {named}" if 0 < len(tools) <= 4 else named or "no tools"
    alike = [one for one in earlier if _system(one) == system] if system else []
    same = next((one for one in alike if _tools(one) == tools), None)
    if same is not None:
        return f"system prompt and tools of call {same.index}, another history"
    if alike:
        return f"system prompt of call {alike[0].index}, {now}"
    return f"{'another' if system else 'no'} system prompt, {now}"


def _system(call: Call) -> str:
    return "\n".join(
        content_text(one.get("content")) for one in call.messages[:1] if one.get("role") in ("system", "developer")
    )


def _tools(call: Call) -> tuple[str, ...]:
    return tuple(str(tool.get("function", {}).get("name", "?")) for tool in call.tools)


def _asked(call: Call) -> str:
    """Return the end of a call's last user message in one line, or of its last message if no user speaks."""
    spoken = [one for one in call.messages if one.get("role") == "user"] or call.messages[-1:]
    text = " ".join(content_text(spoken[-1].get("content")).split()) if spoken else ""
    return text if len(text) <= _ASKED else f"...{text[3 - _ASKED :]}"


FOLDED_LINES = 12
_ROOMY = 80
"""The width of a screen from which the columns of a table stand two blanks apart."""
BANDS = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "bold red"))
"""Least probability of a sampled token, and its colour."""
_ROLE_STYLES = {"system": "magenta", "developer": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}


class Page:
    """Prints one rollout. `trained` holds the calls that carried loss, by index; `number_name` names their recorded
    number. `untrained` is the reason shown for the other calls. `entropies` (S) and `ratios` are those of calls that
    have some."""

    def __init__(
        self,
        console: Console,
        decode: Decode | None,
        trained: Mapping[int, TrainedCall],
        number_name: str,
        *,
        untrained: str = "its rollout was not trained",
        entropies: Mapping[int, FloatArray] | None = None,
        ratios: Mapping[int, TokenRatios] | None = None,
    ) -> None:
        self._console = console
        self._decode = decode
        self._trained = trained
        self._number_name = number_name
        self._untrained = untrained
        self._entropies = entropies or {}
        self._ratios = ratios or {}

    def rollout(self, rollout: Rollout, *, only: int | None, tokens: bool, row: Sequence[str] = ()) -> None:
        """Print the lines of the task's row, and all calls, or only one with its whole prompt."""
        self._head(rollout)
        for line in row:
            self.line(f"  {line}", "cyan")
        if rollout.trimmed:
            self.line(f"the {TRIMMED}: below is what was sampled", "yellow")
        related = only is None and not rollout.trimmed
        if related:
            self._conversations(rollout)
        for call in rollout.calls:
            if only is None or call.index == only:
                before = continued(rollout.calls, call) if related else None
                if related and (said := relation(rollout.calls, call)):
                    self.line("")
                    self.line(f"({said})", "dim")
                self._call(call, before, _reported(rollout, call.index), tokens=tokens)
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
        from sharpen.agent.rollout.models import AUXILIARY, GATEWAY
        from sharpen.agent.rollout.statistics import own_metrics

        if rollout.metrics:
            measured = {name: value for name, value in rollout.metrics.items() if name.startswith((GATEWAY, AUXILIARY))}
            metrics = {**own_metrics(rollout.metrics), **measured}
            self.line("metrics: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items()))
        if rollout.error:
            self.line(f"error: {rollout.error}", "red")
        for line in _folded(rollout.traceback or ""):
            self.line(f"  {line}", "dim")

    def _conversations(self, rollout: Rollout) -> None:
        """Print the rollout's conversations, and what of each was trained, if there is more than one."""
        found = conversations(rollout.calls)
        if len(found) < 2:
            return
        self.line(f"{len(found)} conversations:")
        for conversation in found:
            trained = [rollout.calls[index] for index in conversation.calls if index in self._trained]
            num_tokens = sum(len(call.sampled_ids_S) for call in trained)
            calls = f"call{'s' * (len(conversation.calls) > 1)} {', '.join(map(str, conversation.calls))}"
            tools = f"{len(conversation.tools) or 'no'} tool{'s' * (len(conversation.tools) != 1)}"
            count = f"{len(trained)} of {len(conversation.calls)} trained ({num_tokens} tokens)"
            self.line(f"  {calls}: {tools}, {count}, asked: {conversation.asked}")

    def _call(self, call: Call, before: Call | None, reported: Sequence[str], *, tokens: bool) -> None:
        sizes = _sizes(call)
        for message in _new_messages(call, before):
            self._message(message, sizes)
        self.line("")
        names = [*([f"agent {call.agent}"] if call.agent else []), *([f"asked for {call.model}"] if call.model else [])]
        self.line(f"call {call.index}: {self._facts(call, [*names, *reported])}", "bold")
        if call.span is not None:
            self.line(f"OpenTelemetry: trace {call.span.trace_id}, span {call.span.span_id}", "dim")
        text = content_text(call.response.get("content"))
        if tokens:
            self._table(call)
        elif text and (self._decode is None or not len(call.sampled_ids_S)):
            self._body(text)
        else:
            self._body(self._sampled(call))
        for tool_call in call.response.get("tool_calls") or ():
            self._body(_tool_call(tool_call), "bold")

    def _facts(self, call: Call, reported: Sequence[str]) -> str:
        versions = sorted(set(call.versions_S.tolist()))
        spread = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))
        trained = self._trained.get(call.index)
        facts = [
            f"{len(call.sampled_ids_S)} tokens",
            f"version {spread or '-'}",
            f"temperature {call.sampling.temperature:g}",
            str(call.finish_reason),
            f"trained, {self._number_name} {trained.advantage:+.3g}"
            if trained
            else f"no loss ({_why_no_loss(call) or self._untrained})",
        ]
        if len(call.logprobs_S):
            facts.insert(1, f"logprob {float(call.logprobs_S.mean()):.3g}")
        return ", ".join((*facts, *reported))

    def _message(self, message: Mapping[str, Any], sizes: Mapping[str, str]) -> None:
        role = str(message.get("role", "?"))
        name = message.get("name")
        self.line("")
        self.line(role + (f" ({name})" if name and name != role else "") + ":", _ROLE_STYLES.get(role, ""))
        if message.get("reasoning_content"):
            self._body(f"(reasoning) {message['reasoning_content']}", "dim")
        text = content_text(message.get("content"), sizes)
        if text:
            self._body(text)
        for tool_call in message.get("tool_calls") or ():
            self._body(_tool_call(tool_call), "bold")

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

        table = Table(box=None, padding=(0, 2 if self._console.width >= _ROOMY else 1, 0, 0), header_style="bold")
        entropies_S, ratios = self._entropies.get(call.index), self._ratios.get(call.index)
        recorded = [*(["entropy"] if self._entropies else []), *(["ratio"] if self._ratios else [])]
        for name in ("number", "token", "id", "logprob", *recorded, "version", "mask"):
            is_text = name == "token"
            table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
        mask = int(call.index in self._trained)
        for start, end, piece in pieces(call.sampled_ids_S, self._decode):
            for place in range(start, end):
                shown = json.dumps(clean(piece), ensure_ascii=False) if place == end - 1 else "..."
                logprob = float(call.logprobs_S[place])
                cells = [str(place), shown, str(call.sampled_ids_S[place]), f"{logprob:.4f}"]
                if self._entropies:
                    cells.append(_entropy(math.nan if entropies_S is None else float(entropies_S[place])))
                if self._ratios:
                    cells.append(_ratio(ratios, place))
                row = (*cells, str(call.versions_S[place]), str(mask))
                table.add_row(*(Text(cell) for cell in row), style=self._style(call, logprob))
        self._console.print(table)
        if ratios is not None and ratios.clipped_S.any():
            self.line("*: clipped, without a gradient from the policy loss", "dim")

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
        """Print one line, wrapped."""
        print_wrapped(self._console, line, style=style)

    def _body(self, body: str | Text, style: str = "") -> None:
        from rich.text import Text

        text = Text(clean(body), style) if isinstance(body, str) else body
        for line in text.wrap(self._console, self._console.width - 4, tab_size=4):
            line.rstrip()
            self._console.print(Text("    ").append_text(line), soft_wrap=True)


def _entropy(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _ratio(ratios: TokenRatios | None, place: int) -> str:
    """Format the ratio of a token, with a star if it was clipped; a blank keeps the others in their column."""
    if ratios is None:
        return "- "
    ratio, mark = float(ratios.ratios_S[place]), "*" if ratios.clipped_S[place] else " "
    if math.isnan(ratio):
        return f"-{mark}"
    return f"{ratio:.3f}{mark}" if 0.001 <= ratio < 1000 else f"{ratio:.0e}{mark}"


def _folded(traceback: str) -> list[str]:
    """Return the lines of a traceback; of a long one the innermost, which come last."""
    lines = traceback.splitlines()
    left_out = len(lines) - FOLDED_LINES
    return lines if left_out <= 1 else [f"[{left_out} more lines: --json has all]", *lines[left_out:]]


def _new_messages(call: Call, before: Call | None) -> Sequence[Mapping[str, Any]]:
    """Return the messages added to the prompt since the previous call, or the whole prompt if it does not continue that
    call."""
    if before is None or tuple(call.messages[: len(before.messages)]) != tuple(before.messages):
        return call.messages
    new = call.messages[len(before.messages) :]
    return new[1:] if new and new[0].get("role") == "assistant" else new  # the sampled answer is already shown


def _tool_call(tool_call: Mapping[str, Any]) -> str:
    function = tool_call.get("function", {})
    return f"-> {function.get('name')}({function.get('arguments')})"


def _reported(rollout: Rollout, call: int) -> list[str]:
    """Format the rewards and the state that the workflow reported for a call."""
    numbers = {"reward": rollout.call_rewards, "step reward": rollout.step_rewards}
    shown = [f"{name} {rewards[call]:g}" for name, rewards in numbers.items() if call in rewards]
    return [*shown, f"state {rollout.states[call]}"] if call in rollout.states else shown


def _why_no_loss(call: Call) -> str:
    if call.status != "used":
        return str(call.status.value)
    if call.sampling.temperature <= 0:
        return "temperature 0"
    return ""


def open_console(out: IO[str]) -> Console:
    from rich.console import Console

    width = text_width(out)
    if out.isatty():
        return Console(file=out, highlight=False, width=width)
    return Console(file=out, highlight=False, width=width, force_terminal=False, color_system=None)


def print_wrapped(console: Console, line: str, *, style: str = "", hanging: int = 2) -> None:
    from rich.text import Text

    for part in fitted(clean(line), console.width, hanging=hanging):
        console.print(Text(part, style), soft_wrap=True)


def _sizes(call: Call) -> dict[str, str]:
    """Return the sizes of a call's images by hash, of those whose files can be read."""
    from sharpen.models.images import size_of

    found = {}
    for span in call.pictures:
        with suppress(ImageError):
            if (size := size_of(span.picture.data)) is not None:
                found[span.picture.sha256] = f"{size[0]}x{size[1]}"
    return found
