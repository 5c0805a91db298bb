"""The parts of `examples/extend`, each outside of the package: it keeps the contract, and a run trains with it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from processes import forked

from sharpen import AlgorithmConfig, DatasetConfig, EnvironmentConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.functions import PREPARED, import_function, import_object
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import with_updates
from sharpen.gateway.routes import Protocols
from sharpen.learning.experience.reading import read_groups
from sharpen.models.configuration import read_config
from sharpen.models.support import support_of
from sharpen.models.table import bring
from sharpen.testing import (
    check_algorithm,
    check_dataset,
    check_engine,
    check_environment,
    check_family,
    check_monitor,
    check_protocol,
    check_tool_format,
)

EXTEND = Path(__file__).parents[2] / "examples" / "extend"


async def letters(task: Any, model: Any) -> WorkflowOutput:
    """One call, rewarded for the letter 'e'."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], str]:
    """Copy an example out of the repository: `place("monitor.py:SqliteMonitor")` is how the settings name it there."""

    def copied(name: str) -> str:
        file, _, part = name.partition(":")
        return f"{shutil.copy(EXTEND / file, tmp_path)}:{part}"

    return copied


@pytest.fixture
def trained(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Callable[..., Any]:
    """Train the toy model for two steps, or more, with `settings`, and certify it. What checks a run before its first
    step, and makes steps of it once more, has nothing of most parts' own: tests of parts of the model switch it on."""

    def train(*, steps: int = 2, **options: Any) -> Any:
        settings = {
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "name": "extended",
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "certificate.retrain": "off",
            **options.pop("settings", {}),
        }
        arguments = {
            "train_dataset": DatasetConfig(path=str(toy_dataset), split="train", total_steps=steps),
            "model": TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
            "algorithm": AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
            **options,
        }
        result = tune(**{"workflow_func": letters, "settings": settings, **arguments})
        assert json.loads((result.run_dir / "certificate.json").read_text())["holds"]
        return result

    return train


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a package that holds an example and announces it: `announced("monitors", "sqlite = ...")`."""

    def install(kind: str, point: str) -> None:
        module = point.partition("=")[2].partition(":")[0].strip()
        info = tmp_path / "installed" / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sharpen.{kind}]\n{point}\n")
        shutil.copy(EXTEND / f"{module}.py", tmp_path / "installed")
        monkeypatch.syspath_prepend(str(tmp_path / "installed"))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_an_algorithm(place, trained, announced) -> None:
    """By its file and by a package: the certificate and the updates made once more use its second formulas."""
    part = place("algorithm.py:RANKS")
    check_algorithm(import_object(part))
    by_file = trained(algorithm=algorithm(part)).run_dir
    announced("algorithms", "ranks = algorithm:RANKS")
    by_name = trained(algorithm=algorithm("ranks"), settings={"name": "announced"}).run_dir
    for run_dir, name in ((by_file, part), (by_name, "ranks")):
        assert recorded(run_dir, "algorithm.algorithm_type") == name
        found = with_updates(certify(run_dir), run_dir, (), print)
        assert found.holds, found.problems
        assert not [text for text in found.not_recomputed if "second formula" in text]
        assert found.repeated
        assert next(check for check in found.checks if check.name == "advantages").checked
    assert recorded(by_file, f"identity.{ALGORITHM}") == recorded(by_name, f"identity.{ALGORITHM}")
    words = ["certify", str(by_file), "--no-logprobs"]
    code = f"from sharpen.cli.main import main\nprint(main({words}), main([*{words}, '--trust', {part[:-6]!r}]))"
    with forked("-c", code) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"If you trust it, `sharpen certify` has --trust {part[:-6]}" in errors
    assert said.splitlines()[-1] == "2 0"


def test_parts_of_an_algorithm_without_their_second_formulas(place, trained, tmp_path: Path) -> None:
    """The certificate holds, and says everywhere what it did not recompute; another file does not go on."""
    place("algorithm.py:RANKS")
    rule = tmp_path / "rule.py"
    rule.write_text(
        "import numpy as np\nfrom algorithm import ranks, soft_wall\n\n"
        "def near(now_E, reference_E, old_E): return (now_E - reference_E) ** 4\n\n"
        "def alike(rollouts_E, calls_E): return np.full(len(calls_E), 1 / len(calls_E))\n"
    )
    loss = {
        "loss.advantage": f"{rule}:ranks",
        "loss.policy_loss": f"{rule}:soft_wall",
        "loss.kl": f"{rule}:near",
        "loss.aggregation": f"{rule}:alike",
        "loss.advantage_args": {"power": 0.5},
    }
    run_dir = trained(settings=loss).run_dir
    written = json.loads((run_dir / "certificate.json").read_text())["not_recomputed"]
    found = with_updates(certify(run_dir), run_dir, (), print)
    assert found.holds, found.problems
    for what in ("the advantages", "the losses of tokens", "the KL term", "the weights of tokens"):
        for said in (written, found.not_recomputed):
            assert any(text.startswith(what) and "brings no second formula" in text for text in said), (what, said)
    checked = {check.name: check.checked for check in found.checks}
    assert not checked["advantages"]
    assert not checked["token_weights"]
    assert checked["ids"]
    assert not found.repeated
    rule.write_text(rule.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"the code of .*rule.py:ranks, which is loss.advantage, is not the one"):
        certify(run_dir)
    with pytest.raises(ConfigError, match=r"(?s)what loss.advantage holds: \d+ bytes .*what loss.aggregation holds"):
        trained(settings=loss, steps=3)


ALGORITHM = "algorithm.algorithm_type"


def recorded(run_dir: Path, name: str) -> Any:
    """What a run recorded of a setting."""
    return json.loads((run_dir / "resolved.json").read_text())[name]["value"]


def algorithm(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(algorithm_type=name, group_size=4, batch_size=2, learning_rate=1e-3)


def test_a_monitor(place, trained, announced, tmp_path: Path) -> None:
    part = place("monitor.py:SqliteMonitor")
    (tmp_path / "tried").mkdir()
    check_monitor(import_function(part), tmp_path / "tried")
    result = trained(monitor_type=part)
    announced("monitors", "sqlite = monitor:SqliteMonitor")
    trained(monitor_type="sqlite", steps=3)
    numbers = sqlite3.connect(result.run_dir / "monitor" / "numbers.sqlite")
    found = dict(numbers.execute("select step, value from numbers where name = 'reward/mean'").fetchall())
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert found == {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    assert sorted(found) == [1, 2, 3]


STOP = {"type": "object", "properties": {}, "additionalProperties": False}


async def calls(task: Any, model: Any) -> WorkflowOutput:
    """One answer that must be a call, in whatever format the model has."""
    reply = await model.client.chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": task["question"]}],
        tools=[{"type": "function", "function": {"name": "stop", "parameters": STOP, "strict": True}}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    calls = reply.choices[0].message.tool_calls or ()
    return WorkflowOutput(reward=len(calls) + reply.usage.completion_tokens / 1000)


def test_a_tool_format(place, trained, toy_model_dir: Path, capsys) -> None:
    part = place("tool_format.py:PHI4_MINI")
    written = '[{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]'
    check_tool_format(import_object(part), [f"so<|tool_call|>{written}<|/tool_call|>"])
    model = TunerModelConfig(
        model_path=str(toy_model_dir), max_model_len=256, max_tokens=128, tool_call_parser=part, reasoning_parser=None
    )
    result = trained(workflow_func=calls, model=model)
    assert "tool calls phi4_mini (as set)" in capsys.readouterr().out
    rewards = [rollout.reward for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert len(rewards) == 2 * 2 * 4
    assert min(rewards) > 1.0, "each answer was read as a call"


CHAT = ("POST", "/api/chat")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def speaks_ollama(task: Any, model: Any) -> WorkflowOutput:
    """One streamed answer, over HTTP."""
    asked = {"model": "any", "messages": [{"role": "user", "content": task["question"]}], "options": {"num_predict": 8}}
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{model.keyed_url.removesuffix('/v1')}/api/chat", json=asked)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    return WorkflowOutput(reward="".join(line["message"]["content"] for line in lines).count("e") / 8)


def test_a_protocol(place, trained, announced, tmp_path: Path) -> None:
    """By its file and by a package. With another file the run does not go on."""
    part = place("protocol.py:OLLAMA")
    user, result = {"role": "user", "content": "hi"}, {"role": "tool", "tool_name": "f", "content": "3"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    options = {"temperature": 0.5, "num_predict": 8, "stop": ["x"], "seed": 3}
    least: dict[str, Any] = {"model": "m", "messages": [user]}
    more = {"messages": [user, called, result], "tools": TOOLS, "stream": False, "options": options, "think": True}
    form = {"format": {"type": "object"}, "keep_alive": -1}
    check_protocol(import_object(part), {CHAT: [least, {**least, **more}, {**least, **form}]})
    settings = {"gateway.protocols": [part]}
    result = trained(workflow_func=speaks_ollama, settings=settings)
    calls = [call for group in read_groups(result.run_dir / "run.db") for one in group.rollouts for call in one.calls]
    assert len(calls) == 2 * 2 * 4
    announced("protocols", "ollama = protocol:OLLAMA")
    assert Protocols(["ollama"]).parser(CHAT) is not None
    with (tmp_path / "protocol.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ConfigError, match=r"what gateway.protocols holds: \d+ bytes .*-> \d+ bytes"):
        trained(workflow_func=speaks_ollama, settings=settings, steps=3)


@pytest.fixture
def squares(tmp_path: Path, toy_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """Make a tiny model of the example's family, given its module's parts: `squares(part)`."""
    monkeypatch.setenv(PREPARED, "[]")  # what is brought here is brought in no later test

    def make(family: Any) -> Path:
        settings = json.loads((toy_model_dir / "config.json").read_text())
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        module = import_object(family.replace("SQUARES", "SquaresForCausalLM"))
        torch.manual_seed(0)
        model = module(module.config_class(**{name: settings[name] for name in sizes}, max_position_embeddings=128))
        folder = shutil.copytree(toy_model_dir, tmp_path / "squares", ignore=shutil.ignore_patterns("*.safetensors"))
        model.save_pretrained(folder)
        return folder

    return make


def test_a_family(place, trained, squares, tmp_path: Path) -> None:
    """A run that trains in two processes is certified where the file is trusted, and says so where it is not."""
    part = place("family.py:SQUARES")
    folder = squares(part)
    bring(part)
    check_family(import_object(part), folder)
    model = TunerModelConfig(model_path=str(folder), max_model_len=128, max_tokens=8)
    result = trained(model=model, settings={"families": [part], "trainer.num_processes": 2})
    assert json.loads((result.run_dir / "latest" / "config.json").read_text())["model_type"] == "squares"
    command, file = ["-m", "sharpen", "certify", str(result.run_dir)], part.partition(":")[0]
    with forked(*command) as process:
        untrusted, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "the logprobs, since their model's family is not known" in untrusted
    assert f"`sharpen certify` has --trust {file}" in untrusted
    with forked(*command, "--retrain", "--trust", file) as process:
        trusted, errors = process.communicate()
    assert process.returncode == 0, trusted + errors
    assert "since their model's" not in trusted
    assert "not made once more" not in trusted


def test_a_family_that_a_package_announces_is_found_by_the_type_of_its_model(squares, announced) -> None:
    folder = squares(f"{EXTEND / 'family.py'}:SQUARES")
    announced("families", "squares = family:SQUARES")
    assert support_of(read_config(folder))["family"] == "Squares"


def test_an_engine(place, trained, toy_model_dir: Path, capsys) -> None:
    """What it samples, the trainer computes again in every step; new weights come after each."""
    part = place("engine.py:PlainEngine")
    check_engine(import_object(f"{part}.start"), toy_model_dir)
    result = trained(settings={"engine.type": part, "check.enabled": True})
    assert f"engine: {part} (engine.type)" in capsys.readouterr().out
    calls = [call for group in read_groups(result.run_dir / "run.db") for one in group.rollouts for call in one.calls]
    assert {version for call in calls for version in call.versions_S.tolist()} == {0, 1}


def test_a_dataset(place, trained, announced) -> None:
    part = place("dataset.py:sums")
    check_dataset(import_function(part), name="3", split="test")
    result = trained(train_dataset=DatasetConfig(path=part, name="3", total_steps=2))
    tasks = {group.task.id: group.task.row["question"] for group in read_groups(result.run_dir / "run.db")}
    for id_, question in tasks.items():
        split, _, number = id_.partition("/")
        assert question == import_function(part)("3", split)[int(number)]["question"]
    announced("datasets", "sums = dataset:sums")
    trained(train_dataset=DatasetConfig(path="sums", split="test", total_steps=2), settings={"name": "announced"})


def test_an_environment(place, trained, announced, toy_model_dir: Path) -> None:
    part = place("environment.py:GuessNumber")
    config = EnvironmentConfig(type=part, args={"up_to": 8})
    check_environment(import_function(part), config, ["4", "no idea", "7"])
    options: dict[str, Any] = {
        "workflow_func": None,
        "train_dataset": None,
        "model": TunerModelConfig(model_path=str(toy_model_dir), max_model_len=512, max_tokens=4),
    }
    result = trained(environment=config, settings={"train_dataset.total_steps": 2}, **options)
    groups = read_groups(result.run_dir / "run.db")
    assert {task for group in groups for task in group.task.row} == {"number"}
    assert {rollout.metrics["turns"] for group in groups for rollout in group.rollouts} <= {1, 2, 3, 4}
    announced("environments", "guess = environment:GuessNumber")
    named = {"train_dataset.total_steps": 1, "name": "announced"}
    trained(environment=EnvironmentConfig(type="guess", args={"up_to": 8}), settings=named, **options)
    with pytest.raises(ConfigError, match="give up_to, a whole number above 1"):
        trained(environment=EnvironmentConfig(type=part, args={"to": 8}), **options)
