"""Data-Juicer's operators on tasks and rollouts, by a package of its interface; and what is missing, said at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_juicer_stand_in import write_stand_in

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.operators.data_juicer import rows as data_juicer
from sharpen.agent.operators.pipeline import ON_ROLLOUTS, ON_TASKS, Pipeline
from sharpen.config.run import OperatorConfig
from sharpen.errors import ConfigError, OperatorError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Sampling, Task

OURS = ("data_juicer", "loguru")


@pytest.fixture
def package(tmp_path: Path) -> Iterator[None]:
    """Data-Juicer's interface, importable."""
    write_stand_in(tmp_path)
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    data_juicer._load.cache_clear()


def pipeline(known: Any, *operators: Any, **args: Any) -> Pipeline:
    if operators:
        args["operators"] = list(operators)
    return Pipeline.of([OperatorConfig(name="data_juicer", args=args)], known)


def tasks(*rows: dict[str, Any]) -> list[Task]:
    return [Task(id=f"train/{index}", index=index, row=row) for index, row in enumerate(rows)]


def rollout(index: int, reward: float | None, *answers: str) -> Rollout:
    one = np.zeros(1, np.int32)
    calls = tuple(
        Call(
            index=place,
            parent=None,
            prompt_ids_P=one,
            sampled_ids_S=one,
            logprobs_S=one.astype(np.float32),
            versions_S=one,
            sampling=Sampling(),
            finish_reason="stop",
            status=CallStatus.USED,
            messages=(
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
            ),
            tools=(),
            response={"role": "assistant", "content": text},
        )
        for place, text in enumerate(answers)
    )
    return Rollout(
        id=f"g/{index}",
        group_id="g",
        task_id="g",
        index=index,
        attempt=0,
        calls=calls,
        outcome=Outcome.TIMEOUT if reward is None else Outcome.OK,
        reward=reward,
        metrics={"judge/right": 1.0},
    )


def group(*rollouts: Rollout) -> Group:
    return Group(id="g", task=tasks({})[0], version=0, rollouts=rollouts)


@pytest.mark.usefixtures("package")
def test_filters_drop_tasks_mappers_change_fields_and_statistics_become_fields():
    rows = tasks({"question": "SHORT", "n": 1}, {"question": "Much LONGER", "n": 2, "level": {"of": None}})
    both = pipeline(ON_TASKS, {"text_length_filter": {"min_len": 6}}, {"lower_case_mapper": None}, text_key="question")
    (left,) = both.on_tasks(rows)
    assert left.id == "train/1"
    assert dict(left.row) == {"question": "much longer", "n": 2, "level": {"of": None}, "text_len": 11}
    (kept, _) = pipeline(ON_TASKS, {"quality_filter": {"text_key": "question"}}).on_tasks(rows)
    assert dict(kept.row) == {**rows[0].row, "llm_quality_score": 0.5, "llm_quality_record": "fine"}


@pytest.mark.usefixtures("package")
def test_filters_drop_rollouts_and_numbers_become_their_metrics():
    given = group(rollout(0, 1.0, "a long", "answer"), rollout(1, 0.0, "short"), rollout(2, None, "late, but long"))
    (found,) = pipeline(ON_ROLLOUTS, {"text_length_filter": {"min_len": 6}}, {"quality_filter": {}}).on_groups([given])
    long, short, failed = found.rollouts
    assert long.metrics == {"judge/right": 1.0, "text_len": 14.0, "llm_quality_score": 1.4}  # both, and an empty line
    assert (short.outcome, short.reward) == (Outcome.FILTERED, 0.0)
    assert short.error is not None
    assert "text_length_filter" in short.error
    assert failed is given.rollouts[2]  # it takes no part


@pytest.mark.usefixtures("package")
def test_rewards_are_shaped_by_what_it_computed():
    configs = [
        OperatorConfig(name="data_juicer", args={"operators": [{"quality_filter": {"text_key": "prompt_text"}}]}),
        OperatorConfig(
            name="reward_shaping_mapper",
            args={"reward_shaping_configs": [{"stats_key": "llm_quality_score", "op_type": "ADD", "weight": 0.5}]},
        ),
    ]
    (found,) = Pipeline.of(configs, ON_ROLLOUTS).on_groups([group(rollout(0, 1.0, "x"))])
    assert found.rollouts[0].reward == 1.0 + 0.5 * len("Be brief.\n\nHello?") / 10
    (found,) = pipeline(ON_ROLLOUTS, {"reward_mapper": {}}).on_groups([group(rollout(0, 1.0, "x"))])
    assert (found.rollouts[0].reward, found.rollouts[0].metrics["reward_before"]) == (0.25, 1.0)


@pytest.mark.usefixtures("package")
def test_what_happened_cannot_be_changed_and_rows_of_its_own_are_nobody_s():
    with pytest.raises(OperatorError, match="changed response_text of rollout 'g/0'"):
        pipeline(ON_ROLLOUTS, {"lower_case_mapper": {}}).on_groups([group(rollout(0, 1.0, "LOUD"))])
    with pytest.raises(OperatorError, match="twice_mapper made rows of their own"):
        pipeline(ON_TASKS, {"twice_mapper": {}}).on_tasks(tasks({"text": "a"}))


@pytest.mark.usefixtures("package")
def test_a_recipe_file_names_the_operators(tmp_path, caplog):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "project_name: p\nnp: 8\ntext_keys: [question, answer]\nprocess: [{text_length_filter: {min_len: 3}}]"
    )
    with caplog.at_level("INFO", logger="sharpen.operators"):
        found = pipeline(ON_TASKS, config_path=str(path)).on_tasks(tasks({"question": "ab"}, {"question": "abc"}))
    assert [one.id for one in found] == ["train/1"]
    assert "np, project_name" in caplog.text


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, ("operators or config_path",)),
        ({"operators": [{"quality_filter": {}}], "config_path": "x.yaml"}, ("give one of them",)),
        ({"operators": []}, ("at least one",)),
        ({"operators": ["quality_filter"]}, ("{name: arguments}", "'quality_filter'")),
        ({"operators": [{"quality_filtre": {}}]}, ("'quality_filtre'", "did you mean 'quality_filter'?")),
        ({"operators": [{"service_mapper": {}}]}, ("service_mapper", "no server at http://localhost:7070")),
        ({"operators": [{"lazy_mapper": {}}]}, ("lazy_mapper", "not installed: pip install ray")),
        ({"config_path": "none.yaml"}, ("no recipe none.yaml",)),
        ({"operators": [{"quality_filter": {}}], "rows": 3}, ("does not take the arguments", "rows")),
    ],
)
def test_what_is_wrong_is_said_before_a_run(args, words):
    with pytest.raises(ConfigError) as error:
        pipeline(ON_ROLLOUTS, **args)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("text", "word"), [("process: 3", "no list 'process'"), ("process: [", "no YAML")])
def test_a_recipe_that_is_none_is_named(tmp_path, text, word):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=word):
        pipeline(ON_TASKS, config_path=str(tmp_path / "r.yaml"))


def test_a_missing_package_key_and_service_are_one_message(monkeypatch):
    for name in ("OPENAI_API_KEY", "DASHSCOPE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    annotated: dict[str, Any] = {"human_preference_annotation_mapper": {"api_url": "http://localhost:7070"}}
    with pytest.raises(ConfigError) as error:
        pipeline(ON_TASKS, {"llm_difficulty_score_filter": {"api_or_hf_model": "qwen2.5-7b-instruct"}}, annotated)
    for words in (
        "pip install py-data-juicer",
        "llm_difficulty_score_filter asks qwen2.5-7b-instruct",
        "OPENAI_API_KEY and DASHSCOPE_API_KEY are not set",
        "human_preference_annotation_mapper needs Label Studio",
        "pip install label-studio label-studio-sdk",
    ):
        assert words in str(error.value)
    monkeypatch.setenv("DASHSCOPE_API_KEY", "x")
    with pytest.raises(ConfigError) as error:
        pipeline(ON_TASKS, {"llm_difficulty_score_filter": {"api_or_hf_model": "q"}}, {"llm_x": {"is_hf_model": True}})
    assert "API_KEY" not in str(error.value)


async def letters(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 6)


@pytest.mark.usefixtures("package")
def test_what_it_measures_shapes_rewards_that_the_certificate_confirms(tmp_path, toy_model_dir, toy_dataset):
    shaping = [{"stats_key": "text_len", "op_type": "SUB", "weight": 0.01}]
    found = tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=96),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "evaluation.before_and_after": False,
            "sampling.operators": [
                {"name": "data_juicer", "args": {"operators": [{"text_length_filter": {}}]}},
                {"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": shaping}},
            ],
        },
    )
    rollouts = [one for group in read_groups(found.run_dir / "run.db") for one in group.rollouts]
    assert len(rollouts) == 8
    for one in rollouts:
        assert one.metrics["text_len"] == len(one.calls[0].response["content"] or "")
        assert one.reward == pytest.approx(
            one.metrics.get("reward_before", one.reward) - 0.01 * one.metrics["text_len"]
        )
    assert not certify(found.run_dir).problems
