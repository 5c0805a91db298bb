"""`tune_prompt()` with a scripted model that proposes: which prompt comes back, with which figures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from levels import INITIAL, judge, level_of, scripted, workflow, write

from sharpen import DatasetConfig, PromptTuneConfig, TunerModelConfig, WorkflowOutput, tune_prompt
from sharpen.errors import ConfigError, RolloutError

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["miprov2", "gepa"])
Figures = dict[str, float]


def tune(train: DatasetConfig, *levels: int, lm: Any = None, **changes: Any) -> tuple[str, Figures]:
    settings = {name: changes.pop(name) for name in list(changes) if name in PromptTuneConfig.model_fields}
    config = PromptTuneConfig(
        **{"lm_model_name": lm or scripted(*levels)[0], "eval_display_progress": False, **settings}
    )
    given = {"workflow": workflow, "init_system_prompt": INITIAL, "judge_func": judge, "config": config, **changes}
    return tune_prompt(train_dataset=train, **given)


@OPTIMIZERS
def test_the_best_prompt_is_returned_not_the_last_one(
    optimizer: str, train: DatasetConfig, held_out: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, figures = tune(train, 5, 8, 2, 1, 4, optimizer=optimizer, eval_dataset=held_out)
    assert prompt == "You are of level 8."
    assert (figures["before"], figures["after"], figures["num_tasks"]) == pytest.approx((0.3, 0.8, 30))
    assert figures["valset_improvement"] == pytest.approx(100 * 0.5 / 0.3)
    assert figures["difference"] == pytest.approx(0.5)
    assert 0.2 < figures["low"] < 0.5 < figures["high"] < 0.7
    assert figures["validation_after"] > figures["validation_before"]
    said = capsys.readouterr().out
    assert "better by +0.500" in said
    assert "held-out accuracy" in said
    assert prompt in said
    assert "test/4: 0.000 -> 1.000" in said  # the fifth row is the last one
    assert "test/5" not in said
    assert "Bootstrapping" not in said
    assert "Trial" not in said


@OPTIMIZERS
def test_a_seed_decides_everything(optimizer: str, train: DatasetConfig) -> None:
    def once(seed: int) -> tuple[Any, list[str]]:
        lm, engine = scripted(5, 8, 2, 1, 4)
        return tune(train, lm=lm, optimizer=optimizer, seed=seed), engine.asked

    assert once(0) == once(0)
    assert once(0) != once(1)


@OPTIMIZERS
def test_a_prompt_is_tried_on_a_task_once(optimizer: str, train: DatasetConfig) -> None:
    tried: Counter[Any] = Counter()

    async def counting(task: Any, system_prompt: str) -> WorkflowOutput:
        tried[system_prompt, task["n"]] += 1
        return await workflow(task, system_prompt)

    _, figures = tune(train, 5, 8, 2, workflow=counting, optimizer=optimizer)
    assert set(tried.values()) == {1}
    assert figures["num_prompts"] == len({prompt for prompt, _ in tried}) >= 3


@OPTIMIZERS
def test_failing_does_not_beat_negative_rewards(optimizer: str, train: DatasetConfig, held_out: DatasetConfig) -> None:
    """A failure counts as the worst result. Were it 0, the prompt that always fails would be best."""

    async def breaks(task: Any, system_prompt: str) -> WorkflowOutput:
        if level_of(system_prompt) == 9:
            raise ValueError("level 9 breaks")
        return WorkflowOutput(response=level_of(system_prompt))

    async def minus(task: Any, response: Any) -> float:
        return response - 10.0

    given = {"workflow": breaks, "judge_func": minus, "eval_dataset": held_out, "optimizer": optimizer}
    prompt, figures = tune(train, 9, 2, 5, **given)
    assert prompt == "You are of level 5."
    assert (figures["before"], figures["after"]) == (-7.0, -5.0)
    assert figures["valset_improvement"] == pytest.approx(100 * 2 / 7)  # a gain, though rewards are below 0


def test_a_server_that_is_away_says_nothing_of_a_prompt(
    train: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def away(task: Any, system_prompt: str) -> WorkflowOutput:
        if level_of(system_prompt) == 8 and task["n"] == 0:
            raise ConnectionError("away")
        return await workflow(task, system_prompt)

    prompt, _ = tune(train, 5, 8, 2, workflow=away)
    assert prompt == "You are of level 8."
    assert "1 of 16 tasks are left out" in capsys.readouterr().out


def test_a_prompt_that_is_worse_on_held_out_tasks_is_not_returned(
    train: DatasetConfig, held_out: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def overfitted(task: Any, system_prompt: str) -> WorkflowOutput:
        if level_of(system_prompt) > 3 and task["n"] >= 100:
            return WorkflowOutput(response="?")
        return await workflow(task, system_prompt)

    prompt, figures = tune(train, 5, 8, 2, workflow=overfitted, eval_dataset=held_out)
    assert prompt == INITIAL
    assert figures["difference"] == pytest.approx(-0.3)
    assert "worse" in capsys.readouterr().out


def test_where_no_prompt_is_better_the_initial_one_stays(train: DatasetConfig, held_out: DatasetConfig) -> None:
    prompt, figures = tune(train, 3, 2, 1, eval_dataset=held_out)
    assert prompt == INITIAL
    assert figures["valset_improvement"] == figures["difference"] == 0.0


def test_without_held_out_tasks_there_is_no_gain_to_tell(
    train: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    _, figures = tune(train, 8)
    assert figures.keys() == {"validation_before", "validation_after", "num_prompts"}
    assert "no eval_dataset" in capsys.readouterr().out
    _, figures = tune(train, 8, eval_dataset=train)
    assert "20 of 20 tasks of eval_dataset are in train_dataset" in capsys.readouterr().out


def test_only_the_best_prompt_is_evaluated_where_nobody_compares(train: DatasetConfig, held_out: DatasetConfig) -> None:
    _, figures = tune(train, 8, eval_dataset=held_out, compare_performance=False)
    assert figures["after"] == pytest.approx(0.8)
    assert not figures.keys() & {"before", "valset_improvement", "difference"}


def test_a_gain_over_nothing_is_infinite(train: DatasetConfig, held_out: DatasetConfig) -> None:
    _, figures = tune(train, 8, init_system_prompt="You are of level 0.", eval_dataset=held_out)
    assert figures["valset_improvement"] == math.inf


@OPTIMIZERS
def test_it_works_under_a_running_loop(optimizer: str, train: DatasetConfig) -> None:
    async def main() -> str:
        return tune(train, 5, 8, optimizer=optimizer)[0]

    assert asyncio.run(main()) == "You are of level 8."


@OPTIMIZERS
def test_a_size_of_ones_own(optimizer: str, train: DatasetConfig) -> None:
    lm, _ = scripted(*range(3, 10))
    own = {"optimization_level": None, "num_candidates": 2, "optimizer": optimizer}
    assert tune(train, lm=lm, **own)[1]["num_prompts"] <= 5


@OPTIMIZERS
@pytest.mark.parametrize(("num_tasks", "num_validation"), [(2, 1), (70, 56)])
def test_few_tasks_and_many(
    optimizer: str, num_tasks: int, num_validation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With more than 50 validation tasks MIPROv2 tries most prompts on a part of them, and takes none of these."""
    prompt, _ = tune(write(tmp_path / "some.jsonl", range(num_tasks)), 5, 10, 2, optimizer=optimizer)
    assert level_of(prompt) >= 3
    assert f"on all {num_validation} validation tasks" in capsys.readouterr().out


@OPTIMIZERS
def test_a_proposing_model_that_is_away_is_an_error(optimizer: str, train: DatasetConfig) -> None:
    lm, engine = scripted(5)
    engine.fails = True
    with pytest.raises(Exception, match="the proposing model is away"):
        tune(train, lm=lm, optimizer=optimizer)


@OPTIMIZERS
def test_a_prompt_under_which_the_output_is_bad_loses(optimizer: str, train: DatasetConfig) -> None:
    """The initial prompt has shown that the workflow can return what is wanted, so this is the prompt's failure."""

    tried: set[int] = set()

    async def forgets(task: Any, system_prompt: str) -> Any:
        tried.add(level_of(system_prompt))
        return None if level_of(system_prompt) == 10 else await workflow(task, system_prompt)

    prompt, _ = tune(train, 10, 9, 2, workflow=forgets, optimizer=optimizer)
    assert level_of(prompt) == 9
    assert 10 in tried  # and all its answers would have been right


def test_bad_output_of_the_initial_prompt_stops_before_anything_is_proposed(train: DatasetConfig) -> None:
    async def forgets(task: Any, system_prompt: str) -> Any:
        return None

    lm, engine = scripted(5)
    with pytest.raises(ConfigError, match="workflow_func `forgets` returned None"):
        tune(train, lm=lm, workflow=forgets)
    assert not engine.asked


def test_an_initial_prompt_without_any_result_stops_before_anything_is_proposed(train: DatasetConfig) -> None:
    async def broken(task: Any, system_prompt: str) -> Any:
        raise ValueError("no such tool")

    lm, engine = scripted(5)
    with pytest.raises(RolloutError, match=r"initial prompt gives no result.*no such tool"):
        tune(train, lm=lm, workflow=broken)
    assert not engine.asked


def test_gepa_reads_what_the_judge_noted_and_why_attempts_failed(train: DatasetConfig) -> None:
    async def breaks(task: Any, system_prompt: str) -> WorkflowOutput:
        if task["n"] % 10 == 6:
            raise ValueError("six is too much")
        return await workflow(task, system_prompt)

    lm, engine = scripted(4, 5, 6, 7)
    tune(train, lm=lm, workflow=breaks, optimizer="gepa")
    said = "\n".join(engine.asked)
    assert "Reward: 0. note: not a number" in said
    assert "Reward: 1. note: well done" in said
    assert "six is too much" in said


def test_mipro_sees_tasks_and_good_answers(train: DatasetConfig) -> None:
    lm, engine = scripted(4, 5)
    tune(train, lm=lm, workflow=workflow)
    said = "\n".join(engine.asked)
    assert '"question": "1 + 1?"' in said
    assert "Answer: 2" in said
    assert "Answer: ?" not in said


def test_the_initial_prompt_is_tried_to_the_letter(train: DatasetConfig) -> None:
    prompt = "\n    You are of level 3.\n        Indented.  \n"
    seen = set()

    async def noting(task: Any, system_prompt: str) -> WorkflowOutput:
        seen.add(system_prompt)
        return await workflow(task, system_prompt)

    assert tune(train, 2, workflow=noting, init_system_prompt=prompt)[0] == prompt
    assert seen == {prompt, "You are of level 2."}


def test_a_model_that_is_served_here(toy_model_dir: Path, train: DatasetConfig) -> None:
    async def served(task: Any, system_prompt: str, model: Any) -> WorkflowOutput:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": task["question"]}]
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        return WorkflowOutput(response=str(reply.usage.prompt_tokens))

    async def longer_is_better(task: Any, response: Any) -> float:
        return float(response)

    model = TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128)
    given = {"workflow": served, "judge_func": longer_is_better, "model": model}
    prompt, figures = tune(train, 5, 1000, 2, **given)
    assert prompt == "You are of level 1000."
    assert figures["validation_after"] > figures["validation_before"]


def test_a_script_as_agentscope_documents_it(tmp_path: Path, train: DatasetConfig) -> None:
    """Empty strings for the configuration and the split of a single file."""
    dataset = DatasetConfig(path=train.path, name="", split="")
    assert tune(dataset, 8, eval_dataset=write(tmp_path / "more.jsonl", range(50, 70)))[0] == "You are of level 8."
