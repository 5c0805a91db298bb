"""What `sharpen init --from agentscope` writes runs where AgentScope 2 is installed."""

from pathlib import Path

from starter_checks import check_starter


def test_the_folder_trains_a_step(tmp_path: Path, toy_model_dir: Path) -> None:
    agent = check_starter(tmp_path, toy_model_dir)
    assert "UserMsg" in agent
