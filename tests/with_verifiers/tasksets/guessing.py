"""A taskset with an environment of its own: several turns, in which the environment answers."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt="Guess my number from 0 to 9.", number=number % 10), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                if segment.terminated:
                    break
                if segment.last_reply.strip() == str(task.data.number):
                    won = 1.0
                    break
                segment = await interaction.turn("No. Again!")
        interaction.trace.record_reward("won", won, 1.0)


__all__ = ["GuessEnv", "GuessTaskset"]
