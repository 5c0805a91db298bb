"""What the certificate does not see yet, and that everyone is told so where the claim is made."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.show.view.data.run import updates_sentence

ROOT = Path(__file__).parents[3]
CLAIM = re.compile(r"comput\w+ (?:once more|twice|again) from (?:the|its|their) record", re.IGNORECASE)


async def prefers_letter(task: Any, model: Any) -> WorkflowOutput:
    """The reward is the share of the letter 'e' in the answer."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def negated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Turn every gradient around, after the backward pass and before the update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.neg_()


def test_an_update_in_the_wrong_direction_is_certified(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> None:
    """This is the gap that the pages name: of a run that is too short, no step is made once more beside it. Made once
    more afterwards, the updates of both steps, between which no checkpoint was saved, show it."""
    hook = register_optimizer_step_pre_hook(negated)
    try:
        result = tune(
            workflow_func=prefers_letter,
            train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
            algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=2e-2),
            settings={
                "checkpoint_root_dir": str(tmp_path),
                "check.enabled": False,
                "evaluation.before_and_after": False,
            },
        )
    finally:
        hook.remove()
    found = certify(result.run_dir)
    assert found.holds
    assert any("optimizer's updates of 2 steps" in line for line in found.lines())
    assert any("which took only" in line for line in found.lines())
    (problem,) = retrain(result.run_dir).problems
    assert "steps 1 to 2" in problem


def test_who_claims_says_what_is_not_recomputed() -> None:
    """In the same paragraph, row or line. Red where a page or a template says that a step is computed once more,
    and not that its update is not."""
    texts = [ROOT / "README.md"]
    for place, kinds in (("docs", {".md"}), ("examples", {".md"}), ("src", {".py", ".md", ".html"})):
        texts += [path for path in (ROOT / place).rglob("*") if path.suffix in kinds]
    claims = {}
    for path in texts:
        for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", path.read_text(encoding="utf-8")):
            words = " ".join(paragraph.split())
            if CLAIM.search(words):
                claims[str(path.relative_to(ROOT))] = words
    assert {"README.md", "docs/understand/trust.md", "docs/understand/certificate.md"} < set(claims)
    assert len(claims) >= 6, "templates claim it too"
    says = ("optimizer's update", "soundness.updates", "sound.updates")  # the sentence that the templates are given
    assert [place for place, words in claims.items() if not any(one in words for one in says)] == []


def test_pages_say_which_updates_were_made_once_more() -> None:
    some = {"steps": 40, "repeated": [{"first": 1, "last": 1}, {"first": 39, "last": 40}]}
    assert updates_sentence(some) == (
        "The optimizer's updates of steps 1, 39 to 40 were made once more by other code, and every weight compared; "
        "those of the other 37 were not (sharpen certify --retrain does it)."
    )
    assert updates_sentence(some | {"steps": 3}).endswith("every weight compared.")
    for damaged in (
        {},
        {"repeated": 7},
        {"repeated": [{"first": 1, "last": "x"}]},
        {"repeated": [{"first": 0, "last": 1e9}]},
    ):
        assert updates_sentence(damaged).startswith("The optimizer's update itself is not")


def test_the_page_of_faults_is_the_tables_of_the_tests() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_faults.py"))["page"]()
    assert (ROOT / "docs" / "understand" / "faults.md").read_text() == page, "run: python docs/make_faults.py"
    assert len(re.findall(r"^- |; ", page, re.MULTILINE)) > 190
