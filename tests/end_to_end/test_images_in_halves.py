"""Images in a run of two processes: an explorer shows them, a trainer that never met the agent trains on them."""

from pathlib import Path

import pytest
from picture_toys import draw, make_seeing_checkpoint

from sharpen.cli.main import main
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups

AGENT = """
from sharpen import WorkflowOutput

URLS = {urls!r}

async def look(task, model):
    part = {{"type": "image_url", "image_url": {{"url": URLS[len(task["question"]) % 2]}}}}
    messages = [{{"role": "user", "content": [part, {{"type": "text", "text": "?"}}]}}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in reply.choices[0].message.content or "") / 6)
"""


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_trainer_learns_from_the_images_that_an_explorer_collected_before(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, kind: str
) -> None:
    """Parity is checked at the same weights, or the trainer would stop."""
    pictures = [draw(1, 16, 24), draw(2, 16, 24)]
    folder = make_seeing_checkpoint(kind, tmp_path / "model", toy_model_dir)
    (tmp_path / "agent.py").write_text(AGENT.format(urls=[picture.data_url for picture in pictures]))
    config = tmp_path / "run.yaml"
    config.write_text(
        "workflow: agent.py:look\n"
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        "name: apart\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 2}}\n"
        f"model: {{model_path: {folder}, max_model_len: 96}}\n"
        "algorithm: {algorithm_type: grpo, group_size: 4, batch_size: 2, learning_rate: 0.01}\n"
        "evaluation: {before_and_after: false}\n"
        "certificate: {retrain: 'off'}\n"
    )
    for mode in ("explore", "train"):
        assert main(["run", "--config", str(config), "--set", f"mode={mode}"]) == 0
    run_dir = tmp_path / "runs" / "Sharpen" / "apart"
    seen = {
        span.picture
        for group in read_groups(run_dir / "run.db")
        for rollout in group.rollouts
        for call in rollout.calls
        for span in call.pictures
    }
    assert seen <= set(pictures)
    assert seen
    assert {path.name for path in (run_dir / "images").iterdir()} == {picture.sha256 for picture in seen}
    certificate = certify(run_dir)
    assert certificate.holds
    assert not certificate.problems
