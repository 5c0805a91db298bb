"""Task folders of Harbor: read, worked on in a session, and scored by their tests, which nobody sees before.

Sessions are root folders of this machine; those in containers are in `tests/agent/sandbox/test_sessions.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sharpen.agent.environments.harbor import Harbor
from sharpen.agent.environments.harbor_tasks import read_task, read_tasks
from sharpen.agent.environments.opening import environment_identity
from sharpen.cli.main import main
from sharpen.config.public import EnvironmentConfig, JudgeOutput, WorkflowOutput
from sharpen.errors import ConfigError, DatasetError, JudgeError
from sharpen.placement.auxiliary.endpoint import Endpoint
from sharpen.testing import check_environment
from sharpen.testing.environments import served_replies

ONE = "#!/bin/bash\ncat /app/out > /logs/verifier/reward.txt\n"


def write(folder: Path, files: dict[str, str], **toml: str) -> Path:
    """Write a task: Dockerfile, instruction, tests; `files` replace them, and "" leaves one out."""
    given = {
        "instruction.md": "Write 1 into the file out.\n",
        "task.toml": "\n".join(f"[{name}]\n{text}" for name, text in toml.items()),
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "tests/test.sh": ONE,
        **files,
    }
    for name, text in given.items():
        if text or name == "task.toml":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def bash(command: str) -> dict[str, Any]:
    """A reply that calls the tool."""
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def config(folder: Path, **args: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="harbor", id=str(folder), args={"sandbox": "root", **args})


def harbor(tmp_path: Path, files: dict[str, str] | None = None, toml: dict[str, str] | None = None, **args: Any) -> Any:
    """The environment of one task, `a`, with two others beside it that are whole."""
    for name in ("b", "c"):
        write(tmp_path / "tasks" / name, {})
    write(tmp_path / "tasks" / "a", files or {}, **(toml or {}))
    return Harbor(config(tmp_path / "tasks", **args))


def row(environment: Harbor, name: str = "a") -> dict[str, Any]:
    rows = [*environment.tasks("train"), *environment.tasks("test")]
    return dict(next(row for row in rows if row["name"] == name))


def attempt(environment: Harbor, replies: Sequence[Any]) -> tuple[WorkflowOutput, JudgeOutput, list[Any]]:
    with served_replies(replies) as (model, requests):
        model.run = Endpoint(base_url=model.base_url, name=model.name, api_key="k").run

        async def both() -> tuple[WorkflowOutput, JudgeOutput]:
            async with model.client:
                output = await environment.workflow(task=row(environment), model=model)
            return output, await environment.judge(task=row(environment), response=output.response)

        output, judged = asyncio.run(both())
    return output, judged, requests


def test_the_agent_works_then_the_tests_give_the_reward(tmp_path: Path) -> None:
    """The tests are nowhere while it works. Red when they are copied in at the start."""
    environment = harbor(tmp_path, {"tests/secret": "s"}, {"environment": 'env = {GREETING = "hi"}'})
    hidden = f"ls /tests {tmp_path}; echo $GREETING; pwd"
    output, judged, requests = attempt(environment, [bash(hidden), bash("echo 0.25 > out"), "Done."])
    assert judged == JudgeOutput(reward=0.25, metrics={})
    assert output.metrics == {"agent_timed_out": 0.0, "commands": 2.0}
    said = requests[1]["messages"][-1]["content"]
    assert said.splitlines()[:2] == ["hi", "/app"]
    assert said.count("No such file or directory") == 2
    assert requests[0]["messages"][1] == {"role": "user", "content": "Write 1 into the file out."}
    assert not list(Path("/tmp").glob(f"sharpen-root-*/{tmp_path.name}"))
    check_environment(Harbor, config(tmp_path / "tasks"), [bash("echo 1 > out"), "Done."])  # type: ignore[list-item]


def test_rewards_by_name(tmp_path: Path) -> None:
    test = (
        '#!/bin/bash\ncd /logs/verifier; echo \'{"reward": 0.5, "written": true}\' > reward.json; echo 1 > reward.txt\n'
    )
    environment = harbor(tmp_path, {"tests/test.sh": test})
    assert attempt(environment, ["Done."])[1] == JudgeOutput(reward=0.5, metrics={"written": 1.0})
    chosen = Harbor(config(tmp_path / "tasks", reward="written"))
    assert attempt(chosen, ["Done."])[1] == JudgeOutput(reward=1.0, metrics={"reward": 0.5})


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("echo lost >&2; exit 3", r"left no reward in .*exit code 3, lost"),
        ("echo much > /logs/verifier/reward.txt", r"left reward.txt with 'much\\n', which is no number"),
        ("echo nan > /logs/verifier/reward.txt", r"reward nan, which is not a finite number"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', r"a 'b', which is not a finite number"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', r"the rewards a, b, and not 'reward'"),
        ("echo { > /logs/verifier/reward.json", r"which is no JSON"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", r"left no reward"),
        ("sleep 600", r"did not end within 0\.5 s \(verifier.timeout_sec\)"),
    ],
)
def test_tests_that_give_no_reward_are_the_judges_failure(tmp_path: Path, test: str, said: str) -> None:
    environment = harbor(tmp_path, {"tests/test.sh": f"#!/bin/bash\n{test}\n"}, {"verifier": "timeout_sec = 0.5"})
    with pytest.raises(JudgeError, match=said) as caught:
        attempt(environment, ["Done."])
    assert str(caught.value).startswith("the tests of a ")


def test_what_the_agent_leaves_for_the_tests_is_not_theirs(tmp_path: Path) -> None:
    """A reward, and a test, of its own. Red when the folders are not emptied."""
    cheat = "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.json; ln -s /etc /tests/more; echo 0 > out"
    assert attempt(harbor(tmp_path), [bash(cheat), "Done."])[1].reward == 0.0


def test_an_agent_whose_time_is_over_is_scored_by_what_it_left(tmp_path: Path) -> None:
    """On a loaded machine the limit may pass before the command has begun: then a longer one is tried."""
    for timeout_s in (0.5, 5.0, 50.0):
        environment = harbor(tmp_path / f"{timeout_s:g}", toml={"agent": f"timeout_sec = {timeout_s}"})
        output, judged, _ = attempt(environment, [bash("echo 1 > out; sleep 600")])
        if judged.reward == 1.0:
            break
    assert (judged.reward, output.metrics) == (1.0, {"agent_timed_out": 1.0, "commands": 1.0})


def test_a_command_as_the_agent(tmp_path: Path) -> None:
    """It reaches its model by the variables of `model.run`, and finds its own files in /agent."""
    agent = tmp_path / "agent"
    agent.mkdir()
    body = r"{\"model\": \"$OPENAI_MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
    (agent / "agent.sh").write_text(f'curl -sf "$OPENAI_BASE_URL/chat/completions" -d "{body}" && echo 1 > out\n')
    environment = harbor(tmp_path, agent=["sh", "/agent/agent.sh", "{instruction}"], agent_folder=str(agent))
    output, judged, requests = attempt(environment, ["Done."])
    assert (judged.reward, output.metrics) == (1.0, {"agent_timed_out": 0.0, "exit_code": 0.0})
    assert requests[0]["model"] == "scripted"
    assert requests[0]["messages"][0]["content"] == "Write 1 into the file out."
    before = environment_identity(environment._given)
    (agent / "agent.sh").write_text("exit 1\n")
    assert environment_identity(environment._given) != before


def test_a_function_as_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "async def work(instruction, model, session):\n"
        "    await model.run(['sh', '-c', f'test -n \"{instruction}\" && echo 1 > out'], sandbox=session)\n"
    )
    environment = harbor(tmp_path, agent=f"{file}:work")
    assert attempt(environment, [""])[1].reward == 1.0
    assert environment_identity(environment._given)["file"] == "own.py"


def test_a_verifier_of_its_own_sees_what_is_handed_over(tmp_path: Path) -> None:
    """The default of `harbor init`: tests bring their own Dockerfile, and get artifacts alone."""
    files = {
        "tests/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY . /tests/\n",
        "tests/test.sh": "#!/bin/bash\nseen=$(ls /app /logs/artifacts | tr '\\n' ' ')\n"
        '[ "$seen" = "/app: given  /logs/artifacts: log " ] || { echo "$seen"; exit 1; }\n'
        "cat /app/given > /logs/verifier/reward.txt\n",
    }
    environment = harbor(
        tmp_path,
        {**files, "task.toml": 'artifacts = ["/app/given"]\n[verifier]\nenvironment_mode = "separate"\n'},
    )
    work = "echo 0.75 > given; echo 1 > kept; mkdir -p /logs/artifacts; echo x > /logs/artifacts/log"
    assert attempt(environment, [bash(work), "Done."])[1].reward == 0.75


def test_the_older_names_are_read(tmp_path: Path) -> None:
    old = 'version = "1.0"\n[metadata]\nauthor = "a"\n[environment]\nmemory = "2G"\nstorage = "10G"\n'
    old += "allow_internet = false\n"
    text = "<!-- harbor-canary GUID 1 -->\n\nDo it.\n"
    task = read_task(write(tmp_path / "old", {"task.toml": old, "instruction.md": text}))
    assert (task.name, task.instruction, task.place.memory_mb, task.place.network) == ("old", "Do it.", 2048.0, False)
    assert (task.agent_s, task.verifier_s, task.separate) == (None, 600.0, None)


BAD: list[tuple[dict[str, str], dict[str, str], str]] = [
    ({"tests/test.sh": ""}, {}, r"/a has no tests/test.sh, which gives the reward: write it, or leave the task out"),
    ({"instruction.md": ""}, {}, r"/a has no instruction.md"),
    ({"instruction.md": "# canary 1\n\n"}, {}, r"instruction.md is empty"),
    ({"task.toml": "[agent\n"}, {}, r"task.toml is not TOML: .*line 1"),
    ({}, {"agent": "timeout_secs = 3"}, r"'agent.timeout_secs' is not a setting.*timeout_sec"),
    ({}, {"agent": "timeout_sec = -3"}, r"'agent.timeout_sec'.* more than 0"),
    ({}, {"environment": 'memory = "much"'}, r"a size is written like '2G'"),
    ({}, {"environment": "gpus = 1"}, r"has environment.gpus, which tasks do not get here"),
    ({}, {"environment": 'os = "windows"'}, r"os in .environment. is 'windows'"),
    ({}, {"environment": 'env = {K = "${NOT_SET_ANYWHERE}"}'}, r"needs the variable NOT_SET_ANYWHERE"),
    ({}, {"agent": 'network_mode = "allowlist"'}, r"network_mode is 'allowlist'"),
    ({"task.toml": '[[steps]]\nname = "one"\n'}, {}, r"has steps, which tasks do not get here"),
    ({"environment/docker-compose.yaml": "services: {}"}, {}, r"one container here, and no docker-compose.yaml"),
    ({"environment/Dockerfile": ""}, {}, r"has no Dockerfile, and task.toml names no docker_image in"),
    ({"environment/Dockerfile": "FROM a\nCOPY --from=b /x /y\n"}, {}, r"'COPY --from=b /x /y' needs a container"),
    ({"environment/Dockerfile": "FROM a\nWORKDIR /usr/src\n"}, {}, r"'WORKDIR /usr/src' needs a container"),
    ({}, {"environment": 'docker_image = "plain:1"'}, r"made of the image plain:1, and .*sandbox is 'root'"),
    ({"task.toml": '[task]\nname = "b"\n'}, {}, r"two tasks have the name 'b'"),
]


@pytest.mark.parametrize(("files", "toml", "said"), BAD)
def test_a_wrong_task_is_one_sentence(tmp_path: Path, files: dict[str, str], toml: dict[str, str], said: str) -> None:
    with pytest.raises(DatasetError, match=said) as caught:
        harbor(tmp_path, files, toml)
    assert "\n" not in str(caught.value)
    Harbor(config(tmp_path / "tasks", leave_out=["a"], held_out=str(write(tmp_path / "other", {}))))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"sanbox": "root"}, r"environment.args of harbor: 'sanbox' is not a setting.*sandbox"),
        ({"sandbox": "lxc"}, r"sandbox is 'lxc': it must be docker, podman"),
        (
            {"sandbox": "/nowhere/podman"},
            r"^/nowhere/podman is not in PATH: start it, or environment.args.sandbox: root takes",
        ),
        ({"agent": ["claude", "-p"]}, r"one of its words must hold \{instruction\}"),
        ({"agent": ["a", "{instruction}"], "agent_folder": "/nowhere"}, r"there is no such folder"),
        ({"held_out": "/nowhere"}, r"there is no such folder of Harbor's tasks"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, args: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DatasetError), match=said):
        harbor(tmp_path, **args)


def test_tasks_have_digests_and_are_held_out(tmp_path: Path) -> None:
    environment = harbor(tmp_path)
    before = row(environment)
    assert [len(environment.tasks(split)) for split in ("train", "test")] == [2, 1]
    (tmp_path / "tasks" / "a" / "tests" / "test.sh").write_text("#!/bin/bash\n")
    after = row(Harbor(config(tmp_path / "tasks")))
    assert (before["question"], before["digest"] != after["digest"]) == (after["question"], True)
    with pytest.raises(DatasetError, match=r"has 1 tasks, of which 1 train and 0 are held out: add tasks"):
        Harbor(config(tmp_path / "tasks" / "a"))
    (tmp_path / "tasks" / "a" / "task.toml").rename(tmp_path / "tasks" / "a" / "task.yaml")
    with pytest.raises(DatasetError, match=r"`harbor task migrate` makes one of task.yaml"):
        read_tasks(tmp_path / "tasks")


def test_a_workflow_of_the_users_has_no_tests(tmp_path: Path) -> None:
    environment = harbor(tmp_path)
    with pytest.raises(JudgeError, match=r"name an agent in environment.args.agent"):
        asyncio.run(environment.judge(task=row(environment), response="an answer"))


def test_init_names_the_folder_wherever_the_run_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tasks" / "a", {})
    assert main(["init", "new", "--env", "harbor:tasks", "--model", "some/model"]) == 0
    settings = yaml.safe_load((tmp_path / "new" / "run.yaml").read_text())
    assert settings["environment"] == {"type": "harbor", "id": str(tmp_path / "tasks"), "args": {}}
