"""What the documents say in prose, and the blocks that need no AgentScope: asserted on real runs of a toy model."""

import json
import re
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI
from processes import forked
from pydantic import ValidationError

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.rollout.signature import judge_arguments, workflow_arguments
from sharpen.compat.files import load_config
from sharpen.config.load import resolve
from sharpen.config.rows import load_tasks
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.resolve import resolve as resolve_algorithm

HERE = Path(__file__).parent
BLOCKS, PROGRAMS = HERE / "blocks", HERE / "programs"
ONCE = {"check.enabled": False, "evaluation.before_and_after": False, "rollout.failure_reward": 0.0}


def block(name: str) -> str:
    return (BLOCKS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.fixture
def math_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the documents: `my_dataset/` with the rows they show, as often as a batch needs."""
    folder = tmp_path / "math_agent"
    (folder / "my_dataset").mkdir(parents=True)
    rows = block("second-edition-04-json")
    (folder / "my_dataset" / "train.jsonl").write_text(rows * 4)
    (folder / "my_dataset" / "test.jsonl").write_text(rows)
    monkeypatch.chdir(folder)
    return folder


def train(model: Path, workflow, judge=None, **options):
    """One step of two tasks, four rollouts each."""
    return tune(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path="my_dataset", split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=4, batch_size=2),
        settings={**ONCE, **options.pop("settings", {})},
        **options,
    )


async def ask(model, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages)
    return reply.choices[0].message.content or ""


# the dataset


@pytest.mark.parametrize("edition", ["first-edition", "second-edition"])
def test_a_dataset_folder_has_a_file_for_each_split(edition: str, math_agent: Path):
    named = re.findall(r"(\w+)\.jsonl +# samples for (\w+)", block(f"{edition}-03-tree"))
    assert named == [("train", "training"), ("test", "evaluation")]
    rows = [json.loads(line) for line in block(f"{edition}-04-json").splitlines()]
    for split, repeats in (("train", 4), ("test", 1)):
        tasks = load_tasks(DatasetConfig(path="my_dataset", split=split))
        assert [dict(task.row) for task in tasks] == rows * repeats


@pytest.mark.parametrize("program", ["preview_first_edition.py", "preview.py"])
def test_preview_prints_what_the_document_shows(program: str, math_agent: Path):
    (math_agent / "my_dataset" / "train.jsonl").write_text(block("first-edition-04-json"))
    source = (PROGRAMS / program).read_text(encoding="utf-8")
    code, _, shown = source.partition("# Output:\n")
    expected = "".join(line.removeprefix("# ") for line in shown.splitlines(keepends=True))
    with forked("-c", code) as process:
        said, errors = process.communicate(timeout=300)
    assert (process.returncode, said) == (0, expected), errors


# the two functions


@pytest.mark.parametrize("program", ["signatures_first_edition.py", "signatures.py"])
def test_the_documents_signatures_are_accepted(program: str):
    names: dict[str, object] = {}
    exec((PROGRAMS / program).read_text(encoding="utf-8"), names)
    assert workflow_arguments(names["workflow_function"]) == {"auxiliary_models"}
    assert judge_arguments(names["judge_function"]) == {"auxiliary_models"}


def test_task_and_response_reach_both_functions_and_auxiliary_models_are_an_empty_dict(math_agent, toy_model_dir):
    """ "Empty dict if no auxiliary models are needed", also where the document gives the argument a default of None."""
    seen = []

    async def workflow(task, model, auxiliary_models=None):
        seen.append(("workflow", dict(task), auxiliary_models))
        await ask(model, task["question"])
        return WorkflowOutput(response={"any": "object"}, metrics={"asked": 1.0})

    async def judge(task, response, auxiliary_models):
        seen.append(("judge", dict(task), auxiliary_models))
        assert response == {"any": "object"}
        return JudgeOutput(reward=float(len(seen)), metrics=None)

    result = train(toy_model_dir, workflow, judge)
    rows = [json.loads(line) for line in block("second-edition-04-json").splitlines()]
    assert len(seen) == 2 * 2 * 4
    for _, task, auxiliary in seen:
        assert task in rows
        assert auxiliary == {}
        assert type(auxiliary) is dict
    (line,) = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    assert line["workflow/asked"] == 1.0


def test_the_workflow_may_give_the_reward_itself(math_agent, toy_model_dir):
    """ "The judge function is optional; if not provided, the workflow function can directly output the reward." """

    async def workflow(task, model):
        return WorkflowOutput(reward=float(len(await ask(model, task["question"]))))

    assert train(toy_model_dir, workflow).steps == 1


def test_reward_none_needs_a_judge(math_agent, toy_model_dir):
    async def workflow(task, model):
        return WorkflowOutput(response=await ask(model, task["question"]))

    with pytest.raises(ConfigError, match=r"`.*workflow` returned no reward and there is no judge_func"):
        train(toy_model_dir, workflow)


def test_fields_of_the_outputs():
    ours = {"call_rewards": None, "train": None}
    assert WorkflowOutput().model_dump() == {"reward": None, "response": None, "metrics": None, **ours}
    assert JudgeOutput(reward=0.5).metrics is None
    with pytest.raises(ValidationError, match="reward"):  # "This field must be filled."
        JudgeOutput()
    with pytest.raises(ValidationError, match="reward"):
        JudgeOutput(reward=None)


def test_the_model_gives_both_openai_clients(math_agent, toy_model_dir):
    """Trinity's document: agents may call `openai.OpenAI` and `openai.AsyncOpenAI`; turns are not limited."""
    seen = []

    async def workflow(task, model):
        seen.append((isinstance(model.client, AsyncOpenAI), isinstance(model.sync_client, OpenAI)))
        for _ in range(12):
            text = await ask(model, task["question"])
        return WorkflowOutput(reward=float(len(text)))

    result = train(toy_model_dir, workflow)
    assert set(seen) == {(True, True)}
    (line,) = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    assert line["rollout/calls"] == 12
    assert line["batch/calls"] == 12 * 2 * 4
    assert RunConfig.model_fields["rollout"].default_factory().max_calls is None


# what a run leaves behind


def test_the_run_directory_has_the_documents_layout(math_agent, toy_model_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async def workflow(task, model):
        return WorkflowOutput(reward=float(len(await ask(model, task["question"]))))

    result = train(toy_model_dir, workflow, project_name="AgentScope")
    folders = re.findall(r"[─ ](\w+|Experiment-\d{14}|global_step_x)/", block("second-edition-11-tree"))
    assert folders == [
        "checkpoints",
        "AgentScope",
        "Experiment-20260104185355",
        "monitor",
        "tensorboard",
        "global_step_x",
    ]
    (run_dir,) = (math_agent / "checkpoints" / "AgentScope").iterdir()
    assert run_dir == result.run_dir
    assert re.fullmatch(r"Experiment-\d{14}", run_dir.name)
    assert (run_dir / "global_step_1" / "model.safetensors").exists()
    events = EventAccumulator(str(run_dir / "monitor" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1]


def test_without_a_project_name_the_folder_is_ours(math_agent, toy_model_dir):
    async def workflow(task, model):
        return WorkflowOutput(reward=float(len(await ask(model, task["question"]))))

    assert train(toy_model_dir, workflow).run_dir.parent == Path("checkpoints/Sharpen").absolute()


# where the documents disagree


def test_arguments_override_the_file_and_each_override_is_printed():
    """The second edition says that arguments are ignored beside `config_path`; AgentScope's code lets them override."""
    file = {"algorithm": {"group_size": 4, "learning_rate": 1e-5}, "model": {"model_path": "m", "max_model_len": 64}}
    arguments = {
        "algorithm": AlgorithmConfig(group_size=16),
        "train_dataset": DatasetConfig(path="d"),
    }
    resolved = resolve(file, None, arguments)
    assert resolved.config.algorithm.group_size == 16
    assert resolved.config.algorithm.learning_rate == 1e-5
    assert resolved.overrides == ("override: algorithm.group_size = 16 (argument) instead of 4 (run.yaml)",)


@pytest.mark.parametrize("file", ["gsm8k.yaml", "gsm8k_zh.yaml"])
def test_the_yaml_fragments_are_read(file: str):
    """Every key of the documents' YAML blocks is applied, or said to be so anyway, or mapped with a line."""
    config = load_config(PROGRAMS / file)
    resolved = resolve(config)
    assert resolved.config.model.tool_call_parser == "hermes"
    assert resolved.config.model.reasoning_parser == "deepseek_r1"
    assert resolved.config.model.enable_thinking is True
    assert resolved.origins["model.enable_thinking"] == f"{file}: explorer.rollout_model.enable_thinking"
    said = "\n".join(config.notices)
    assert (resolved.config.sync.style, resolved.config.sync.interval) == ("dynamic_by_explorer", 2)
    for key in ("enable_openai_client", "enable_history"):
        assert key in said, key
    assert "unknown" not in said


def test_step_wise_grpo_is_multi_step_grpo():
    """The English document says `grpo` with `advantage_fn: step_wise_grpo`, the Chinese one `multi_step_grpo`."""
    english, chinese = (resolve(load_config(PROGRAMS / file)).config for file in ("gsm8k.yaml", "gsm8k_zh.yaml"))
    assert english.algorithm == chinese.algorithm
    assert english.algorithm.algorithm_type == "multi_step_grpo"
    one, other = (
        resolve_algorithm(config.algorithm.algorithm_type, config.loss, config.algorithm.group_size)
        for config in (english, chinese)
    )
    assert one == other
