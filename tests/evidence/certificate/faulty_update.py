"""A run of two steps, and its second step trained anew by the real trainer with a fault in it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import read_resolved
from sharpen.evidence.certificate.lineage import read_lineage
from sharpen.evidence.certificate.plain.begin import PlainStep
from sharpen.evidence.certificate.plain.reread import others
from sharpen.evidence.certificate.plain.retrain import Retrained, _Made, _Records
from sharpen.evidence.certificate.plain.saved_state import SavedState
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.experience.reading import read_groups_at
from sharpen.learning.experience.reread import Rereading
from sharpen.learning.recipe import algorithm_of
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Minibatch
from sharpen.machine import available_bytes
from sharpen.run.expert import make_expert_rows, read_expert_rows
from sharpen.types import Experience

STEP = 2
SETTINGS = {
    "trainer.keep_checkpoints": 100,
    "trainer.max_grad_norm": 0.2,  # below the norms of this model: each update is clipped
    "trainer.weight_decay": 0.1,
    "evaluation.before_and_after": False,
    "check.enabled": False,
    "certificate.retrain": "off",
    "rollout.failure_reward": 0.0,
}


async def two_calls(task, model):
    """Two calls, the second after the first one's answer; the reward is the share of the letter 'e'."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=text.count("e") / 12)


def make_run(
    folder: Path,
    model: Path,
    dataset: Path,
    algorithm: str = "grpo",
    *,
    steps: int = STEP,
    rate: float = 1e-2,
    workflow: Callable[..., Any] = two_calls,
    **settings: Any,
) -> Path:
    """Train steps of two tasks, with a checkpoint after each."""
    result = tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=4, batch_size=2, learning_rate=rate, save_interval_steps=1
        ),
        settings={"checkpoint_root_dir": str(folder), **SETTINGS, **settings},
    )
    return result.run_dir


def with_settings(run: Path, copy: Path, algorithm: str, **settings: Any) -> Path:
    """Copy a run, with other settings of its updates in the records. `FaultyUpdate` trains its last step anew, by these
    settings: from the same rollouts, weights and moments."""
    path = shutil.copytree(run, copy, symlinks=True) / "resolved.json"
    recorded = json.loads(path.read_text())
    for name, value in {"algorithm.algorithm_type": algorithm, **settings}.items():
        parts = {f"{name}.{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
        recorded |= {key: {"value": one, "origin": "argument"} for key, one in parts.items()}
    path.write_text(json.dumps(recorded))
    return copy


class MadeOnce(_Records):
    """The records of a run whose last step's checkpoint is exchanged again and again: what is read of them, and what
    the plain loop makes of the rest, is the same each time, and is made once."""

    _known: _Made | None = None

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._steps.step = functools.cache(self._steps.step)  # type: ignore[method-assign]

    def _made(self, begin: Path | None, end: Path, after: SavedState, steps: Sequence[PlainStep]) -> _Made:
        self._known = self._known or super()._made(begin, end, after, steps)
        return self._known


class Prepared:
    """What the last step of a run trains, and how: the same for each fault."""

    def __init__(self, run: Path) -> None:
        config = read_resolved(run / "resolved.json")
        algorithm = algorithm_of(config)
        groups = read_groups_at(run / "run.db", read_lineage(run).groups[STEP])
        drawn = draw_batches(groups, algorithm, config.trainer.num_minibatches)
        base, thinking = Path(config.model.model_path), config.model.enable_thinking
        rereading = Rereading.of(algorithm.distill, base, others(config, base), thinking)
        if rereading is not None:
            rereading.place(groups)
            drawn = rereading.join(drawn)
        rows = make_expert_rows(config, algorithm, read_expert_rows(config, algorithm), base)
        if rows is not None:
            for _ in range(STEP - 1):
                rows.order.draw()
            drawn, _, _ = rows.join(drawn)
        self.drawn = drawn
        self.plan = TrainerPlan(
            model_path=base,
            algorithm=algorithm,
            config=config.trainer,
            learning_rate=config.algorithm.learning_rate,
            planned_updates=STEP * config.trainer.num_minibatches * config.trainer.epochs,
            seed=config.seed,
            critic=config.critic,
            teachers=config.distill.models,
            read_anew=frozenset(others(config, base)),
        )
        self.records = MadeOnce(run)


prepared = functools.cache(Prepared)
"""Read it of a run, once."""


class FaultyUpdate:
    """The last step of a run, about to be trained from the checkpoint before it. A fault changes `trainer` or
    `batches`; then `train` makes the step and puts its checkpoint in the place of the run's own."""

    def __init__(self, run: Path, copy: Path) -> None:
        self.run = shutil.copytree(run, copy, symlinks=True)
        self._prepared = prepared(run)
        self.batches = [list(batch.experiences) for batch in self._prepared.drawn]
        self.experts = [list(batch.experts) for batch in self._prepared.drawn]
        self.trainer = Trainer.load(self._prepared.plan, "cpu")
        self._position = self.trainer.restore(run / f"global_step_{STEP - 1}")
        self.parameters = dict(self.trainer.policy.parameters())
        self.optimizer = self.trainer._optimizer

    def train(self) -> None:
        """Make the step and save its checkpoint."""
        both = zip(self.batches, self.experts, strict=False)  # a fault may leave out a batch
        self.trainer.train_step([Minibatch(experiences=one, experts=rows) for one, rows in both], step=STEP)
        self.save()

    def save(self) -> None:
        """Save a checkpoint of the trainer as it is now."""
        self.trainer.save(self.run / f"global_step_{STEP}", {**self._position, "step": STEP})

    def each(self, change: Callable[[Experience], Experience | None]) -> None:
        """Change every sequence of the step; None drops it."""
        self.batches = [[new for one in batch if (new := change(one)) is not None] for batch in self.batches]

    def loss_tokens(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Change an array of every sequence where it carries loss."""

        def changed(one: Experience) -> Experience:
            values = getattr(one, name).copy()
            values[one.loss_mask_T] = change(values[one.loss_mask_T])
            return replace(one, **{name: values})

        self.each(changed)

    def gradients(self, change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> None:
        """Change the gradient that autograd gives each parameter with this part in its name."""
        for name, parameter in self.parameters.items():
            if part in name:
                parameter.register_hook(change)

    def before_apply(self, do: Callable[[], None]) -> None:
        """Do something when the gradients are whole, before clipping."""
        norm = self.optimizer.norm
        self.optimizer.norm = lambda update: (do(), norm(update))[1]

    def after_apply(self, do: Callable[[], None]) -> None:
        """Do something after an update."""
        apply = self.optimizer.apply
        self.optimizer.apply = lambda update, norm: (apply(update, norm), do())[0]

    def groups(self) -> Sequence[dict[str, Any]]:
        """The groups of AdamW's settings."""
        return [group for rule in self.optimizer._rules for group in rule.param_groups]

    def found(self) -> Retrained:
        """What repeating the step says, as `retrain` does."""
        before, after = (self.run / f"global_step_{step}" for step in (STEP - 1, STEP))
        return self._prepared.records.attempt(range(STEP, STEP + 1), before, after, available_bytes())
