"""Trinity's environments: the frozen lake, and text worlds by the packages that have them (tiny ones here)."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from trinity_serving import MakePlace

from sharpen.compat.trinity import REWARD_FUNCTIONS, WORKFLOWS
from sharpen.compat.trinity.workflows.frozen_lake import MOVES, Lake, made_lake, move_in
from sharpen.compat.trinity.workflows.text_worlds import action_in, impossible
from sharpen.errors import ConfigError
from sharpen.types import CallStatus

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


GAME = """
class Game:
    closed = 0
    def __init__(self, name): self.name, self.steps = name, 0
    def reset(self): return f"You are in {self.name}.", {}
    def step(self, action):
        self.steps += 1
        won = action == "win"
        return ("Nothing happens." if not action else f"You {action}."), float(won), won, {}
    def close(self): Game.closed += 1
"""
ALFWORLD = {
    "textworld/__init__.py": "class EnvInfos:\n    def __init__(self, **wanted): self.wanted = wanted\n",
    "textworld/gym.py": GAME
    + "def register_game(file, infos, wrappers): return (file, infos.wanted, len(wrappers))\n"
    + "def make(id): return Game(id[0])\n",
    "alfworld/agents/environment/alfred_tw_env.py": (
        "class AlfredDemangler: pass\nclass AlfredExpertType: HANDCODED = 1\n"
        "class AlfredExpert:\n    def __init__(self, expert_type): pass\n"
    ),
}


def says(*answers: str) -> Any:
    left = list(answers)
    return lambda prompt: left.pop(0)


def test_alfworld(make_place: MakePlace, packages: Any):
    packages(ALFWORLD)
    place = make_place(says("<think>.</think><action>look</action>", "no action", "<action>win</action>"))
    rollout = place.one("alfworld_workflow", {"prompt": "a kitchen"})
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert rollout.metrics == {"env_rounds": 3.0, "env_done": 1.0}
    seen = [call.messages[-1]["content"] for call in rollout.calls]
    assert seen[:2] == ["Observation: You are in a kitchen.", "Observation: You look."]
    assert seen[2].startswith("Observation: Nothing happens. Check")
    assert [call.parent for call in rollout.calls] == [None, 0, 1]
    assert sys.modules["textworld.gym"].Game.closed == 1
    lost = make_place("<action>look</action>").one(
        "alfworld_workflow", {"prompt": "a kitchen"}, workflow_args={"max_env_steps": 2}
    )
    assert (lost.reward, len(lost.calls)) == (pytest.approx(-0.1), 2)


def test_alfworld_step_by_step(make_place: MakePlace, packages: Any):
    packages(ALFWORLD)
    place = make_place(says("<action>look</action>", "<action>win</action>"))
    rollout = place.one("step_wise_alfworld_workflow", {"prompt": "a kitchen"})
    assert (rollout.reward, dict(rollout.call_rewards)) == (1.0, {0: 1.0, 1: 1.0})
    assert dict(rollout.step_rewards) == {0: 0.0, 1: 1.0}
    seen = ["Observation: You are in a kitchen.", "Observation: You look."]
    assert dict(rollout.states) == {i: hashlib.sha256(text.encode()).hexdigest() for i, text in enumerate(seen)}
    assert rollout.metrics["actual_env_steps"] == 2.0


SCIENCE = """
class ScienceWorldEnv:
    def __init__(self, name, jar, envStepLimit): self.jar = jar
    def load(self, task, number, how, generateGoldPath): self.task = f"{task} {number} {how}"
    def get_task_description(self): return self.task
    def reset(self): return "A lab.", {}
    def step(self, action): return f"You {action}.", {"boil": 40, "spill": -60, "win": 30}[action], action == "win", {}
    def close(self): pass
"""


def test_scienceworld_counts_the_best_score(make_place: MakePlace, packages: Any):
    packages({"scienceworld.py": SCIENCE})
    place = make_place(says("<action>boil</action>", "<action>spill</action>", "<action>win</action>"))
    game = json.dumps({"task_name": "boil", "var_num": 3, "jar_path": "x.jar"})
    rollout = place.one("sciworld_workflow", {"prompt": game})
    assert (rollout.reward, rollout.error) == (0.4, None)
    assert "Task Description: boil 3 easy\nA lab." in rollout.calls[0].messages[1]["content"]


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
class Handle:
    closed = 0
    def close(self): Handle.closed += 1
class SqlEnv:
    query, record = "How many?", {"extra": {"db": "school"}}
    def __init__(self, image, data_path, preprocess, verbose):
        self.cur, self.cnx = Handle(), Handle()
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
        ("simple_mm_workflow", "of Trinity-RFT is not included: models of text only are trained"),
        ("email_search_workflow", "is not included"),
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
    assert "beside math_rm_workflow" in str(REWARD_FUNCTIONS.refusal("rm_gallery_reward"))
