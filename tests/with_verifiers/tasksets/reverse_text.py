"""A taskset as a user has it in a file: a text is to be reversed; two rewards with weights, one metric, no tools."""

from difflib import SequenceMatcher

import verifiers.v1 as vf

TEXTS = [
    "stressed",
    "desserts",
    "drawer",
    "live on",
    "a toyota",
    "sharpen",
    "reward",
    "policy",
    "rollout",
    "gateway",
    "token",
    "batch",
]


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=1.0)
    async def likeness(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
    num_tasks: int = 12
    fails: bool = False


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> list[ReverseTask]:
        if self.config.fails:
            raise OSError("no such split")
        return [
            ReverseTask(
                ReverseData(prompt=f"Reverse this: {text}", system_prompt="Say nothing else.", answer=text[::-1]),
                self.config.task,
            )
            for text in TEXTS[: self.config.num_tasks]
        ]


__all__ = ["ReverseTaskset"]
