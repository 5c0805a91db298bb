"""Updates of a run with `loss.echo`, made once more."""

from dataclasses import replace

import numpy as np
import pytest
from faulty_update import STEP, FaultyUpdate, make_run

from sharpen import WorkflowOutput
from sharpen.evidence.certificate.plain.retrain import retrain

ANSWER = [40, 41, 42]


async def two_turns(task, model):
    """Two calls, and three ids of the environment between them: one sequence if the first id that the random model
    says is a text."""

    async def ask(prompt, max_tokens):
        options = {"max_tokens": max_tokens, "extra_body": {"return_token_ids": True}}
        return (await model.client.completions.create(model=model.name, prompt=prompt, **options)).choices[0]

    first = await ask(task["question"], 1)
    second = await ask([*first.prompt_token_ids, *first.token_ids, *ANSWER], 6)
    return WorkflowOutput(reward=(first.text + second.text).count("e") / 12)


@pytest.fixture(scope="module")
def run(tmp_path_factory, toy_model_dir, toy_dataset):
    return make_run(
        tmp_path_factory.mktemp("run"), toy_model_dir, toy_dataset, workflow=two_turns, **{"loss.echo": 0.2}
    )


def test_both_steps_are_found_right(run):
    found = retrain(run)
    assert not found.problems
    assert not found.not_repeated
    assert [one.first for one in found.repeated] == [1, STEP]


def weighs(update, echo):
    loss = update.trainer._loss
    loss.algorithm = replace(loss.algorithm, echo=echo)


def hears(update, change):
    update.each(lambda one: replace(one, shown_T=change(one.shown_T)))


FAULTS = {
    "it is not trained": lambda update: weighs(update, None),
    "it weighs twice": lambda update: weighs(update, 0.4),
    "its first token is left out": lambda update: hears(update, lambda shown_T: shown_T & np.roll(shown_T, 1)),
    "the prompt is trained too": lambda update: update.each(lambda one: replace(one, shown_T=prompt_too(one))),
}


def prompt_too(one):
    return one.shown_T | ((one.calls_T == -1) & (np.arange(len(one.ids_T)) == 3))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, run, tmp_path):
    update = FaultyUpdate(run, tmp_path / "run")
    assert {tuple(one.ids_T[one.shown_T]) for batch in update.batches for one in batch} == {(), tuple(ANSWER)}
    FAULTS[fault](update)
    update.train()
    assert update.found().problems
