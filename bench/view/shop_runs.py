"""Makes run directories without a model, for the bench and the tests of `sharpen view`: an agent that looks up stock in
a shop with a tool, and learns to.

In: a path, a size, a seed. Out: a true run directory: its journals are written by the journal's own writer, its other
files by the functions that a run calls. The text is made of words of a small tokenizer, which is in the checkpoint.
"""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from sharpen.config.load import resolve, write_resolved
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.show.monitor.metrics import JsonlSink
from sharpen.show.monitor.statistics import Evaluation, accuracy_metrics
from sharpen.show.monitor.summary import Summary, write_summary
from sharpen.show.monitor.verdict import Candidates, Checkpoint, judge_rewards
from sharpen.types import (
    Call,
    CallEntropies,
    CallStatus,
    Check,
    Experience,
    Group,
    IntArray,
    Outcome,
    Picture,
    PictureSpan,
    Rollout,
    Sampling,
    Task,
)

SYSTEM = "You keep the stock of a shop. Look every number up with the tool, then answer with it."
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "How many of a thing are in stock.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}
THINGS = ("apples", "bolts", "candles", "dishes", "envelopes", "forks", "gloves", "hammers", "inkwells", "jars")
WORDS = (
    *THINGS,
    *("how", "many", "are", "in", "stock", "there", "the", "shelf", "holds", "counted", "again", "so", "number"),
    *("I", "will", "look", "it", "up", "answer", "is", "of"),
    *(str(number) for number in range(200)),
    *(".", "?", "#", "-> look_up", "<end>", "<unknown>"),
)
IDS = {word: number for number, word in enumerate(dict.fromkeys(WORDS))}
END = IDS["<end>"]
BEGAN = 1.7e9
"""When the first step begins, in seconds since 1970."""
TRACEBACK = """Traceback (most recent call last):
  File "agent.py", line 31, in serve_customer
    stock = await look_up(thing)
  File "agent.py", line 12, in look_up
    return await asyncio.wait_for(shop.ask(thing), 30)
TimeoutError"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """How large a run is made. `evaluations` are the steps after which the held-out tasks are evaluated, beside before
    and after; `tasks` are the training's, drawn in turns; `words` lengthens answers."""

    steps: int = 6
    batch_size: int = 4
    group_size: int = 4
    tasks: int = 12
    held_out: int = 12
    evaluations: tuple[int, ...] = (3,)
    words: int = 12

    @property
    def rollouts(self) -> int:
        """How many rollouts the training has."""
        return self.steps * self.batch_size * self.group_size


@dataclass(slots=True)
class Maker:
    """Makes the records of a run. `said` replaces what the agent answers with, by a rollout's id; `messages` the
    messages of its first call. With `pictures` each task shows one of so many photographs of a shelf."""

    size: RunSize = field(default_factory=RunSize)
    seed: int = 0
    pictures: int = 0
    said: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    learns: bool = True

    def group(self, step: int, task: int, *, prefix: str = "", size: int | None = None) -> Group:
        """Make the group of a task in a step (from 0); with `prefix`, that of an evaluation."""
        name = f"{'test' if prefix else 'train'}/{task}"
        id_ = f"{prefix}/{name}" if prefix else f"step-{step}/{name}"
        count = self.size.group_size if size is None else size
        rollouts = tuple(self._rollout(id_, name, task, index, step) for index in range(count))
        row = {"question": question(task), "answer": str(answer(task))}
        failed = [rollout for rollout in rollouts if rollout.outcome == Outcome.TIMEOUT]
        return Group(
            id=id_,
            task=Task(id=name, index=task, row=row),
            version=step,
            rollouts=rollouts,
            attempts=tuple(replace(rollout, error="TimeoutError: too slow, first attempt") for rollout in failed[:1]),
        )

    def _rollout(self, group: str, task_id: str, task: int, index: int, step: int) -> Rollout:
        id_ = f"{group}/{index}"
        draw = random.Random(f"{self.seed} {id_}")
        skill = 0.2 + 0.7 * (step / max(1, self.size.steps) if self.learns else 0)
        right = draw.random() < skill
        said = self.said.get(id_) or f"there are {answer(task) if right else draw.randrange(200)} {THINGS[task % 10]} ."
        waits = random.Random(f"{self.seed} waits {id_}")
        began = BEGAN + 60.0 * step + waits.random()
        calls, ended = in_time(self._calls(draw, task, step, said, id_), began, waits)
        values: dict[str, Any] = {"outcome": Outcome.OK, "reward": float(right), "error": None}
        if draw.random() < 0.02:
            error = "TimeoutError: the shop did not answer within 30 s (agent.py:12)"
            values = {"outcome": Outcome.TIMEOUT, "reward": None, "error": error, "traceback": TRACEBACK}
        return Rollout(
            id=id_,
            group_id=group,
            task_id=task_id,
            index=index,
            attempt=1 if values["error"] else 0,
            calls=tuple(calls),
            metrics={"gateway/forks": float(len(calls) > 2), "judge/exact": float(right), "turns": float(len(calls))},
            seconds=ended - began + draw.random(),
            started=began,
            **values,
        )

    def _calls(self, draw: random.Random, task: int, step: int, said: str, id_: str) -> list[Call]:
        thing = THINGS[task % 10]
        shown = (photograph(task % self.pictures),) if self.pictures else ()
        asked = self.messages.get(id_) or (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": with_pictures(question(task), shown)},
        )
        look = {"id": f"look-{task}", "type": "function"}
        look["function"] = {"name": "look_up", "arguments": json.dumps({"thing": thing})}  # type: ignore[assignment]
        first = make_call(
            0,
            None,
            [*ids(f"how many {thing} ?")],
            ids("I will look it up -> look_up"),
            step,
            draw,
            messages=tuple(asked),
            response={"role": "assistant", "content": "I will look it up", "tool_calls": [look]},
            pictures=tuple(PictureSpan(picture=one, start=0, length=1) for one in shown),
        )
        result = {"role": "tool", "tool_call_id": look["id"], "content": f"the shelf holds {answer(task)} {thing}"}
        words = " ".join(draw.choices(WORDS[:30], k=self.size.words))
        second = make_call(
            1,
            first,
            ids(f"the shelf holds {answer(task)} {thing}"),
            ids(f"{words} {said}"),
            step,
            draw,
            messages=(*first.messages, first.response, result),
            response={"role": "assistant", "reasoning_content": words, "content": said},
        )
        return [first, second, *([self._check(second, draw, step)] if draw.random() < 0.1 else [])]

    def _check(self, before: Call, draw: random.Random, step: int) -> Call:
        """A third call that counts again: its history is compacted, so that it forks."""
        messages = (before.messages[0], {"role": "user", "content": "so far: the shelf was counted"})
        return make_call(
            2,
            None,
            ids("the shelf holds"),
            ids("counted again"),
            step,
            draw,
            messages=messages,
            response={"role": "assistant", "content": "counted again"},
            index_of=2,
        )


def make_call(
    index: int,
    parent: Call | None,
    prompt: Sequence[int],
    sampled: Sequence[int],
    version: int,
    draw: random.Random,
    *,
    messages: tuple[Mapping[str, Any], ...],
    response: Mapping[str, Any],
    index_of: int | None = None,
    pictures: tuple[PictureSpan, ...] = (),
) -> Call:
    """Make a call; its prompt continues its parent's ids, and shows its parent's pictures."""
    before = [] if parent is None else [*parent.prompt_ids_P.tolist(), *parent.sampled_ids_S.tolist()]
    sampled = [*sampled, END]
    return Call(
        index=index if index_of is None else index_of,
        parent=None if parent is None else parent.index,
        prompt_ids_P=np.array([*before, *prompt], np.int32),
        sampled_ids_S=np.array(sampled, np.int32),
        logprobs_S=np.array([-3.0 * draw.random() ** 3 for _ in sampled], np.float32),
        versions_S=np.full(len(sampled), version, np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=messages,
        tools=(TOOL,),
        response=response,
        pictures=pictures if parent is None else parent.pictures,
        seconds=0.2 + draw.random(),
    )


def in_time(calls: Sequence[Call], began: float, waits: random.Random) -> tuple[list[Call], float]:
    """The calls one after the other, with some time between them for tools, and when the last one ended."""
    placed: list[Call] = []
    for call in calls:
        began += 0.3 * waits.random()
        placed.append(replace(call, started=began))
        began += call.seconds
    return placed, began


def question(task: int) -> str:
    """What is asked in a task."""
    return f"How many {THINGS[task % 10]} are in stock on shelf {task}?"


@functools.cache
def photograph(number: int) -> Picture:
    """A picture of a shelf, of some kilobytes."""
    noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return Picture.of(file.getvalue())


def with_pictures(text: str, pictures: Sequence[Picture]) -> Any:
    """A message's content: text alone, or in parts with pictures, as the journal keeps them."""
    parts = [{"type": "image_url", "image_url": {"url": f"sha256:{one.sha256}"}} for one in pictures]
    return [*parts, {"type": "text", "text": text}] if parts else text


def answer(task: int) -> int:
    """What is right."""
    return (37 * task + 11) % 200


def ids(text: str) -> list[int]:
    """The ids of words."""
    unknown = IDS["<unknown>"]
    return [IDS.get(word, unknown) for word in text.split()]


def make_run(path: Path, maker: Maker | None = None, *, until: int | None = None, ended: bool = True) -> Path:
    """Make a run directory, and return it. `until` leaves out the steps after it; a run that has not `ended` has no
    summary, certificate, or evaluation after."""
    maker = maker or Maker()
    size = maker.size
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": {"model_path": "a-model", "max_model_len": 512},
        "name": path.name,
        "algorithm": {"algorithm_type": "grpo", "batch_size": size.batch_size, "group_size": size.group_size},
        "train_dataset": {"path": "tasks.jsonl", "total_steps": size.steps},
        "seed": maker.seed,
    }
    write_resolved(path / "resolved.json", resolve(settings={**settings, "workflow": "agent.py:run_agent"}))
    last = size.steps if until is None else until
    write_tokenizer(path, max(last, 1))
    evaluations: dict[str, Evaluation] = {}
    with (
        closing(JsonlSink(path / "metrics.jsonl")) as metrics,
        Journal(path / "run.db") as journal,
        Journal(path / "evaluations.db") as transcripts,
    ):
        evaluations["before"] = _evaluate(maker, transcripts, "before", 0)
        metrics.log(0, accuracy_metrics(evaluations["before"]))
        journal.begin(0, 0)
        for step in range(1, last + 1):
            train(maker, journal, metrics, step)
            if step in size.evaluations:
                metrics.log(step, accuracy_metrics(_evaluate(maker, transcripts, f"step-{step}", step)))
        if ended:
            evaluations["after"] = _evaluate(maker, transcripts, "after", last)
            metrics.log(last, accuracy_metrics(evaluations["after"]))
    if ended:
        _finish(path, size, evaluations, last)
    return path


def train(maker: Maker, journal: Journal, metrics: JsonlSink, step: int) -> None:
    """Add a step to a run: its groups, what was trained, its numbers."""
    size = maker.size
    first = (step - 1) * size.batch_size
    groups = [maker.group(step - 1, (first + place) % size.tasks) for place in range(size.batch_size)]
    for group in groups:
        journal.add(group)
    rollouts = [rollout for group in groups for rollout in group.scored]
    journal.add_checks(step, [Check(name="ids", checked=len(rollouts), broken=0)])
    trained = list(_trained(groups))
    spans, experiences = tuple(span for span, _ in trained), tuple(experience for _, experience in trained)
    places = tuple(GroupPlace(group_id=group.id, update=0, left_out=None, replayed=False) for group in groups)
    numbers = _numbers(rollouts, step)
    entropies = [_entropies(rollout, call) for group in groups for rollout in group.scored for call in rollout.calls]
    journal.add_step(step, step, numbers, experiences, Delivery(spans=spans, places=places), entropies)
    journal.flush()
    metrics.log(step, numbers)


def _numbers(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    rewards = [rollout.reward or 0.0 for rollout in rollouts] or [0.0]
    tokens = sum(len(call.sampled_ids_S) for rollout in rollouts for call in rollout.calls)
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "rollout/count": float(len(rollouts)),
        "trainer/loss": 1.0 / step,
        "trainer/entropy": 1.0 / step,
        "tokens/sampled": float(tokens),
        "time/step_s": 4.0,
        "time/generate_s": 2.0,
        "time/idle_s": 0.5,
        "time/train_s": 1.2,
        "time/sync_s": 0.1,
        "batch/loss_tokens": float(tokens),
        "trainer/logprob_gap_tokens": float(tokens),
        "trainer/logprob_gap_mean": 1e-7,
        "trainer/logprob_gap_max": 1e-6,
        "trainer/logprob_gap_kl": 1e-12,
    }


def _trained(groups: Sequence[Group]) -> Iterator[tuple[LossSpan, Experience]]:
    """Yield a span and an experience for each call that is trained: each call is a sequence of its own."""
    number = 0
    for group in groups:
        mean = float(np.mean([rollout.reward for rollout in group.scored])) if group.scored else 0.0
        for rollout in group.scored:
            for call in rollout.calls:
                yield _call_trained(call, rollout, (rollout.reward or 0.0) - mean, number)
                number += 1


def _entropies(rollout: Rollout, call: Call) -> CallEntropies:
    """Make entropies of a call's tokens, higher where the token was less probable, and log ratios from -0.3 to 0.3, of
    which those above 0.25 are clipped."""
    places_S: IntArray = np.arange(len(call.sampled_ids_S), dtype=np.int32) + len(call.prompt_ids_P)
    entropies_S = (0.1 - 0.7 * call.logprobs_S).astype(np.float16)
    log_ratios_S = (0.1 * ((call.sampled_ids_S + call.index) % 7 - 3)).astype(np.float16)
    return CallEntropies(
        rollout_id=rollout.id,
        call=call.index,
        places_S=places_S,
        entropies_S=entropies_S,
        log_ratios_S=log_ratios_S,
        clipped_S=log_ratios_S > 0.25,
        entropy=float(entropies_S.sum(dtype=np.float64)),
        varentropy=float(len(places_S)),
        cumulative=0.5 * len(places_S),
    )


def _call_trained(call: Call, rollout: Rollout, advantage: float, number: int) -> tuple[LossSpan, Experience]:
    prompt, sampled = len(call.prompt_ids_P), len(call.sampled_ids_S)
    places_S: IntArray = np.arange(prompt, prompt + sampled, dtype=np.int32)
    advantages_T, weights_T = np.zeros((2, prompt + sampled), np.float32)
    advantages_T[places_S], weights_T[places_S] = advantage, 1 / sampled
    mask_T = np.arange(prompt + sampled) >= prompt
    calls_T = np.where(mask_T, call.index, -1).astype(np.int32)
    span = LossSpan(
        update=0,
        sequence=number,
        group_id=rollout.group_id,
        rollout_id=rollout.id,
        call=call.index,
        places_S=places_S,
        advantages_S=advantages_T[places_S],
        weights_S=weights_T[places_S],
        ids=b"",
        records=b"",
    )
    experience = Experience(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        ids_T=np.concatenate([call.prompt_ids_P, call.sampled_ids_S]),
        loss_mask_T=mask_T,
        logprobs_T=np.zeros(prompt + sampled, np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=calls_T,
        temperatures_T=np.ones(prompt + sampled, np.float32),
        advantages_T=advantages_T,
        weights_T=weights_T,
    )
    return span, experience


def _evaluate(maker: Maker, transcripts: Journal, moment: str, step: int) -> Evaluation:
    """Roll the held-out tasks out, in both modes, and return their rewards."""
    rewards: dict[str, dict[str, float]] = {"greedy": {}, "sampled": {}}
    for mode, by_task in rewards.items():
        for task in range(maker.size.held_out):
            group = maker.group(step, task, prefix=f"{moment}/held-out/{mode}", size=1)
            transcripts.add(group)
            by_task[group.task.id] = group.rollouts[0].reward or 0.0
    return Evaluation(greedy=rewards["greedy"], sampled=rewards["sampled"])


def _finish(path: Path, size: RunSize, evaluations: Mapping[str, Evaluation], last: int) -> None:
    """Write what a run writes at its end."""
    from sharpen.evidence.certificate.certificate import recorded_certificate, write_certificate

    folder = path / f"global_step_{last}"
    candidates = Candidates(
        original="a-model",
        before=evaluations["before"],
        last=Checkpoint(step=last, folder=folder, result=evaluations["after"]),
    )
    summary = Summary(
        before=evaluations["before"],
        after=evaluations["after"],
        seconds=4.0 * last,
        seconds_to_first_step=4.0,
        steps=last,
        rollouts=last * size.batch_size * size.group_size,
        sampled_tokens=1000 * last,
        trained_tokens=1000 * last,
        computed_tokens=3000 * last,
        peak_memory_mb=512.0,
        model_dir=folder,
        run_dir=path,
        verdict=judge_rewards(candidates, "sampled"),
    )
    write_summary(path / "summary.json", summary)
    write_certificate(path, recorded_certificate(path))


def write_tokenizer(path: Path, step: int) -> None:
    """Write the tokenizer of the words into the checkpoint of a step, and point `latest` to it."""
    folder = path / f"global_step_{step}"
    (folder / "trainer_state").mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state" / "state.json").write_text(json.dumps({"version": step}))
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    latest = path / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
