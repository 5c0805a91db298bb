"""Trinity's RULER: a judge sees all answers to a question side by side and scores each of them.

In: a `Task` with a question and a truth; as judge an auxiliary model, or the model that is trained itself. Out: an
experience for each answer, whose reward is the judge's score, 0 to 1; and where the model is the judge, experiences of
its judgements too. Source: RULER, https://openpipe.ai/blog/ruler.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from operator import sub
from statistics import fmean
from typing import Any

from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.rewards import total
from sharpen.compat.trinity.simple import MathWorkflow
from sharpen.errors import ConfigError

TRUTH_IS_KNOWN = 0.2
"""In which share of the groups the model's judgements are compared with the truth, as in Trinity-RFT."""
GOLD_RANGE = (-0.1, 1.1)
"""The lowest and the highest sum of scores of `MathRewardFn`."""


class MathRULERWorkflow(MathWorkflow):
    """Answers in tags, as `MathWorkflow` asks for, scored by the first auxiliary model.

    Metrics: the scores of the reward function and their sum `gold_reward`, which is not trained, and `judge_success`.
    A judgement that cannot be read fails the whole group.
    """

    def run(self) -> list[Experience]:
        """Ask for all answers, have them judged together."""
        judge = self._judge()
        experiences = self.model.chat(self.format_messages(), **self.rollout_args)
        completion = judge.chat.completions.create(model=judge.model_path, messages=self._question(experiences))
        return self._judged(experiences, completion)

    def _judge(self) -> Any:
        """The auxiliary model's client."""
        if not self.auxiliary_models:
            raise ConfigError(
                f"{type(self).__name__} needs a judge: give an auxiliary model (auxiliary_models; in a Trinity-RFT "
                "file explorer.auxiliary_models)"
            )
        return self.auxiliary_models[0]

    def _question(self, experiences: Sequence[Experience]) -> list[dict[str, Any]]:
        """What the judge is asked."""
        system = (
            f"You compare {len(experiences)} solutions to one question and judge fairly. Give each a score from 0 to 1 "
            "for how well it answers the question."
        )
        solutions = "\n\n".join(
            f"Solution {number}: {experience.response_text}" for number, experience in enumerate(experiences, 1)
        )
        user = (
            f"Question: {self.task_desc}\n\nA solution should give its reasoning between <think> and </think>, and "
            f"after it the answer between <answer> and </answer>.\n\n{solutions}\n\nCompare them, briefly, and end "
            f"your reply with a list of {len(experiences)} scores in the solutions' order: [score of solution 1, ...]"
        )
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def _judged(self, experiences: list[Experience], completion: Any) -> list[Experience]:
        """Give each answer its score, and what the reward function says of it for comparison."""
        scores = scores_in(completion.choices[0].message.content or "", len(experiences))
        self._gold_rewards(experiences)
        for experience, score in zip(experiences, scores, strict=True):
            experience.reward, experience.metrics["judge_success"] = score, 1.0
        return experiences

    def _gold_rewards(self, experiences: list[Experience]) -> list[float]:
        """What the reward function says of each answer, which becomes metrics; and number the answers."""
        found = []
        for number, experience in enumerate(experiences):
            gold = self.reward_fn(response=experience.response_text, truth=self.truth)
            experience.metrics.update(gold if isinstance(gold, dict) else {})
            experience.metrics["gold_reward"] = total(gold)
            experience.eid.run = number + self.run_id_base
            found.append(total(gold))
        return found


class AsyncMathRULERWorkflow(MathRULERWorkflow):
    """As `MathRULERWorkflow`, asynchronous."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Ask for all answers, have them judged together."""
        judge = self._judge()
        experiences = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        completion = await judge.chat.completions.create(model=judge.model_path, messages=self._question(experiences))
        return self._judged(experiences, completion)


class MathTrainableRULERWorkflow(MathRULERWorkflow):
    """RULER with the model that is trained as its own judge, which learns to judge where the truth is known.

    For a share `TRUTH_IS_KNOWN` of the groups the reward function rewards the answers, and as many judgements as
    answers are asked for: a judgement's reward is 1 minus its mean distance from the rewards, scaled to 0 to 1, and
    they are a group of their own (`<task>-ruler`). In the others one judgement rewards the answers, and is not trained
    itself. A judgement that cannot be read is the model's own failure: it has reward 0, and gives 0 to all answers. In
    an evaluation the reward function rewards the answers, and nothing is judged.
    """

    def run(self) -> list[Experience]:
        """Ask for all answers, and judge them."""
        experiences = self.model.chat(self.format_messages(), **self.rollout_args)
        gold = self._gold_rewards(experiences)
        known = self.task.is_eval or _share(str(self.task.task_id)) < TRUTH_IS_KNOWN
        if known:
            for experience, reward in zip(experiences, gold, strict=True):
                experience.reward = reward
        if self.task.is_eval:
            return experiences
        asked = {**self.rollout_args, "n": len(experiences) if known else 1}
        judgements = self.model.chat(self._question(experiences), **asked)
        read = [_scores_or_none(judgement.response_text, len(experiences)) for judgement in judgements]
        for experience in experiences:
            experience.metrics["judge_success"] = fmean(scores is not None for scores in read)
        if known:
            return experiences + self._rewarded(judgements, read, gold)
        for experience, score in zip(experiences, read[0] or [0.0] * len(experiences), strict=True):
            experience.reward = score
        return experiences

    def _rewarded(
        self, judgements: list[Experience], read: Sequence[Sequence[float] | None], gold: Sequence[float]
    ) -> list[Experience]:
        """The judgements, as answers to a task of their own, with their rewards."""
        lowest, highest = GOLD_RANGE
        wanted = [(reward - lowest) / (highest - lowest) for reward in gold]
        for number, (judgement, scores) in enumerate(zip(judgements, read, strict=True)):
            judgement.eid.task, judgement.eid.run = f"{self.task.task_id}-ruler", number + self.run_id_base
            judgement.reward = 0.0 if scores is None else 1.0 - fmean(map(abs, map(sub, scores, wanted)))
            judgement.metrics["reward_for_judge"] = judgement.reward
        return judgements


def _share(name: str) -> float:
    """A number from 0 to 1 that is the same whenever it is made from this name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64


def _scores_or_none(text: str, count: int) -> list[float] | None:
    try:
        return scores_in(text, count)
    except ValueError:
        return None


def scores_in(text: str, count: int) -> list[float]:
    """The scores in a judge's reply: its last list, of `count` numbers, each cut to 0 to 1. Raises `ValueError`."""
    start, end = text.rfind("["), text.rfind("]")
    listed = text[start : end + 1] if 0 <= start < end else ""
    try:
        scores = ast.literal_eval(listed)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        scores = None
    if not isinstance(scores, list) or not all(map(is_number, scores)):
        raise ValueError(f"the judge's reply ends with no list of scores: {text[-120:]!r}")
    if len(scores) != count:
        raise ValueError(f"the judge gave {len(scores)} scores for {count} solutions: {listed}")
    return [min(max(float(score), 0.0), 1.0) for score in scores]
