"""Stands for the lake of Trinity-RFT's example `agentscope_frozenlake`: gymnasium's, seen as a text."""

from examples.agentscope_frozenlake.utils import generate_random_map
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLakeEnv
from trinity.utils.log import get_logger


class FrozenLakeEnv(GymFrozenLakeEnv):
    """A lake whose steps are words."""

    ACTIONS = ("left", "down", "right", "up")

    def __init__(self, max_steps=8, desc=None, is_slippery=False, size=8, p=0.8, seed=42):
        self.logger = get_logger()
        self.seed = seed
        if desc is None:
            desc, _ = generate_random_map(size=size, p=p, seed=seed, max_steps=max_steps)
        super().__init__(desc=desc, is_slippery=is_slippery)

    def reset(self, task=None):
        super().reset(seed=self.seed)
        return self.render(), {}

    def step(self, action):
        if action not in self.ACTIONS:
            return self.render(), 0, False, {}
        _, reward, done, _, _ = super().step(self.ACTIONS.index(action))
        return self.render(), reward, done, {}

    def render(self):
        rows = [[tile.decode() for tile in row] for row in self.desc]
        rows[self.s // self.ncol][self.s % self.ncol] = "P"
        return "\n".join("".join(row) for row in rows)
