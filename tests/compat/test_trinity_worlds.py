"""Trinity's environments: the frozen lake, and text worlds by the packages that have them (tiny ones here)."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from trinity_serving import MakePlace

from sharpen.compat.trinity import REWARD_FUNCTIONS, WORKFLOWS
from sharpen.compat.trinity.workflows import alfworld
from sharpen.compat.trinity.workflows.alfworld import end_all
from sharpen.compat.trinity.workflows.frozen_lake import MOVES, Lake, made_lake, move_in
from sharpen.compat.trinity.workflows.game import action_in
from sharpen.compat.trinity.workflows.text_worlds import impossible
from sharpen.errors import ConfigError
from sharpen.types import CallStatus, Outcome, Sampling

BOARD = ["SFF", "FHF", "FFG"]
EXPECTED = {42: ["FFSF", "FHFF", "FFFH", "GHFF"], 7: ["HSH", "FFH", "GHH"]}


def lines(rows: str) -> str:
    return "\n".join("".join(f" {symbol} \t" for symbol in row) for row in rows.split("/"))


# The frozen lake


@pytest.mark.parametrize("slippery", [False, True])
def test_the_lake_moves_as_gymnasium_s(slippery: bool):
    """Trinity-RFT plays on gymnasium's lake: the same steps lead to the same places, slips included."""
    for seed in range(8):
        board = made_lake(5, 0.8, seed, 8)
        lake, theirs = Lake(board, slippery=slippery, seed=seed), FrozenLakeEnv(desc=board, is_slippery=slippery)
        theirs.reset(seed=seed)
        for number in range(30):
            if lake.done:
                break
            lake.step(list(MOVES)[(number * 7 + seed) % 4])
            theirs.step((number * 7 + seed) % 4)
            assert lake.place == divmod(int(theirs.s), 5)


def test_boards_of_a_seed():
    """Drawn by Trinity-RFT's own generator for these seeds."""
    assert made_lake(4, 0.8, 42, 8) == EXPECTED[42]
    assert made_lake(3, 0.6, 7, 8) == EXPECTED[7]
    with pytest.raises(ConfigError, match="size is 1; a lake has at least 2 x 2 tiles"):
        made_lake(1, 0.8, 42, 8)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("I go ```Up```", "up"),
        ("```left``` or rather ``` Down ```", "down"),
        ("```3```", "right"),
        ("```0```", None),
        ("Up", None),
        ("```Jump```", None),
    ],
)
def test_the_step_of_an_answer(text: str, move: str | None):
    assert move_in(text) == move


@pytest.mark.parametrize(
    ("steps", "reward", "done"),
    [
        ("Right Right Down Down", 1.0, 1),
        ("Right Down", 0.0, 1),  # into the hole
        ("Left Right Right", 0.0, 0),  # the steps run out
    ],
)
def test_a_walk_over_the_lake(make_place: MakePlace, steps: str, reward: float, done: int):
    left = steps.split()
    args = {"desc": BOARD, "agent_max_steps": len(left)}
    place = make_place(lambda prompt: f"I think ```{left.pop(0)}```")
    rollout = place.one("frozen_lake_workflow", {"prompt": "", "seed": 1}, workflow_args=args)
    count = len(steps.split())
    assert (rollout.reward, rollout.error) == (reward, None)
    assert rollout.metrics == {"env_steps": count, "env_done": done, "test_score": reward}
    assert [call.status for call in rollout.calls] == [CallStatus.USED] * count
    assert [call.parent for call in rollout.calls] == [None, *range(count - 1)]
    asked = rollout.calls[0].messages
    assert lines("P__/_O_/__G") in asked[1]["content"]
    assert "```Up```" in asked[0]["content"]
    warned = ["have not moved" in call.messages[-1]["content"] for call in rollout.calls]
    assert warned == [False, steps.startswith("Left"), *[False] * (count - 2)]


def test_the_answers_of_a_walk_share_a_budget(make_place: MakePlace):
    place = make_place("I go ```Left```", max_model_len=40_000)
    WORKFLOWS.get("frozen_lake_workflow").max_response_tokens = 1000  # type: ignore[attr-defined]
    try:
        args = {"desc": BOARD, "agent_max_steps": 10}
        rollout = place.one("frozen_lake_workflow", {"prompt": "", "seed": 1}, workflow_args=args)
    finally:
        WORKFLOWS.get("frozen_lake_workflow").max_response_tokens = 10240  # type: ignore[attr-defined]
    limits = [call.sampling.max_tokens for call in rollout.calls]
    grown = [1000 - (len(call.prompt_ids_P) - len(rollout.calls[0].prompt_ids_P)) for call in rollout.calls]
    assert limits == grown
    assert 1 < len(limits) < 10  # then nothing is left


# Text worlds


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`packages({"name/__init__.py": code})`: tiny packages that can be imported in this test alone."""
    before = set(sys.modules)

    def make(files: dict[str, str]) -> None:
        for name, code in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(tmp_path).parents:
                if str(parent) != "." and not (tmp_path / parent / "__init__.py").exists():
                    (tmp_path / parent / "__init__.py").write_text("")
            path.write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"textworld", "alfworld", "scienceworld", "gym", "web_agent_site", "intercode"}:
            del sys.modules[name]


# As the packages do: names of a game are made in globals, so that a process plays one game at a time; a planner is
# loaded for each game and stays loaded, so that exit handlers crash if it was not.
TEXTWORLD = """
import os
class EnvInfos:
    pass
class State:
    def __init__(self, feedback): self.feedback = feedback
class Game:
    open = 0
    def __init__(self, file, wrappers):
        if Game.open: raise IndexError("pop from empty list")
        if not os.path.isfile(file): raise OSError(f"Unable to find game '{file}'.")
        self.file, self.names, self.steps, self.unwrapped, self.downward_lib = file, len(wrappers), 0, self, "planner"
        Game.open += 1
        print("this is printed among the answers")
    def reset(self): return State(f"You are in {open(self.file).read()}.")
    def step(self, action):
        self.steps += 1
        won = action == "win"
        return State("Nothing happens." if not action else f"You {action}."), int(won), won
    def close(self):
        Game.open -= 1
        with open(self.file + ".closed", "a") as log: log.write("game\\n")
def start(file, infos, wrappers): return Game(file, wrappers)
"""
ALFWORLD = {
    "textworld/__init__.py": TEXTWORLD,
    "fast_downward.py": "def close_lib(library): assert library == 'planner'\n",
    "alfworld/agents/environment/alfred_tw_env.py": "class AlfredDemangler: pass\n",
}


def says(*answers: str) -> Any:
    left = list(answers)
    return lambda prompt: left.pop(0)


@pytest.fixture
def kitchen(tmp_path: Path, packages: Any):
    """The file of a game of ALFWorld."""
    packages(ALFWORLD)
    path = tmp_path / "game.tw-pddl"
    path.write_text("a kitchen")
    yield {"prompt": str(path)}
    end_all()


def test_alfworld(make_place: MakePlace, kitchen: dict[str, str]):
    place = make_place(says("<think>.</think><action>look</action>", "no action", "<action>win</action>"))
    rollout = place.one("alfworld_workflow", kitchen)
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert rollout.metrics == {"env_rounds": 3.0, "env_done": 1.0}
    seen = [call.messages[-1]["content"] for call in rollout.calls]
    assert seen[:2] == ["Observation: You are in a kitchen.", "Observation: You look."]
    assert seen[2].startswith("Observation: Nothing happens. Check")
    assert [call.parent for call in rollout.calls] == [None, 0, 1]
    lost = make_place("<action>look</action>").one("alfworld_workflow", kitchen, workflow_args={"max_env_steps": 2})
    assert (lost.reward, len(lost.calls)) == (pytest.approx(-0.1), 2)
    assert Path(kitchen["prompt"] + ".closed").read_text() == "game\n"  # the first one, where the second began


def test_games_of_alfworld_at_once(make_place: MakePlace, kitchen: dict[str, str]):
    """Each is in a process of its own, which is kept for later games and ends with this one."""
    place = make_place(lambda prompt: f"<action>{'win' if 'You look' in prompt else 'look'}</action>")
    for _ in range(2):
        (group,) = place.run("alfworld_workflow", kitchen, group_size=4)
        assert [(rollout.reward, rollout.error) for rollout in group.rollouts] == [(1.0, None)] * 4
    assert 1 <= len(alfworld._all) <= 4
    end_all()
    assert alfworld._all == []


def test_a_game_that_fails(make_place: MakePlace, kitchen: dict[str, str], tmp_path: Path):
    missing = str(tmp_path / "none.tw-pddl")
    rollout = make_place("<action>win</action>").one("alfworld_workflow", {"prompt": missing})
    assert rollout.outcome == Outcome.WORKFLOW_ERROR
    assert f"OSError: Unable to find game '{missing}'" in str(rollout.error)
    assert make_place("<action>win</action>").one("alfworld_workflow", kitchen).reward == 1.0


def test_alfworld_step_by_step(make_place: MakePlace, kitchen: dict[str, str]):
    place = make_place(says("<action>look</action>", "<action>win</action>"))
    rollout = place.one("step_wise_alfworld_workflow", kitchen)
    assert (rollout.reward, dict(rollout.call_rewards)) == (1.0, {0: 1.0, 1: 1.0})
    assert dict(rollout.step_rewards) == {0: 0.0, 1: 1.0}
    seen = ["Observation: You are in a kitchen.", "Observation: You look."]
    assert dict(rollout.states) == {i: hashlib.sha256(text.encode()).hexdigest() for i, text in enumerate(seen)}
    assert rollout.metrics["actual_env_steps"] == 2.0


def in_parts(action: str, thought: str = "hm") -> str:
    return f"<experience>Look first.</experience>\n<think>{thought}</think> <action>{action}</action>"


RAFT = ("RAFT_alfworld_workflow", "RAFT_reflect_alfworld_workflow")
USED, LEFT_OUT = CallStatus.USED, CallStatus.LEFT_OUT


@pytest.mark.parametrize("name", RAFT)
@pytest.mark.parametrize(("thought", "status"), [("hm", USED), ("", LEFT_OUT)])
def test_raft_imitates_a_game_that_was_won(
    make_place: MakePlace, kitchen: dict[str, str], name: str, thought: str, status: CallStatus
):
    """If every answer has all three parts; one without a thought is done, but the game is not trained."""
    left = [in_parts("look", thought), in_parts("win")]
    place = make_place(lambda prompt: left.pop(0) if left else in_parts("win"))
    taskset = {"rollout_args": {"temperature": 0.85, "top_k": 25, "top_p": 0.95}}
    rollout = place.one(name, kitchen, taskset=taskset)
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert [call.status for call in rollout.calls] == [status] * 2
    assert rollout.metrics == {"success": 1.0, "reward": 1.0, "steps": 2.0}
    assert rollout.calls[0].sampling == Sampling(temperature=0.85, top_k=25, top_p=0.95, max_tokens=ANY)
    assert rollout.calls[1].messages[-1]["content"] == "Observation: You look."


@pytest.mark.parametrize(("answer", "steps"), [(in_parts("look"), 3), ("no parts", 3)])
def test_raft_imitates_no_game_that_was_lost(make_place: MakePlace, kitchen: dict[str, str], answer: str, steps: int):
    """Three equal actions end it; that every answer was left out is no failure."""
    rollout = make_place(answer).one("RAFT_alfworld_workflow", kitchen)
    assert (rollout.reward, rollout.outcome, rollout.error) == (0.0, Outcome.OK, None)
    assert [call.status for call in rollout.calls] == [LEFT_OUT] * steps
    assert rollout.metrics == {"success": 0.0, "reward": 0.0, "steps": float(steps)}


def test_raft_ends_after_fifty_actions(make_place: MakePlace, kitchen: dict[str, str]):
    actions = iter(range(1000))
    place = make_place(lambda prompt: in_parts(f"look {next(actions)}"), max_model_len=40_000)
    assert len(place.one("RAFT_alfworld_workflow", kitchen).calls) == 50
    rollout = place.one("RAFT_reflect_alfworld_workflow", kitchen)
    assert len(rollout.calls) == 100
    assert "all 50 actions" in rollout.calls[50].messages[-2]["content"]


@pytest.mark.parametrize(
    ("second", "reward", "trained"),
    [
        ([in_parts("look"), in_parts("win")], 1.0, True),
        (["no parts", in_parts("win")], 1.0, False),
        ([in_parts("look")] * 50, 0.0, False),  # the same action ends no second attempt
    ],
)
def test_raft_reflects_on_a_game_that_was_lost(
    make_place: MakePlace, kitchen: dict[str, str], second: list[str], reward: float, trained: bool
):
    """The second attempt goes on from the first; if it is better, its answers alone are trained."""
    place = make_place(says(*[in_parts("look")] * 3, *second), max_model_len=40_000)
    rollout = place.one("RAFT_reflect_alfworld_workflow", kitchen)
    assert (rollout.reward, rollout.error) == (reward, None)
    statuses = [LEFT_OUT] * 3 + [USED if trained else LEFT_OUT] * len(second)
    assert [call.status for call in rollout.calls] == statuses
    assert [call.parent for call in rollout.calls] == [None, *range(len(statuses) - 1)]
    told, seen = rollout.calls[3].messages[-2:]
    assert told["role"] == "system"
    assert "ended after 3 actions" in told["content"]
    assert seen["content"] == "Observation: You are in a kitchen."
    assert rollout.metrics == {
        "reward": 0.0,
        "steps": 3.0,
        "trajectory_length": float(len(second)),
        "second_reward": reward,
        "second_steps": float(len(second)),
        "improvement": reward,
    }


def test_raft_has_one_attempt_in_an_evaluation(make_place: MakePlace, kitchen: dict[str, str]):
    rollout = make_place(in_parts("look")).one("RAFT_reflect_alfworld_workflow", kitchen, record=False)
    assert (rollout.reward, rollout.metrics) == (0.0, {"success": 0.0, "reward": 0.0, "steps": 3.0})


SCIENCE = """
class ScienceWorldEnv:
    made = 0
    def __init__(self, name, jar, envStepLimit): ScienceWorldEnv.made += 1; self.jar = jar
    def load(self, task, number, how): self.task = f"{task} {number} {how}"
    def get_task_description(self): return self.task
    def reset(self): return "A lab.", {}
    def step(self, action):
        if action == "crash": raise OSError("Java has ended")
        return f"You {action}.", {"boil": 40, "spill": -60, "win": 30}[action], action == "win", {}
"""


def test_scienceworld_counts_the_best_score(make_place: MakePlace, packages: Any):
    """A laboratory is kept for later games, unless it failed."""
    packages({"scienceworld.py": SCIENCE})
    game = json.dumps({"task_name": "boil", "var_num": 3, "jar_path": "x.jar"})
    workflow = WORKFLOWS.get("sciworld_workflow")
    try:
        for made in (1, 1):
            place = make_place(says("<action>boil</action>", "<action>spill</action>", "<action>win</action>"))
            rollout = place.one("sciworld_workflow", {"prompt": game})
            assert (rollout.reward, rollout.error) == (0.4, None)
            assert "Task Description: boil 3 easy\nA lab." in rollout.calls[0].messages[1]["content"]
            assert sys.modules["scienceworld"].ScienceWorldEnv.made == made
        failed = make_place("<action>crash</action>").one("sciworld_workflow", {"prompt": game})
        assert "Java has ended" in str(failed.error)
        assert workflow.laboratories == {"x.jar": []}  # type: ignore[attr-defined]
    finally:
        workflow.laboratories.clear()  # type: ignore[attr-defined]


SHOP = """
class Shop:
    made = 0
    def __init__(self, options): Shop.made += 1; self.options, self.session = options, None
    def reset(self, session): self.session, self.observation = session, f"Page of {session}."
    def get_available_actions(self): return {"has_search_bar": True, "clickables": ["buy now"]}
    def step(self, action): return f"Did {action}.", 0.5, action.startswith("click"), {}
def make(name, **options): return Shop(options)
"""


def test_webshop_keeps_its_shops(make_place: MakePlace, packages: Any):
    packages({"gym.py": SHOP, "web_agent_site/envs.py": ""})
    answers = ["<action>dance</action>", "<action>search[shoes]</action>", "<action>click[Buy Now]</action>"]
    workflow = WORKFLOWS.get("webshop_workflow")
    try:
        for session in (5, 6):
            rollout = make_place(says(*answers)).one("webshop_workflow", {"prompt": str(session)})
            assert (rollout.reward, rollout.error, len(rollout.calls)) == (0.5, None, 3)
            seen = [call.messages[-1]["content"] for call in rollout.calls]
            assert seen[0] == f"Observation: Page of {session}."
            assert "That is no action" in seen[1]
            assert seen[2] == "Observation: Did search[shoes]."
        assert sys.modules["gym"].Shop.made == 1
    finally:
        workflow.shops.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("search[red shoes]", ""),
        ("click[Buy Now]", ""),
        ("search[]", "words in its brackets"),
        ("search", "words in its brackets"),
        ("click[Sell]", "no such button on this page, but buy now, back"),
        ("", "no action"),
    ],
)
def test_what_a_page_of_the_shop_takes(action: str, problem: str):
    said = impossible(action, {"has_search_bar": True, "clickables": ["buy now", "back"]})
    assert problem in said
    assert bool(said) == bool(problem)
    assert "no search here" in impossible("search[x]", {"has_search_bar": False, "clickables": []})


SQL = """
import typing
class Handle:
    closed = 0
    def close(self): Handle.closed += 1
class SqlEnv:
    query, record = "How many?", {"extra": {"db": "school"}}
    def __init__(self, image, data_path, preprocess, verbose):
        self.cur, self.cnx = Handle(), Handle()
        assert preprocess.__annotations__ == {"record": typing.Dict, "return": str}  # as the package asserts
        assert (image, preprocess(self.record)) == ("docker-env-sql", "use school")
    def reset(self, index): return f"Query {index}.", {}
    def step(self, action): return f"Ran {action}.", 1.0 if action == "submit" else 0.25, action == "submit", {}
"""


def test_intercode_sql(make_place: MakePlace, packages: Any):
    packages({"intercode/envs.py": SQL})
    args = {"data_path": "queries.json", "max_env_steps": 2}
    place = make_place(says("<action>SELECT 1</action>", "nothing"))
    rollout = place.one("intercode_sql_workflow", {"prompt": "3"}, workflow_args=args)
    assert (rollout.reward, rollout.error) == (1.0, None)  # submitted when the turns had run out
    assert rollout.calls[0].messages[1]["content"] == "Question: How many?\nDatabase: school\nObservation: Query 3."
    assert sys.modules["intercode.envs"].Handle.closed == 2
    kept = make_place(says("<action>SELECT 1</action>", "nothing"))
    unsent = kept.one("intercode_sql_workflow", {"prompt": "3"}, workflow_args={**args, "auto_submit": False})
    assert unsent.reward == 0.25
    with pytest.raises(ConfigError, match=r"needs workflow_args\.data_path"):
        make_place("").run("intercode_sql_workflow", {"prompt": "3"})


@pytest.mark.parametrize(
    ("text", "action"),
    [("<think>a</think><action> go </action><action>b</action>", "go"), ("<action>go", "go"), ("go", "")],
)
def test_the_action_of_an_answer(text: str, action: str):
    assert action_in(text) == action


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alfworld_workflow", "needs the package alfworld, which is not installed: pip install alfworld && alf"),
        ("step_wise_alfworld_workflow", "needs the package alfworld"),
        ("sciworld_workflow", "which is not installed: pip install scienceworld"),
        ("webshop_workflow", "needs the package web_agent_site (and gym)"),
        ("intercode_sql_workflow", "pip install intercode-bench"),
        ("agentscope_workflow_adapter", "is not included: it wraps a function that no file can name"),
        ("as_react_workflow", 'needs AgentScope 1.x from 1.0.4 on, which is not installed: pip install "agentscope>='),
        ("agentscopev0_react_math_workflow", "needs AgentScope 1.x from 1.0.4 on"),
    ],
)
def test_what_cannot_be_had_says_why_before_anything_is_loaded(name: str, words: str):
    with pytest.raises(ConfigError) as error:
        WORKFLOWS.get(name)
    assert words in str(error.value)
    assert WORKFLOWS.refusal(name) == str(error.value)


def test_what_can_be_had_is_not_refused():
    assert WORKFLOWS.refusal("frozen_lake_workflow") is None
    assert WORKFLOWS.refusal("package.module:Class") is None
    assert REWARD_FUNCTIONS.refusal("rm_gallery_reward") is None
