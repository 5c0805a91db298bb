"""Each program of the documentation runs as it is printed, here or in a test that is named here.

What a piece leaves open (`ask`, `task`, "...") is filled in; model, paths and sizes are exchanged for toy ones, and
what is exchanged must be there.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from experience_builders import make_call, make_rollout
from pages import ROOT, Block, blocks
from pydantic import BaseModel
from scripted import Script, ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen import JudgeOutput, TunerModelConfig, UnusableAnswerError, WatchedJudge, WorkflowOutput
from sharpen.config.load import resolve
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.model import ChatModel
from sharpen.types import Group, Outcome, Task

ELSEWHERE = {
    "README.md": "tests/package/test_readme.py",
    "docs/start/frameworks.md": "tests/agentscope/page_programs.py",
    "docs/start/guide.md": "tests/spec/test_guide.py",
    "docs/start/zh.md": "tests/package/test_readme.py",
    "docs/use/agentscope.md": "tests/agentscope/test_agentscope1_page.py",
    "docs/use/environments.md": "tests/environments/test_example_reasoning.py",
    "docs/use/extending.md": "tests/learning/algorithm/test_contracts.py",
    "docs/use/images.md": "tests/gateway/test_gateway_images_page.py",
    "docs/use/record.md": "tests/serve/record/test_record_command.py",
    "docs/use/model-selection.md": "tests/beyond/model_selection/test_selection_page.py",
    "docs/use/serve.md": "tests/serve/test_serve_page.py",
    "docs/use/trinity.md": "tests/compat/test_trinity_page.py",
    "skills/sharpen/SKILL.md": "tests/docs/test_docs_skill.py",
}
"""Pages whose programs another test runs: it names the page."""
HERE = {
    "docs/use/auxiliary-models.md": 2,
    "docs/use/beyond-rl.md": 1,
    "docs/use/clients.md": 4,
    "docs/use/commands.md": 2,
    "docs/use/constrained-output.md": 1,
    "docs/use/failures.md": 1,
    "docs/use/formats.md": 1,
    "docs/use/judges.md": 2,
    "docs/use/lora.md": 2,
    "docs/use/operators.md": 1,
    "docs/use/policies.md": 1,
    "docs/use/prompts.md": 1,
    "docs/use/teams.md": 1,
}
"""How many programs of a page run below; of `prompts.md`, the other one runs in test_prompts_page.py."""
RUN_FROM = {"workflow": "agent.py:run", "train_dataset.path": "tasks.jsonl", "model.model_path": "m"}
ServeModel = Callable[[Script | str], ChatModel]


def programs(page: str) -> list[str]:
    return [block.text for block in blocks("python") if block.page == f"docs/use/{page}"]


def exchanged(code: str, places: dict[str, str]) -> str:
    for old, new in places.items():
        assert old in code, old
        code = code.replace(old, new)
    return code


def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Run a program with these names; return them with those that it sets."""
    exec(compile(code, "page", "exec", dont_inherit=True), names)
    return names


async def run_piece(code: str, **names: Any) -> dict[str, Any]:
    """Run lines that stand in an async function; return the names that they set."""
    exec(
        compile(
            f"async def piece():\n{textwrap.indent(code, '    ')}\n    return locals()",
            "page",
            "exec",
            dont_inherit=True,
        ),
        names,
    )
    found: dict[str, Any] = await names["piece"]()
    return found


@pytest.fixture(scope="module")
def serving() -> Iterator[ServingLoop]:
    loop = ServingLoop()
    yield loop
    loop.stop()


@pytest.fixture
def serve(serving: ServingLoop) -> Iterator[ServeModel]:
    """`serve(script)`: the model object of a rollout whose answers the script gives."""
    gateways: list[Gateway] = []

    def make(script: Script | str) -> ChatModel:
        tokenizer = toy_tokenizer()
        engine = ScriptedEngine(tokenizer, script if callable(script) else lambda _: script)
        gateways.append(Gateway(engine, tokenizer, model_name="toy", loop=serving.loop))
        return gateways[-1].open("g/0", noise_seed=7).model

    yield make
    for gateway in gateways:
        serving.run(gateway.close())


def test_each_program_of_a_page_runs_somewhere() -> None:
    """Red when a page gets a program that no test runs."""
    counted = Counter(block.page for block in blocks("python") + blocks("javascript"))
    counted.subtract({"docs/use/prompts.md": 1})
    left = {page for page in counted if not page.startswith("examples/")} - ELSEWHERE.keys()
    assert {page: counted[page] for page in left} == HERE
    for page, test in {**ELSEWHERE, "docs/use/prompts.md": "tests/beyond/prompt_tune/test_prompts_page.py"}.items():
        assert page in counted
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not name {page}"


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.page.startswith("examples/")], ids=str)
def test_an_example_s_page_quotes_the_example(block: Block) -> None:
    """Its names and keyword arguments are those of the example's files, which the examples' own tests run."""
    files = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / block.page).parent.glob("*.py"))
    nodes = list(ast.walk(ast.parse(f"async def piece():\n{textwrap.indent(block.text, '    ')}")))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
    assert {name for name in names if not re.search(rf"\b{name}\b", files)} <= {"model"}


def test_auxiliary_models(serve: ServeModel) -> None:
    judge, settings = programs("auxiliary-models.md")
    names = run_code(judge, JudgeOutput=JudgeOutput)
    said = asyncio.run(names["judge"]({"question": "2+2?"}, "4", {"grader": serve("7")}))
    assert said.reward == 0.7
    given: dict[str, Any] = {}
    code = exchanged(settings, {", tune\n": "\n", "    ...,\n": ""})
    run_code(code, tune=lambda **options: given.update(options))
    resolved = resolve({}, RUN_FROM | {"model.max_model_len": 64}, given).config
    assert {name: model.base_url is None for name, model in resolved.auxiliary_models.items()} == {
        "grader": True,
        "critic": False,
    }


def test_beyond_rl(
    toy_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = programs("beyond-rl.md")
    rows = [{"prompt": f"question {n}", "response": "yes"} for n in range(20)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    places = {"Qwen/Qwen3-0.6B": str(toy_model_dir), "max_model_len=4096": "max_model_len=64"}
    result = run_code(exchanged(code, places | {"batch_size=32": "batch_size=8"}))["result"]
    assert result.loss_after < result.loss_before
    assert capsys.readouterr().out.splitlines()[-1] == f"{result.loss_before} {result.loss_after} {result.model_dir}"
    assert (Path(result.model_dir) / "model.safetensors").is_file()


def test_clients(serve: ServeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of other environments are exchanged for one that writes the answer; what they are given is what
    their own tests give to the real ones."""
    sys.path.insert(0, str(ROOT / "tests" / "clients"))
    coding_agents = importlib.import_module("coding_agents")
    sys.path.pop(0)
    workflow, others, node = programs("clients.md")
    for folder in ("bin", "repairs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "claude").write_text('#!/bin/sh\necho 5 > answer.txt\nfor each; do echo "$each"; done\n')
    (tmp_path / "bin" / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    model, task = serve("x"), {"question": "2+3?", "folder": tmp_path / "repairs"}
    output = asyncio.run(run_code(workflow, WorkflowOutput=WorkflowOutput)["workflow"](task, model))
    assert output.reward == 1.0
    real = {name: agent.start("2+3?", model) for name, agent in coding_agents.AGENTS.items()}
    assert output.response.splitlines() == real.pop("claude")["arguments"][1:]

    names = run_code(others, question="2+3?", model=model)
    lists = [one for one in ast.parse(others).body if isinstance(one, ast.Expr)]
    found = {given[0]: given[1:] for one in lists for given in [eval(ast.unparse(one), names)]}
    assert found == {name: given["arguments"][1:] for name, given in real.items()}
    assert names["configuration"] == json.loads(real["opencode"]["files"]["opencode.json"])

    class Model:
        async def run(self, arguments: list[str], *, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
            return arguments, env

    assert asyncio.run(run_piece(node, model=Model(), task=task))["ended"][1] == {"QUESTION": "2+3?"}
    (script,) = [block.text for block in blocks("javascript") if block.page == "docs/use/clients.md"]
    tested = (ROOT / "tests" / "clients" / "openai_chat.cjs").read_text(encoding="utf-8")
    for piece in ("new OpenAI({ maxRetries: 0 })", "{ model: process.env.OPENAI_MODEL, messages, tools"):
        assert piece in script
        assert piece in tested


def test_commands(serve: ServeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, in_a_container = programs("commands.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "main.py").write_text("open('answer.txt', 'w').write(open('question.txt').read() + ' 4')")
    names = run_code(exchanged(program, {'["node", "agent.mjs"]': repr([sys.executable, "main.py"])}))
    output = asyncio.run(names["run_agent"]({"question": "2+2?"}, serve("4")))
    assert asyncio.run(names["judge"]({"answer": "4"}, output.response)) == 1.0
    assert asyncio.run(names["judge"]({"answer": "5"}, output.response)) == 0.0

    class Model:
        async def run(self, arguments: list[str], *, sandbox: Any) -> tuple[list[str], Any]:
            return arguments, sandbox

    found = asyncio.run(run_piece(in_a_container, model=Model(), task={"question": "2+2?"}))
    assert found["result"][1].image == "my-agent:1"


def test_constrained_output(serve: ServeModel) -> None:
    (code,) = programs("constrained-output.md")
    messages = [{"role": "user", "content": "where?"}]
    code = exchanged(code, {"messages=[...]": f"messages={messages}"}) + "    return trip\n"
    names = run_code(code, BaseModel=BaseModel, Literal=Literal)
    trip = asyncio.run(names["workflow"]({}, serve('{"city": "Bern", "days": 3}')))
    assert (type(trip).__name__, trip.city, trip.days) == ("Trip", "Bern", 3)


def test_failures() -> None:
    (code,) = programs("failures.md")
    assert run_code(code, json=json, reply='{"answer": 4}')["answer"] == 4
    with pytest.raises(UnusableAnswerError, match="four"):
        run_code(code, json=json, reply="four")


def test_formats() -> None:
    (code,) = programs("formats.md")
    run_code(
        exchanged(code, {"model_path=..., max_model_len=...": "model_path='m', max_model_len=64"}),
        TunerModelConfig=TunerModelConfig,
    )


def test_judges(serve: ServeModel) -> None:
    """The rubric asks a model that is served here, whose answer is constrained: (3 * 1 + 0) / 4."""
    rubric, watched = programs("judges.md")
    judge = run_code(rubric)["judge"]
    row = {"question": "2+2?", "answer": "4"}
    grader = {"grader": serve('{"reason": "so it is", "right": 10, "short": 0}')}
    said = asyncio.run(judge(row, "4", grader))
    assert (said.reward, said.metrics["right"], said.metrics["short"]) == (0.75, 1.0, 0.0)
    names = run_code(watched, WatchedJudge=WatchedJudge, cheap=judge, strict=judge)
    assert asyncio.run(names["judge"](row, "4", grader)).reward == 0.75


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 on transformers 5.23
def test_lora(toy_model_dir: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings, loading = programs("lora.md")
    given: dict[str, Any] = {}
    run_code(exchanged(settings, {"..., ": ""}), tune=lambda **options: given.update(options))
    resolved = resolve({}, RUN_FROM | {"model.max_model_len": 64} | given["settings"], {}).config
    assert resolved.trainer.lora is not None
    assert resolved.trainer.lora.rank == 16
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(toy_model_dir), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    places = {"Qwen/Qwen3-0.6B": str(toy_model_dir), ".../global_step_100/adapter": str(tmp_path / "adapter")}
    names = run_code(exchanged(loading, places), AutoModelForCausalLM=AutoModelForCausalLM)
    assert names["model"].peft_config["default"].target_modules == {"q_proj"}


def test_operators() -> None:
    (code,) = programs("operators.md")
    names = run_code(code)
    rollouts = tuple(
        make_rollout([make_call(0, [1, 2], list(range(index + 1)))], 1.0, index=index) for index in range(2)
    )
    group = Group(id="g", task=Task(id="t", index=0, row={}), version=0, rollouts=rollouts)
    (priced,) = names["longer_is_worse"]([group], per_token=0.25)
    assert [rollout.reward for rollout in priced.rollouts] == [0.75, 0.5]
    assert {rollout.outcome for rollout in priced.rollouts} == {Outcome.OK}


def test_prompts(serve: ServeModel) -> None:
    code = exchanged(programs("prompts.md")[1], {"tune_prompt(..., ": "tune_prompt(", "tune(..., ": "tune("})
    given: dict[str, Any] = {}

    def tune_prompt(**options: Any) -> tuple[str, dict[str, float]]:
        given["first"] = options
        return "Be brief.", {}

    names = {"TunerModelConfig": TunerModelConfig, "WorkflowOutput": WorkflowOutput, "functools": functools}
    run_code(code, **names, tune_prompt=tune_prompt, tune=lambda **options: given.update(then=options))
    assert given["first"]["model"] is given["then"]["model"]
    model = serve("yes")
    said = asyncio.run(given["then"]["workflow_func"](task={"question": "well?"}, model=model))
    assert said.response == "yes"
    assert model.calls()[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_teams(serve: ServeModel) -> None:
    (code,) = programs("teams.md")

    async def ask(model: ChatModel, text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        reply = await model.client.chat.completions.create(model=model.name, messages=messages)
        return reply.choices[0].message.content or ""

    names = run_code(code, ask=ask, run_tests=lambda code: 1.0, judge_of_plans=lambda plan: 0.5)
    model = serve("do it")
    output = asyncio.run(names["workflow"]({"question": "how?"}, model))
    assert (output.reward, output.call_rewards) == (1.0, {"planner": 0.5, "coder": 1.0})
    assert [call.agent for call in model.calls()] == ["planner", "coder"]


def test_policies(serve: ServeModel) -> None:
    async def play(task: dict[str, Any], players: list[ChatModel]) -> int:
        for player in players:
            messages: Any = [{"role": "user", "content": task["question"]}]
            await player.client.chat.completions.create(model=player.name, messages=messages)
        return 1

    (code,) = programs("policies.md")
    model = serve("mine")
    names = run_code(code, play=play, WorkflowOutput=WorkflowOutput)
    assert asyncio.run(names["workflow"]({"question": "your move"}, model)).reward == -1.0
    assert [call.agent for call in model.calls()] == ["", "rival"]
