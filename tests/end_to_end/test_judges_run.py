"""Judges that ask an auxiliary model through a whole run: by a rubric, and for each group, one of whose verdicts is
prose."""

import json
from pathlib import Path

from judge_endpoint import asked, serving

from sharpen import (
    AlgorithmConfig,
    AuxiliaryModelConfig,
    Criterion,
    DatasetConfig,
    JudgeModel,
    RubricJudge,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.types import Outcome

RELATIVE = """
from sharpen import JudgeModel, RelativeJudge

relative = RelativeJudge(model=JudgeModel(name="grader"), reason=False)
"""


async def letters(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(response=reply.choices[0].message.content or "")


def verdict(body):
    """Grades by the letter e; the first group that is compared gets prose."""
    content = asked(body)
    if "answer" in content:
        return json.dumps({"es": min(10, content["answer"].count("e"))})
    if verdict.groups == 0:
        verdict.groups += 1
        return "I like them all."
    return json.dumps({name: min(10, text.count("e")) for name, text in content["answers"].items()})


def test_a_group_without_a_verdict_does_not_train_and_the_rest_is_certified(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path
):
    verdict.groups = 0
    with serving() as endpoint:
        endpoint.answer = verdict
        (tmp_path / "judges_of_run.py").write_text(RELATIVE)
        found = tune(
            letters,
            judge_func=RubricJudge(
                model=JudgeModel(name="grader"), criteria=[Criterion(name="es", description="e")], reason=False
            ),
            auxiliary_models={"grader": AuxiliaryModelConfig(model_path="m", max_model_len=64, base_url=endpoint.url)},
            train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=96),
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=3, learning_rate=1e-3),
            settings={
                "checkpoint_root_dir": str(tmp_path / "runs"),
                "evaluation.before_and_after": False,
                "check.enabled": False,
                "rollout.max_excluded_share": 0.5,
                "sampling.operators": [{"name": f"{tmp_path / 'judges_of_run.py'}:relative"}],
            },
        )
    steps = [group for group in read_groups(found.run_dir / "run.db") if group.id.startswith("step_")]
    failed = [group for group in steps if group.rollouts[0].outcome == Outcome.JUDGE_ERROR]
    assert len(failed) == 1
    assert all(one.reward is None and "I like them all." in (one.error or "") for one in failed[0].rollouts)
    others = [one for group in steps if group is not failed[0] for one in group.rollouts]
    assert {one.outcome for one in others} == {Outcome.OK}
    assert all("judge/es" in one.metrics and "judge/relative_tokens" in one.metrics for one in others)
    trained = {call.rollout_id for call in read_trained(found.run_dir / "run.db")}
    assert trained
    assert not trained & {one.id for one in failed[0].rollouts}
    assert not certify(found.run_dir).problems
    metrics = [json.loads(line) for line in (found.run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [row.get("rollout/failures/judge_error", 0.0) for row in metrics]
    assert sum(counted) == 4.0
