"""What a teacher is told beside what the policy read: a solution, or what was measured of the answer.

In: the batches of a step, their groups, the text of `distill.context`. Out: the same batches, whose sequences have the
teacher's own prompt (`Experience.told_P`). The text stands in the prompt in the place of the last user message, and the
prompt is encoded anew; what follows it are the recorded ids, one by one.

Sources: OPSD, arXiv 2601.18734, and SDFT, arXiv 2601.19897 (a solution, a demonstration); SDPO, arXiv 2601.20802
(feedback).

Shape suffix: P tokens of a prompt.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpen.config.distill import METRICS, context_fields
from sharpen.errors import DatasetError, TrainingError
from sharpen.gateway.render import Renderer
from sharpen.learning.experience.draw import Batch
from sharpen.models.configuration import load_tokenizer, read_config
from sharpen.models.pieces import text_config
from sharpen.types import Call, Experience, Group, IntArray, Rollout, Task, metric_named


def check_told(task: Task, context: str) -> None:
    """Raise `DatasetError` if the row of a task lacks what the teacher is told of it."""
    for name in context_fields(context):
        if name != "prompt" and not name.startswith(METRICS) and task.row.get(name) is None:
            raise DatasetError(
                f"distill.context tells the teacher {{{name}}}, but task {task.id} has {task.row.get(name)!r} there "
                f"(it has {', '.join(task.row)}): give it the field, or leave it out of the training set"
            )


def filled(context: str, prompt: str, row: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """Return the text with its names filled in: texts as they are, other values of the row as JSON."""
    values = {"prompt": prompt}
    for name in context_fields(context):
        if name.startswith(METRICS):
            value = metric_named(metrics, name.removeprefix(METRICS))
            assert value is not None, "a rollout without it is no scored one: `RolloutRecipe.needs_metrics`"
            values[name] = f"{value:g}"
        elif name != "prompt":
            values[name] = row[name] if isinstance(row[name], str) else json.dumps(row[name], ensure_ascii=False)
    parts = string.Formatter().parse(context)
    return "".join(text + ("" if name is None else values[name]) for text, name, _, _ in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Tells the teachers of a run. `max_tokens` is what each of them can read."""

    context: str
    renderer: Renderer
    max_tokens: int | None = None

    @classmethod
    def of(cls, context: str | None, folder: Path, teachers: Sequence[Path]) -> Told | None:
        """Return what the teachers of the model in `folder` are told by `distill.context`; None if that is nothing."""
        if context is None:
            return None
        found = [getattr(text_config(read_config(one)), "max_position_embeddings", None) for one in (folder, *teachers)]
        longest = min((one for one in found if one is not None), default=None)
        return cls(context=context, renderer=Renderer(load_tokenizer(folder)), max_tokens=longest)

    def join(self, batches: Sequence[Batch], groups: Sequence[Group]) -> tuple[Batch, ...]:
        """Return the batches of these groups with what the teacher is told. Raises `TrainingError` for a prompt in
        which its user message is not found, one with images, or a sequence that is too long with it."""
        rollouts = {one.id: (group.task, one) for group in groups for one in group.rollouts}
        return tuple(
            replace(batch, experiences=tuple(self._told(one, *rollouts[one.rollout_id]) for one in batch.experiences))
            for batch in batches
        )

    def _told(self, experience: Experience, task: Task, rollout: Rollout) -> Experience:
        first = rollout.calls[int(experience.calls_T[experience.calls_T >= 0].min())]
        while first.parent is not None:
            first = rollout.calls[first.parent]
        if experience.pictures:
            raise TrainingError(f"rollout {rollout.id} has images, which distill.context does not work with")
        prompt = _asked(first)
        told_P = self.prompt_with(first.prompt_ids_P, prompt, filled(self.context, prompt, task.row, rollout.metrics))
        if told_P is None:
            raise TrainingError(
                f"rollout {rollout.id}: the last user message of call {first.index} is not in its prompt as it was "
                "sent, so that distill.context cannot take its place: the chat template changes it"
            )
        length = len(told_P) + len(experience.ids_T) - len(first.prompt_ids_P)
        if self.max_tokens is not None and length > self.max_tokens:
            raise TrainingError(
                f"rollout {rollout.id} has {length} tokens with what distill.context tells the teacher, which reads at "
                f"most {self.max_tokens}: lower model.max_model_len, or tell it less"
            )
        return replace(experience, told_P=told_P, num_untold=len(first.prompt_ids_P))

    def prompt_with(self, prompt_ids_P: IntArray, message: str, told: str) -> IntArray | None:
        """Return the ids of the prompt with the text `told` where `message` stands last; None if it stands nowhere."""
        text = self.renderer.spell(prompt_ids_P.tolist())
        for one in filter(None, (message, message.strip())):
            before, found, after = text.rpartition(one)
            if found:
                return self.renderer.encode(f"{before}{told}{after}")
        return None


def _asked(call: Call) -> str:
    """The text of the last message that is not the model's own or a tool's: a user's, or a whole prompt."""
    for message in reversed(call.messages):
        if message.get("role") not in ("assistant", "tool", "system", "developer"):
            content = message.get("content")
            if isinstance(content, list):
                return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
            return str(content or "")
    return ""
