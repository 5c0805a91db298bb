"""Trinity's RULER: a judge sees all answers to a question side by side and scores each of them.

In: a `Task` with a question (and a truth, for comparison only), an auxiliary model as judge. Out: an experience for
each answer, whose reward is the judge's score, 0 to 1. Source: RULER, https://openpipe.ai/blog/ruler.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.rewards import total
from sharpen.compat.trinity.simple import MathWorkflow
from sharpen.errors import ConfigError


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
        for number, (experience, score) in enumerate(zip(experiences, scores, strict=True)):
            gold = self.reward_fn(response=experience.response_text, truth=self.truth)
            experience.metrics.update(gold if isinstance(gold, dict) else {})
            experience.metrics.update(gold_reward=total(gold), judge_success=1.0)
            experience.reward = score
            experience.eid.run = number + self.run_id_base
        return experiences


class AsyncMathRULERWorkflow(MathRULERWorkflow):
    """As `MathRULERWorkflow`, asynchronous."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Ask for all answers, have them judged together."""
        judge = self._judge()
        experiences = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        completion = await judge.chat.completions.create(model=judge.model_path, messages=self._question(experiences))
        return self._judged(experiences, completion)


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
