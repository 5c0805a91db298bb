"""The whole line with a model as judge: `tune()` on a toy, and what a failing or used-up judge does to a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_endpoint import FakeEndpoint, completion, failure

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.config.load import resolve
from sharpen.errors import RolloutError, TokenCapError
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.run.evaluation import evaluate


async def workflow(task: Any, model: Any) -> WorkflowOutput:
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(response=reply.choices[0].message.content or "")


async def judge(task: Any, response: str, auxiliary_models: Any) -> float:
    """The auxiliary model's answer to the answer; a real judge would ask for a score."""
    grader = auxiliary_models["grader"]
    reply = await grader.client.chat.completions.create(
        model=grader.name, messages=[{"role": "user", "content": f"Grade: {response}"}]
    )
    return (reply.choices[0].message.content or "").count("e") / 8


def run(tmp_path: Path, model: Path, dataset: Path, grader: dict[str, Any], **options: Any) -> Any:
    settings = {
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "loss.kl": "none",
        "evaluation.before_and_after": False,
        "check.enabled": False,
        "auxiliary_models": {"grader": {"max_model_len": 128, **grader}},
        **options.pop("settings", {}),
    }
    return tune(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(dataset), total_steps=options.pop("steps", 2)),
        model=TunerModelConfig(model_path=str(model), max_model_len=64, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2),
        project_name="P",
        experiment_name="judged",
        settings=settings,
        **options,
    )


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_local_judge_scores_is_counted_and_is_never_trained(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path
) -> None:
    result = run(tmp_path, toy_model_dir, toy_dataset, {"model_path": str(toy_model_dir), "max_tokens": 8})
    first, second = metrics(result.run_dir)
    for step in (first, second):
        assert step["auxiliary/grader/calls"] == 1.0
        assert step["auxiliary/grader/calls_total"] == 8.0
        assert step["auxiliary/grader/tokens_total"] == 8 * step["auxiliary/grader/tokens"] > 8 * 10
        assert step["rollout/calls"] == 1.0
    assert second["auxiliary/grader/tokens_run"] == (
        first["auxiliary/grader/tokens_total"] + second["auxiliary/grader/tokens_total"]
    )
    groups = list(read_groups(result.run_dir / "run.db"))
    calls = [call for group in groups for rollout in group.rollouts for call in rollout.calls]
    assert len(calls) == 16
    assert all(call.messages[0]["content"].startswith("question") for call in calls)
    trained = read_trained(result.run_dir / "run.db")
    assert {call.call for call in trained} <= {0}
    assert [rollout.metrics["auxiliary/grader/calls"] for group in groups for rollout in group.rollouts] == [1.0] * 16


def test_a_cap_stops_the_run_with_what_was_trained_saved_and_holds_after_a_resume(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, endpoint: FakeEndpoint
) -> None:
    """Each judgement is 10 tokens, so that the cap is met by the 13th call, in the second step."""
    endpoint.answer = lambda body: completion("e" * (len(body["messages"][0]["content"]) % 3), prompt=6, sampled=4)
    grader = {"model_path": "m", "base_url": endpoint.url, "max_total_tokens": 120}
    quiet = {"rollout.max_concurrent_rollouts": 1}
    with pytest.raises(TokenCapError, match=r"'grader' \(m\) has used 120 tokens.*max_total_tokens is 120"):
        run(tmp_path, toy_model_dir, toy_dataset, grader, settings=quiet)
    folder = tmp_path / "runs" / "P" / "judged"
    assert [step["step"] for step in metrics(folder)] == [1]
    assert (folder / "latest" / "config.json").exists()
    assert len(endpoint.bodies) == 12
    with pytest.raises(TokenCapError, match="has used 120 tokens"):
        run(tmp_path, toy_model_dir, toy_dataset, grader, settings=quiet)
    assert len(endpoint.bodies) == 12
    raised = {**grader, "max_total_tokens": 280}
    assert run(tmp_path, toy_model_dir, toy_dataset, raised, settings=quiet).steps == 2
    assert metrics(folder)[-1]["auxiliary/grader/tokens_run"] == 200.0


def test_an_endpoint_that_fails_is_no_reward(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer = lambda body: failure(401)
    grader = {"model_path": "m", "base_url": endpoint.url}
    with pytest.raises(RolloutError, match="8 of 8 rollouts have no reward") as caught:
        run(tmp_path, toy_model_dir, toy_dataset, grader)
    assert "8 x judge_error" in str(caught.value)


def test_evaluating_an_endpoint_has_its_judge_too(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer = lambda body: completion("e" * 8 if body["messages"][0]["content"].startswith("Grade") else "yes")
    resolved = resolve(
        {
            "train_dataset": {"path": str(toy_dataset), "split": "test"},
            "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
            "auxiliary_models": {"grader": {"model_path": "m", "base_url": endpoint.url, "max_model_len": 64}},
        }
    )
    where = {"base_url": endpoint.url, "model_name": "policy", "api_key": "k"}
    found = evaluate(resolved, workflow, judge, endpoint=where)
    assert set(found.sampled.values()) == {1.0}
    assert sorted({body["model"] for body in endpoint.bodies}) == ["m", "policy"]


def test_the_commands_exit_code_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Any) -> int:
        raise TokenCapError("the auxiliary model 'grader' (m) has used 120 tokens")

    assert main(["run", "--config", "run.yaml"], {"run": command}) == 1
    assert "has used 120 tokens" in capsys.readouterr().err
