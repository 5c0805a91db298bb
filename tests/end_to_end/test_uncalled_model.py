"""An agent with a client of its own never calls the model that is trained: `run`, `check` and `eval` fail."""

from pathlib import Path

import pytest

from sharpen.cli.main import main

AGENT = """
from sharpen import WorkflowOutput

rewards = iter(range(1000))

async def answer(task, model):  # as one with `openai.AsyncOpenAI()` would
    return WorkflowOutput(reward=float(next(rewards) % 2))
"""


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_it_fails_and_one_sentence_says_what_to_change(command, tmp_path: Path, toy_model_dir, toy_dataset, capsys):
    """Red when `check_first` lets the run go on: it trained nothing to its end, with exit code 0."""
    (tmp_path / "agent.py").write_text(AGENT)
    config = tmp_path / "run.yaml"
    config.write_text(
        "workflow: agent.py:answer\n"
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 1}}\n"
        f"eval_dataset: {{path: {toy_dataset}, split: test}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
        "algorithm: {group_size: 2, batch_size: 2}\n"
    )
    assert main([command, "--config", str(config)]) == 1
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "base_url=model.base_url" in text
    if command == "eval":
        assert "no result: greedy: 10 of 10 rollouts made no model call" in text
    else:
        assert "no rollout called the model that is trained: make the agent's client of" in text
        assert "0 of 4 tasks with differing rewards" in text
