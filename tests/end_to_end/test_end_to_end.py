"""The whole line on a toy model: rewards rise, checkpoints reload, a run resumes."""

import json
from pathlib import Path

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups

STEPS = 8
"""Of the runs that learn: the reward is near its most by then."""
QUIET = {"evaluation.before_and_after": False, "check.enabled": False, "certificate.retrain": "off"}
"""Nothing but the steps, for tests of those."""


async def prefers_letter(task, model):
    """One call; the reward is the share of the letter 'e' in the answer, something a random model can learn quickly."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8, stop=["\n\n"]
    )
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=text.count("e") / 8, metrics={"length": len(text)})


def run(folder: Path, model: Path, dataset: Path, **options):
    settings = {
        "checkpoint_root_dir": str(folder),
        "loss.kl": "none",
        "rollout.failure_reward": 0.0,
        **options.pop("settings", {}),
    }
    steps = options.pop("steps", STEPS)
    return tune(
        workflow_func=options.pop("workflow_func", prefers_letter),
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=4, learning_rate=4e-2),
        settings=settings,
        **options,
    )


def test_reward_rises_and_everything_is_left_in_the_run_directory(tmp_path, toy_model_dir, toy_dataset, capsys):
    result = run(tmp_path, toy_model_dir, toy_dataset)
    before = sum(result.rewards_before.sampled.values())
    after = sum(result.rewards_after.sampled.values())
    assert after > before + 3.0, (before, after)
    for name in ("config.yaml", "resolved.json", "run.db", "metrics.jsonl", "summary.json", "reward_curve.png"):
        assert (result.run_dir / name).stat().st_size > 0, name
    assert list((result.run_dir / "monitor" / "tensorboard").iterdir())
    assert result.model_dir.name == f"global_step_{STEPS}"
    assert result.after["sampled"].accuracy == pytest.approx(after / 10)
    assert result.after["greedy"].num_tasks == 10
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert set(summary["after"]["greedy"]) == {"accuracy", "low", "high", "num_tasks"}
    assert summary["steps"] == STEPS
    assert summary["rollouts"] == STEPS * 4 * 8
    *printed, verdict, used, last = capsys.readouterr().out.splitlines()
    assert any("tool calls hermes (found in the chat template)" in line for line in printed)
    assert any("vllm serve" in line and "--tool-call-parser hermes" in line for line in printed)
    assert last == f"run directory: {result.run_dir}"
    assert verdict.startswith("verdict: better by +")
    assert used == f"use:     {result.model_dir}"
    assert (result.verdict.kind, result.verdict.model) == ("better", str(result.model_dir))
    assert (summary["verdict"]["kind"], summary["verdict"]["model"]) == ("better", str(result.model_dir))
    assert result.best_model_dir == result.model_dir
    what_the_agent_did_is_kept(result.run_dir, capsys)


def what_the_agent_did_is_kept(run_dir, capsys):
    """The check and both evaluations, in a file of their own: `run.db`, and so the certificate, has none of it."""
    kept = [group.id for group in read_groups(run_dir / "evaluations.db")]
    expected = [
        f"{when}/held-out/{mode}/test/{task}"
        for when in ("before", "after")
        for mode in ("greedy", "sampled")
        for task in range(10)
    ]
    checked = [id_ for id_ in kept if id_.startswith("check/")]
    assert kept == [*checked, *expected]
    assert len(checked) == 4
    assert all(group.rollouts[0].calls for group in read_groups(run_dir / "evaluations.db"))
    assert {group.id.split("/")[0] for group in read_groups(run_dir / "run.db")} == {
        f"step_{n}" for n in range(1, STEPS + 1)
    }
    assert certify(run_dir, logprobs=False).holds
    for mode in ("sampled", "greedy"):
        assert main(["show", str(run_dir), "--task", "3", "--mode", mode]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"before/held-out/{mode}/test/3")
        before, after = shown.split("=== BEFORE ===")[1].split("=== AFTER ===")
        assert f"rollout before/held-out/{mode}/test/3/0" in before
        assert f"rollout after/held-out/{mode}/test/3/0" in after
        for part in (before, after):
            assert "question 3" in part
            assert "workflow/length" in part
            assert ("no loss (an evaluation)" if mode == "sampled" else "no loss (temperature 0)") in part
        assert max(map(len, shown.splitlines())) <= 100
    assert main(["show", str(run_dir), "--rollout", "after/held-out/sampled/test/3/0"]) == 0
    assert "question 3" in capsys.readouterr().out


def test_a_run_that_made_the_model_worse_says_so_and_offers_the_original(tmp_path, toy_model_dir, toy_dataset, capsys):
    """Held-out tasks ask for few of the letter that the training rewards: a random model does well there, a trained one
    does not.

    Red on the code before: the last checkpoint was offered, and was `best`, though worse than the start."""
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"question {i}", "split": name} for i in range(10)]
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    async def misled(task, model):
        output = await prefers_letter(task, model)
        return output if task["split"] == "train" else WorkflowOutput(reward=1.0 - output.reward)

    settings = {"certificate.retrain": "off", "check.enabled": False}
    result = run(tmp_path, toy_model_dir, tmp_path / "data", workflow_func=misled, settings=settings)
    assert (result.verdict.kind, result.verdict.original) == ("worse", True)
    assert result.verdict.high < 0.0
    assert result.verdict.model == str(toy_model_dir)
    assert result.best_model_dir == toy_model_dir
    assert not (result.run_dir / "best").exists()
    assert json.loads((result.run_dir / "summary.json").read_text())["verdict"]["kind"] == "worse"
    text = capsys.readouterr().out
    assert f'from_pretrained("{toy_model_dir}")' in text
    assert f"global_step_{STEPS}{chr(34)}" not in text
    assert "verdict: worse by" in text
    assert "Keep the original" in text


def test_interrupted_run_continues_where_it_was(tmp_path, toy_model_dir, toy_dataset):
    calls = 0

    async def interrupting(task, model):
        nonlocal calls
        calls += 1
        if calls == 4 * 8 * 2 + 5:
            import _thread

            _thread.interrupt_main()
        return await prefers_letter(task, model)

    options = {"project_name": "P", "experiment_name": "fixed"}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_model_dir, toy_dataset, workflow_func=interrupting, settings=QUIET, steps=4, **options)
    assert (tmp_path / "P" / "fixed" / "latest" / "config.json").exists()
    assert json.loads((tmp_path / "P" / "fixed" / "summary.json").read_text())["error"]["kind"] == "KeyboardInterrupt"
    result = run(tmp_path, toy_model_dir, toy_dataset, settings=QUIET, steps=4, **options)
    steps = [json.loads(line)["step"] for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert result.steps == 4


def test_works_where_an_event_loop_runs_already(tmp_path, toy_model_dir, toy_dataset):
    """As in a notebook: `tune()` is called from a coroutine."""
    import asyncio

    async def cell():
        return run(tmp_path, toy_model_dir, toy_dataset, steps=1, settings=QUIET)

    assert asyncio.run(cell()).steps == 1


def test_reloaded_checkpoint_reproduces_after(tmp_path, toy_model_dir, toy_dataset):
    """Plain transformers, greedy, on the checkpoint gives the rewards that the run reports as `after`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {"check.enabled": False, "certificate.retrain": "off"}
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=4, settings=settings)
    assert any(result.rewards_after.greedy.values()), "all 0 would say little"
    model = AutoModelForCausalLM.from_pretrained(result.model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    for i, reward in enumerate(result.rewards_after.greedy[f"test/{i}"] for i in range(10)):
        messages = [{"role": "user", "content": f"question {i}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text.split("\n\n")[0].count("e") / 8 == reward


def test_time_limit_ends_the_run_with_a_checkpoint(tmp_path, toy_model_dir, toy_dataset):
    """Every session trains a step, however short its time. Red when the limit is looked at before the first one."""
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=50, settings={**QUIET, "time_limit_s": 1e-6})
    assert result.steps == 1
    assert (result.model_dir / "config.json").exists()


def test_trap_25_two_deterministic_runs_are_bitwise_equal(tmp_path, toy_model_dir, toy_dataset):
    """Red when `noise_seed` (runner.py) mixes in anything that differs between runs, say `time.time()`.

    The second run answers in another order: its workflows start after random pauses.
    """
    import asyncio
    import random

    async def hesitates(task, model):
        await asyncio.sleep(random.random() * 0.02)
        return await prefers_letter(task, model)

    settings = {**QUIET, "deterministic": True}
    weights = []
    for number, workflow in enumerate((prefers_letter, hesitates)):
        folder = tmp_path / str(number)
        result = run(folder, toy_model_dir, toy_dataset, steps=2, settings=settings, workflow_func=workflow)
        weights.append((result.model_dir / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def shortened(dataset: Path, folder: Path) -> Path:
    """A copy of the dataset, under the same names, with one row to evaluate on."""
    folder.mkdir()
    for file in dataset.glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        (folder / file.name).write_text("".join(lines[:1] if file.stem == "test" else lines))
    return folder


def test_a_finished_run_that_goes_on_is_evaluated_again(tmp_path, toy_model_dir, toy_dataset):
    """Red when `_record` (loop.py) keeps `progress.after`: the table would show the weights of the first session.

    With another seed, or other rows, it does not go on: red without `check_same_run`. Its certificate holds over a
    change that is allowed.
    """
    options = {"project_name": "P", "experiment_name": "longer"}
    settings = {"check.enabled": False, "certificate.retrain": "off"}
    first = run(tmp_path, toy_model_dir, toy_dataset, steps=1, settings=settings, **options)
    with pytest.raises(ConfigError, match=r"'longer' exists, .*\n  - seed: 0 -> 1\n"):
        run(tmp_path, toy_model_dir, toy_dataset, steps=1, settings={"seed": 1}, **options)
    with pytest.raises(ConfigError, match=r"what held_out holds: 10 rows .* -> 1 rows"):
        run(tmp_path, toy_model_dir, shortened(toy_dataset, tmp_path / "shorter"), steps=1, **options)
    settings |= {"trainer.warmup_steps": 1}
    second = run(tmp_path, toy_model_dir, toy_dataset, steps=2, settings=settings, **options)
    lines = [json.loads(line) for line in (second.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/greedy/accuracy" in line] == [0, 1, 2]
    assert second.rewards_before == first.rewards_before
    assert second.model_dir.name == "global_step_2"
    assert (second.run_dir / "resolved.until_step_1.json").exists()
    assert certify(second.run_dir, logprobs=False).holds
