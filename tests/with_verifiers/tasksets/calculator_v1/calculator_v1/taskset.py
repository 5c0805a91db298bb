"""A package as `vf-init --add-tool` lays it out: a task with a tool server of its own."""

import verifiers.v1 as vf

from calculator_v1.servers.tool import CalculatorToolset


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CalculatorTask(vf.Task[CalculatorData, vf.State, CalculatorTaskConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorTaskConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class CalculatorConfig(vf.TasksetConfig):
    task: CalculatorTaskConfig = CalculatorTaskConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self) -> list[CalculatorTask]:
        return [
            CalculatorTask(CalculatorData(prompt=f"What is {n} times {n}?", answer=str(n * n)), self.config.task)
            for n in range(11, 31)
        ]
