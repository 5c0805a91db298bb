"""Stands for the boards of Trinity-RFT's example `agentscope_frozenlake`."""

from gymnasium.utils import seeding

SYSTEM_PROMPT = "Bring the player (P) to the goal (G). Write one of Up, Down, Left, Right between three backticks."


def generate_random_map(size=8, p=0.8, seed=0, max_steps=5):
    random, _ = seeding.np_random(seed)
    board = random.choice(["F", "H"], (size, size), p=[p, 1 - p]).tolist()
    board[0][0], board[size - 1][size - 1] = "S", "G"
    return ["".join(row) for row in board], (size - 1, size - 1)
