"""Steps of a real run, made once more by the real process beside it."""

import json
import time
from contextlib import contextmanager

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sharpen import WorkflowOutput
from sharpen.config.load import resolve
from sharpen.errors import CertificateError
from sharpen.evidence.certificate.certificate import recorded_certificate, write_certificate
from sharpen.evidence.certificate.plain.beside import RepeatedBeside
from sharpen.run.assembly import gradients_at_the_end, open_loop
from sharpen.run.repeats import Repeats, Size


async def letters(task, model):
    """The reward is the share of the letter 'e' in the answer."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def turned_around(optimizer, *_):
    """Turn the gradients of matrices around, before the update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.dim() == 2:
                parameter.grad.neg_()


@contextmanager
def a_run(folder, model, dataset, *, steps=2, adapters=False, free=2, clock=time.perf_counter):
    """A run that waits for each step that is made once more."""
    settings = {
        "checkpoint_root_dir": str(folder),
        "name": "run",
        "train_dataset": {"path": str(dataset), "split": "train", "total_steps": steps},
        "model": {"model_path": str(model), "max_model_len": 128, "max_tokens": 8},
        "algorithm": {"group_size": 4, "batch_size": 4, "learning_rate": 2e-2},
        "check.enabled": False,
        "evaluation.before_and_after": False,
        **({"trainer.lora.rank": 4} if adapters else {}),
    }
    with open_loop(resolve(settings=settings), letters, None) as (loop, site):
        loop.repeats = Repeats(
            loop.trainer,
            loop.journal,
            site.directory.path,
            Size(num_weights=1, needed=1, free=free),
            checkpoint=site.directory.checkpoint,
            total_steps=steps,
            time_limit_s=None,
            stop=True,
            say=site.display.message,
            probe=lambda: gradients_at_the_end(site, loop.trainer),
            share=1_000.0,
            clock=clock,
        )
        yield loop, site.directory.path


def test_a_right_step_is_in_the_certificate_and_nothing_is_left_behind(tmp_path, toy_model_dir, toy_dataset):
    """With adapters, which begin at random. A run that goes on checks what it loads."""
    for steps, repeated in ((1, [1]), (2, [1, 2])):
        with a_run(tmp_path, toy_model_dir, toy_dataset, steps=steps, adapters=True) as (loop, run_dir):
            loop.run()
        found = recorded_certificate(run_dir)
        assert found.holds
        assert [step.last for step in found.repeated] == repeated
        assert all(step.share < 1 for step in found.repeated)
        assert not (run_dir / ".repeat").exists()
    write_certificate(run_dir, found)
    assert json.loads((run_dir / "certificate.json").read_text())["repeated"][0]["cosine"] == pytest.approx(1.0)


def test_a_wrong_step_ends_the_run_and_breaks_the_certificate(tmp_path, toy_model_dir, toy_dataset):
    hook = register_optimizer_step_pre_hook(turned_around)
    try:
        with (
            a_run(tmp_path, toy_model_dir, toy_dataset, steps=1) as (loop, run_dir),
            pytest.raises(CertificateError, match="step 1: the weights are not those that the updates make"),
        ):
            loop.run()
    finally:
        hook.remove()
    found = recorded_certificate(run_dir)
    assert not found.holds
    assert "furthest: model." in found.problems[-1]


@pytest.mark.parametrize("adapters", [False, True])
def test_where_memory_is_short_gradients_at_the_last_weights_are_compared(
    tmp_path, toy_model_dir, toy_dataset, adapters
):
    """Red for all weights when the model before training is compared with."""
    with a_run(tmp_path, toy_model_dir, toy_dataset, adapters=adapters, free=0, clock=hours) as (loop, run_dir):
        loop.run()
    (reason,) = recorded_certificate(run_dir).not_repeated
    assert "0.0 GiB were free. Gradients at the last weights: those of a plain loop in all tensors" in reason


def hours():
    return 10_000 * time.perf_counter()


def test_a_process_that_fails_says_why_and_one_that_is_not_wanted_ends(tmp_path):
    failed = RepeatedBeside(tmp_path, 1, None, tmp_path)
    assert failed.wait(60)
    (reason,) = failed.result().not_repeated
    assert "resolved.json" in reason
    unwanted = RepeatedBeside(tmp_path, 1, None, tmp_path)
    unwanted.close()
    assert unwanted.ended
