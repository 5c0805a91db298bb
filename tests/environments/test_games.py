"""Gymnasium and TextArena as their packages are: episodes and games with a model whose replies are given."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sharpen.agent.environments.gymnasium import Gymnasium
from sharpen.agent.environments.textarena import TextArena, _Game
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError, RolloutError
from sharpen.testing import check_environment
from sharpen.testing.environments import served_replies

pytestmark = pytest.mark.environments

FUNCTIONS = '''
from gymnasium import Env, register, spaces


def describe(observation):
    return f"You stand on field {observation} of 16."


def move(text):
    names = ["left", "down", "right", "up"]
    if text not in names:
        raise ValueError(f"say one of {', '.join(names)}")
    return names.index(text)


class Echo(Env):
    """Text in, text out: the reward is 0.5 for each right word, in three steps."""

    observation_space = action_space = spaces.Text(100)
    reward = 0.5

    def reset(self, *, seed=None, options=None):
        self.words = [f"word{seed}", "two", "three"]
        return f"say {self.words[0]}", {}

    def step(self, action):
        right = action == self.words.pop(0)
        return (f"say {self.words[0]}" if self.words else "the end"), self.reward * right, not self.words, False, {}


class Broken(Echo):
    def reset(self, *, seed=None, options=None):
        raise OSError("no screen")


class Mute(Echo):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "", {}


class Unnumbered(Echo):
    reward = "high"

    def step(self, action):
        return "more", "high", False, False, {}


class Endless(Echo):
    def step(self, action):
        return "more", 0.0, False, False, {}


for kind in (Echo, Broken, Mute, Unnumbered, Endless):
    if f"Toy{kind.__name__}-v0" not in __import__("gymnasium").registry:
        register(f"Toy{kind.__name__}-v0", entry_point=kind)
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "lake_text.py"
    file.write_text(FUNCTIONS)
    return str(file)


def gym(id_: str, **args: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="gymnasium", id=id_, args=args, train_tasks=3, held_out_tasks=2)


def arena(id_: str, args: Any = None, **more: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="textarena", id=id_, args=args or {}, train_tasks=3, held_out_tasks=2, **more)


def play(environment: Any, replies: Sequence[str], task: int = 0) -> tuple[WorkflowOutput, list[Any]]:
    async def attempt() -> tuple[WorkflowOutput, list[Any]]:
        with served_replies(replies) as (model, requests):
            async with model.client:
                model.named = lambda name: model
                return await environment.workflow(task=dict(environment.tasks("train")[task]), model=model), requests

    return asyncio.run(attempt())


def test_a_lake_by_two_functions(functions: str) -> None:
    """The way that does not slip: down, down, right, right, down, right; what is no action is told and costs a turn."""
    config = gym("FrozenLake-v1", is_slippery=False, observation=f"{functions}:describe", action=f"{functions}:move")
    way = ["down", "Down!", "down", "right", "right", "down", "right"]
    found, requests = play(Gymnasium(config), way)
    assert found.reward == 1.0
    assert found.metrics == {"steps": 6, "replies_that_are_no_action": 1, "truncated": 0.0}
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "user"]
    assert told[0] == "You stand on field 0 of 16."
    assert told[2] == "That is no action: say one of left, down, right, up"
    assert [message["content"] for message in requests[-1]["messages"][1::2]] == way[:-1]
    fallen, _ = play(Gymnasium(config), ["down", "right"])
    assert fallen.reward == 0.0
    stubborn, requests = play(Gymnasium(config), ["nowhere"])
    assert stubborn.metrics == {"steps": 0, "replies_that_are_no_action": 100, "truncated": 1.0}
    assert len(requests) == 100


@pytest.mark.parametrize("name", ["Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_further_environments_of_its_package(name: str, tmp_path: Path) -> None:
    """Unchanged, between the same two functions: an observation as Python writes it, an action by its number."""
    import gymnasium

    (tmp_path / "as_written.py").write_text("describe, move = str, int\n")
    functions = {"observation": f"{tmp_path}/as_written.py:describe", "action": f"{tmp_path}/as_written.py:move"}
    config = gym(name, max_episode_steps=4, **functions)
    check_environment(Gymnasium, config, ["0", "stop", "0"])
    played = gymnasium.make(name, max_episode_steps=4)
    begun, _ = played.reset(seed=2)
    then, reward, ended, cut_off, _ = played.step(0)
    found, requests = play(Gymnasium(config), ["0", "stop", "0"])
    told = [request["messages"][-1]["content"] for request in requests]
    assert told[:2] == ([str(begun)] if ended else [str(begun), str(then)])
    assert found.reward == reward if ended else not cut_off
    played.close()


def test_text_needs_no_functions_and_rewards_are_added(functions: str) -> None:
    sys.path.insert(0, str(Path(functions).parent))
    config = gym("lake_text:ToyEcho-v0")
    check_environment(Gymnasium, config, ["word2"])
    found, _ = play(Gymnasium(config), ["word3", "two", "x"], task=1)
    assert found.reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", "cannot be reset with seed 2: OSError: no screen: .*correct"),
        ("Mute", "no text, but '': correct"),
        ("Unnumbered", "reward of step 1 of lake_text:ToyUnnumbered-v0 is 'high', not a finite number: let"),
    ],
)
def test_an_environment_that_fails_says_how_and_what_to_do(functions: str, name: str, message: str) -> None:
    sys.path.insert(0, str(Path(functions).parent))
    with pytest.raises(RolloutError, match=message):
        play(Gymnasium(gym(f"lake_text:Toy{name}-v0")), ["x"])


def test_an_episode_without_an_end_is_cut_off(functions: str) -> None:
    sys.path.insert(0, str(Path(functions).parent))
    found, requests = play(Gymnasium(gym("lake_text:ToyEndless-v0", max_episode_steps=7)), ["x"])
    assert len(requests) == 7
    assert (found.metrics or {})["truncated"] == 1.0


@pytest.mark.parametrize(
    ("id_", "args", "message"),
    [
        ("FrozenLake-v9", {}, "makes no 'FrozenLake-v9'"),
        ("FrozenLake-v1", {"colour": 1}, "colour"),
        ("FrozenLake-v1", {}, r"Discrete\(16\) for its observations, not text: environment.args.observation must name"),
        ("FrozenLake-v1", {"observation": "nothing.py:describe"}, "nothing.py"),
    ],
)
def test_wrong_settings_of_gymnasium_are_refused(id_: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gymnasium(gym(id_, **args))


def test_three_games_for_one_player() -> None:
    for name, reply in (("GuessTheNumber-v0", "[7]"), ("TowerOfHanoi-v0", "[A C]"), ("FrozenLake-v0", "[right]")):
        check_environment(TextArena, arena(name), [reply])
        found, requests = play(TextArena(arena(name)), [reply])
        assert (found.metrics or {})["turns"] == len(requests)
        assert found.call_rewards is None


def test_a_game_is_one_conversation() -> None:
    """TextArena tells all from the start each time: only what is new is told on. Red when all of it comes again."""
    found, requests = play(TextArena(arena("GuessTheNumber-v0")), [f"[{guess}]" for guess in range(1, 21)])
    assert len(requests) > 2 or found.reward == 1.0
    for earlier, later in itertools.pairwise(requests):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert len(later["messages"]) == len(earlier["messages"]) + 2
        assert "You are playing Guess The Number" not in later["messages"][-1]["content"]
    assert requests[0]["messages"][0]["content"].startswith("You are a competitive game player")
    _, bare = play(TextArena(arena("GuessTheNumber-v0", system_prompt="")), ["[1]"])
    assert bare[0]["messages"][0]["role"] == "user"


def test_one_seed_is_one_game_whatever_else_draws() -> None:
    """Red when games draw from the process's random numbers as they are: the second game changes the first, and a run's
    own numbers change with both."""
    package = pytest.importorskip("textarena")

    def told(others: bool) -> list[str]:
        game = _Game(package, "2048-v0", {}, 1, seed=5)
        found = []
        for move in ("[up]", "[left]", "[down]", "[right]", "[up]", "[left]"):
            found.append(game.observe()[1])
            if others:
                random.random()
                _Game(package, "2048-v0", {}, 1, seed=6).move("[up]")
            game.move(move)
        return found

    random.seed(1)
    before = random.getstate()
    alone = told(others=False)
    assert random.getstate() == before
    assert told(others=True) == alone
    assert _Game(package, "2048-v0", {}, 1, seed=6).observe() != _Game(package, "2048-v0", {}, 1, seed=5).observe()


def test_two_players_of_one_model_have_their_own_rewards() -> None:
    """The first takes a row: 0, 1, 2 against 3, 4."""
    found, _ = play(TextArena(arena("TicTacToe-v0")), ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert found.reward == 1.0
    assert found.call_rewards == {"player_0": 1.0, "player_1": -1.0}
    assert found.metrics == {"turns": 5, "ended_by_an_invalid_move": 0.0, "won": 1.0}


def test_an_opponent_plays_the_other_side_and_sides_take_turns() -> None:
    environment = TextArena(arena("TicTacToe-v0", {"opponent": "rival"}))
    assert [row["seat"] for row in environment.tasks("train")] == [0, 1, 0]

    async def attempt(task: Any, *replies: Sequence[str]) -> WorkflowOutput:
        with served_replies(replies[0]) as (mine, _), served_replies(replies[1]) as (other, _):
            async with mine.client, other.client:
                return await environment.workflow(task=dict(task), model=mine, auxiliary_models={"rival": other})

    row, column = ["[0]", "[1]", "[2]"], ["[3]", "[4]", "[8]"]
    first, second = environment.tasks("train")[:2]
    assert asyncio.run(attempt(first, row, column)).reward == 1.0
    lost = asyncio.run(attempt(second, column, row))
    assert (lost.reward, lost.call_rewards, (lost.metrics or {})["won"]) == (-1.0, None, 0.0)
    with pytest.raises(RolloutError, match="opponent is 'rival', but the auxiliary models are none"):
        play(environment, ["[0]"])


def test_the_opponent_may_be_a_policy_of_the_run() -> None:
    """Red when both sides are answered by the same model."""
    environment = TextArena(arena("TicTacToe-v0", {"opponent": "rival"}))

    async def attempt(task: Any) -> WorkflowOutput:
        with served_replies(["[3]", "[4]", "[8]"]) as (mine, _), served_replies(["[0]", "[1]", "[2]"]) as (other, _):
            mine.policies, mine.named = {"rival"}, {"rival": other}.__getitem__
            async with mine.client, other.client:
                return await environment.workflow(task=dict(task), model=mine)

    lost = asyncio.run(attempt(environment.tasks("train")[1]))
    assert (lost.reward, lost.call_rewards) == (-1.0, None)


@pytest.mark.parametrize(
    ("id_", "args", "message"),
    [
        ("TicTacTo-v0", {}, "no game of TextArena; did you mean 'TicTacToe-v0'"),
        ("GuessTheNumber-v0", {"opponent": "rival"}, "opponent is 'rival', but GuessTheNumber-v0 is for one player"),
        ("GuessTheNumber-v0", {"colour": 1}, "begins no game 'GuessTheNumber-v0'.*colour"),
        ("SecretMafia-v0", {}, "begins no game 'SecretMafia-v0'.* for one or two players"),
    ],
)
def test_wrong_settings_of_textarena_are_refused(id_: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextArena(arena(id_, args))
