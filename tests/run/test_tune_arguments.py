"""What is wrong with the arguments of `tune()` is said in one clear sentence, before anything is loaded."""

import functools
import traceback

import pytest

from sharpen import AlgorithmConfig, AuxiliaryModelConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import ConfigError, DatasetError, ModelError


async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=1)
    return WorkflowOutput(reward=1.0)


def sync_workflow(task, model):
    return WorkflowOutput(reward=1.0)


async def extra(task, model, tools):
    return WorkflowOutput(reward=1.0)


async def starred(*args):
    return WorkflowOutput(reward=1.0)


@pytest.fixture
def arguments(tmp_path, toy_model_dir, toy_dataset):
    return {
        "workflow_func": workflow,
        "train_dataset": DatasetConfig(path=str(toy_dataset)),
        "model": TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        "settings": {"checkpoint_root_dir": str(tmp_path / "runs")},
    }


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"workflow_func": sync_workflow}, ConfigError, ["workflow_func", "sync_workflow", "not async"]),
        ({"workflow_func": extra}, ConfigError, ["tools", "nobody passes"]),
        ({"workflow_func": starred}, ConfigError, ["*args"]),
        ({"workflow_func": None}, ConfigError, ["None", "cannot be called"]),
        ({"judge_func": functools.partial(workflow)}, ConfigError, ["judge_func", "response"]),
        ({"train_dataset": None}, ConfigError, ["train_dataset", "missing"]),
        ({"train_dataset": DatasetConfig(path="no/such/folder/data")}, DatasetError, ["no/such/folder/data"]),
        ({"model": None}, ConfigError, ["model", "missing"]),
        ({"model": TunerModelConfig(model_path="./nowhere", max_model_len=64)}, ModelError, ["./nowhere"]),
        ({"algorithm": AlgorithmConfig(group_size=1)}, ConfigError, ["group_size is 1", "at least 2"]),
        ({"algorithm": AlgorithmConfig(algorithm_type="grppo")}, ConfigError, ["grppo", "grpo"]),
        ({"monitor_type": "wandbb"}, ConfigError, ["wandbb", "wandb"]),
        ({"settings": {"rollout.timeout": 3}}, ConfigError, ["rollout.timeout", "timeout_s"]),
        ({"settings": {"model.temperature": 0}}, ConfigError, ["temperature is 0"]),
        ({"settings": {"model.temperature": 0.001}}, ConfigError, ["temperature is 0.001", "0.01 at least"]),
        ({"config_path": "no.yaml"}, ConfigError, ["no.yaml"]),
    ],
)
def test_one_clear_sentence(arguments, tmp_path, change, kind, words):
    merged = {**arguments, **change}
    with pytest.raises(kind) as raised:
        tune(**merged)
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert not (tmp_path / "runs").exists()


def test_all_that_is_wrong_is_said_at_once(arguments, tmp_path, toy_model_dir):
    """Red where each fault is found by another run of the script."""
    away = TunerModelConfig(model_path="./judge", max_model_len=64)
    with pytest.raises(ConfigError) as raised:
        tune(
            **{
                **arguments,
                "workflow_func": starred,
                "judge_func": functools.partial(workflow),
                "train_dataset": DatasetConfig(path="no/such/folder/data"),
                "model": TunerModelConfig(model_path="./nowhere", max_model_len=64, temperature=0.0),
                "auxiliary_models": {"a": away, "b": away.model_copy(update={"model_path": "./other"})},
            }
        )
    lines = str(raised.value).splitlines()
    assert lines[0] == "7 problems"
    for word in ("*args", "response", "temperature", "./judge", "./other", "./nowhere", "no/such/folder/data"):
        assert sum(word in line for line in lines[1:]) == 1, (word, lines)
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_a_file_comes_with_what_is_wrong_with_the_arguments(arguments, tmp_path):
    """Red where the file is mended first, and the arguments are looked at in the next run."""
    (tmp_path / "run.yaml").write_text("rollout: {timeout: 3}\nsampling: {ordre: shuffled}\n")
    given = {"workflow_func": starred, "model": TunerModelConfig(model_path="./nowhere", max_model_len=64)}
    with pytest.raises(ConfigError) as raised:
        tune(**{**arguments, **given, "config_path": tmp_path / "run.yaml"})
    assert all(word in str(raised.value) for word in ("rollout.timeout", "sampling.ordre", "*args", "./nowhere"))
    assert not (tmp_path / "runs").exists()


def test_a_dataset_that_is_not_there_is_an_os_error_too(arguments):
    with pytest.raises(OSError, match="no/such/folder/data"):
        tune(**{**arguments, "train_dataset": DatasetConfig(path="no/such/folder/data")})


@pytest.mark.parametrize(
    ("auxiliary", "kind", "words"),
    [
        (TunerModelConfig(model_path="./nowhere", max_model_len=64), ModelError, "./nowhere"),
        (
            AuxiliaryModelConfig(model_path="m", max_model_len=64, base_url="localhost:8000"),
            ConfigError,
            "auxiliary_models.judge.base_url is 'localhost:8000': it must be an address like https://host/v1",
        ),
        (
            AuxiliaryModelConfig(
                model_path="m", max_model_len=64, base_url="http://localhost/v1", api_key_env="NO_KEY"
            ),
            ConfigError,
            "environment variable NO_KEY, which is not set",
        ),
    ],
)
def test_auxiliary_models_are_checked_before_anything_is_loaded(arguments, tmp_path, auxiliary, kind, words):
    with pytest.raises(kind) as raised:
        tune(**arguments, auxiliary_models={"judge": auxiliary})
    assert words in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_holding_out_is_said(arguments, capsys):
    arguments["settings"] |= {"evaluation.before_and_after": False}
    arguments["train_dataset"] = DatasetConfig(path=arguments["train_dataset"].path, total_steps=1)
    arguments["algorithm"] = AlgorithmConfig(group_size=2, batch_size=1)
    result = tune(**arguments)
    assert "no eval_dataset: 4 of 40 tasks are held out" in capsys.readouterr().out
    assert result.steps == 1


def test_model_without_a_chat_template(arguments, bare_model_dir):
    arguments["model"] = TunerModelConfig(model_path=str(bare_model_dir), max_model_len=64)
    with pytest.raises(ModelError, match="chat template"):
        tune(**arguments)


def test_missing_field_stops_the_run_and_names_it(arguments):
    async def reads(task, model):
        return WorkflowOutput(reward=float(task["quesiton"]))

    arguments["workflow_func"] = reads
    with pytest.raises(DatasetError, match=r"no field 'quesiton' \(did you mean 'question'\?\)"):
        tune(**arguments)


def test_every_reward_the_same_stops_where_asked(arguments):
    from sharpen.errors import NoSignalError

    arguments["settings"] |= {"check.stop_without_signal": True, "evaluation.before_and_after": False}
    with pytest.raises(NoSignalError, match="in no task did the rewards of answered rollouts differ"):
        tune(**arguments)


def test_a_script_ends_with_one_error_and_not_with_what_led_to_it(arguments, tmp_path):
    """Red when `tune` lets go up what it caught: a root that is a file was two tracebacks, of eight frames."""
    (tmp_path / "root").touch()
    settings = {**arguments.pop("settings", {}), "checkpoint_root_dir": str(tmp_path / "root")}
    with pytest.raises(ConfigError, match="checkpoint_root_dir") as error:
        tune(**arguments, settings=settings)
    printed = traceback.format_exception(error.value)
    assert [line for line in printed if line.startswith("Traceback")] == printed[:1]
    assert len(traceback.extract_tb(error.value.__traceback__)) == 2
