"""Several servers that learn, and one trainer, each with a folder of its own, as on machines that share no disk."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import forked, line_of, wait_for
from serve_client import KEY, Client, end

from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_steps

SERVERS = ("one", "two")
STEPS = 4


@pytest.fixture(
    params=[pytest.param("folder", marks=pytest.mark.slow), pytest.param("postgres", marks=pytest.mark.postgres)]
)
def exchange(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """CI has the database; what a folder does otherwise is in `test_serve_learning.py` and `test_two_processes.py`."""
    return str(tmp_path / "shared") if request.param == "folder" else request.getfixturevalue("postgres")


def of(machine: str, config: Path, exchange: str, *modes: str) -> list[str]:
    settings = (*modes, f"exchange={exchange}", f"checkpoint_root_dir={config.parent / machine}")
    return ["--config", str(config), *(part for setting in settings for part in ("--set", setting))]


def test_several_servers_feed_one_trainer_and_serve_its_weights(tmp_path: Path, toy_model_dir: Path, exchange: str):
    """Each session trains once, whichever server had it. The trainer is started by itself, or by the first server."""
    by_itself = exchange.startswith("postgresql")
    name = f"used-{tmp_path.name}"
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"name: {name}\n"
        f"train_dataset: {{path: sessions, total_steps: {STEPS}}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 96}}\n"
        "algorithm: {algorithm_type: grpo, group_size: 2, batch_size: 1, learning_rate: 0.01}\n"
    )
    with ExitStack() as stack:
        servers = []
        for machine in SERVERS:
            modes = ["mode=explore"] if by_itself or machine != SERVERS[0] else []
            arguments = ("serve", "--port", "0", "--api-key", KEY, *of(machine, config, exchange, *modes))
            servers.append(stack.enter_context(forked("-m", "sharpen.cli.main", *arguments)))
        clients = [Client(line.split()[3]) for line in map(serving_line, servers)]
        given = [
            client.session(f"{task} of {machine}", reward)
            for task in range(STEPS // len(SERVERS))
            for reward in (0.0, 1.0)
            for machine, client in zip(SERVERS, clients, strict=True)
        ]
        for client, process in zip(clients, servers, strict=True):
            wait_for(lambda client=client: client.metric("sessions_rated") == 0, process)
        if by_itself:
            arguments = ("run", *of("trainer", config, exchange, "mode=train"))
            trainer = stack.enter_context(forked("-m", "sharpen.cli.main", *arguments))
            _, errors = trainer.communicate(timeout=400)
            assert trainer.returncode == 0, errors
        for client, process in zip(clients, servers, strict=True):
            wait_for(lambda client=client: client.metric("policy_version") == STEPS, process)
            wait_for(lambda client=client: client.metric("sessions_in_batches") == 0, process)
            end(process)
    folder = tmp_path / ("trainer" if by_itself else SERVERS[0]) / "Sharpen" / name
    groups = list(read_groups(folder / "run.db"))
    tasks = {f"{task} of {machine}" for task in range(STEPS // len(SERVERS)) for machine in SERVERS}
    assert {group.task.id for group in groups} == tasks
    assert sum(len(group.rollouts) for group in groups) == len(given)
    assert [step.step for step in read_steps(folder / "run.db")] == [*range(1, STEPS + 1)]
    assert certify(folder, logprobs=True).holds
    assert not list(tmp_path.glob("*/Sharpen/*/exchange"))


def serving_line(process) -> str:
    while not (line := line_of(process)).startswith("serving "):
        pass
    return line
