"""`sharpen serve --config`: an application in use talks to a model that learns from it."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from expert_toys import put_experts
from picture_toys import draw, make_seeing_checkpoint
from processes import ends, forked, line_of, wait_for
from serve_client import KEY, Client, end

from sharpen.cli.main import BAD_INPUT, main
from sharpen.compat.files import load_config
from sharpen.config.load import read_yaml, resolve
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_steps, read_trained
from sharpen.placement.exchange.announcement import Announcement
from sharpen.placement.exchange.batch import ExploredBatch
from sharpen.placement.exchange.store import Batches, FolderStore
from sharpen.serve.learning import Options, serve_and_learn
from sharpen.serve.visit import Visit

PAGE = Path(__file__).parents[2] / "docs" / "use" / "serve.md"
STEPS = 3
PAUSE_S = 0.05
"""Between two requests of those that keep asking while the trainer starts: without it they take both cores from it."""


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        "name: used\n"
        f"train_dataset: {{total_steps: {STEPS}}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 96}}\n"
        "algorithm: {algorithm_type: grpo, group_size: 2, batch_size: 2, learning_rate: 0.01}\n"
        "check: {enabled: false}\n"
        "certificate: {retrain: 'off'}\n"
    )
    return path


@contextmanager
def running(config: Path, *options: str):
    arguments = ("serve", "--config", str(config), "--port", "0", "--api-key", KEY, *options)
    with forked("-m", "sharpen.cli.main", *arguments) as process:
        while not (line := line_of(process)).startswith("serving used at"):
            pass
        yield process, Client(line.split()[3])


@contextmanager
def running_apart(config: Path, *options: str):
    """With the trainer started beside the server, not by it: it is spared the imports of a process from nothing."""
    alone = ("--set", "mode=train", "--set", "train_dataset.path=sessions")
    with (
        forked("-m", "sharpen.cli.main", "run", "--config", str(config), *options, *alone) as trainer,
        running(config, *options, "--set", "mode=explore") as (process, client),
    ):
        yield process, client, trainer


def run_dir(config: Path) -> Path:
    return config.parent / "runs" / "Sharpen" / "used"


@pytest.mark.slow
def test_it_learns_from_sessions_with_images(config: Path, tmp_path: Path, toy_model_dir: Path):
    folder = make_seeing_checkpoint("qwen3_vl", tmp_path / "seeing", toy_model_dir)
    config.write_text(config.read_text().replace(str(toy_model_dir), str(folder)))
    pictures = [draw(seed, 16, 24) for seed in range(2)]
    with running(config) as (process, client):
        for picture in pictures:
            for reward in (0.0, 1.0):
                session = client.post("/sessions", task_id=picture.sha256)
                part = {"type": "image_url", "image_url": {"url": picture.data_url}}
                client.talk(session, content=[part, {"type": "text", "text": "what?"}])
                client.post("/feedback", session=session["id"], reward=reward)
        wait_for(lambda: client.metric("policy_version") > 0, process)
        end(process)
    assert {path.name for path in (run_dir(config) / "images").iterdir()} == {one.sha256 for one in pictures}
    assert certify(run_dir(config)).holds


def test_it_learns_from_sessions_while_it_answers_and_after_a_restart(config: Path):
    with running(config) as (process, client):
        stop = False

        def keep_asking() -> int:
            asked = 0
            session = client.post("/sessions", task_id="never rated")
            while not stop:
                client.talk(session, turns=1)
                asked += 1
                time.sleep(PAUSE_S)
            return asked

        def keep_streaming() -> int:
            streamed = 0
            session = client.post("/sessions", task_id="never rated")
            with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as own:
                while not stop:
                    ask = [{"role": "user", "content": "question"}]
                    stream = own.chat.completions.create(model="m", messages=ask, max_tokens=64, stream=True)
                    assert [one.choices[0].finish_reason for one in stream if one.choices][-1] in ("stop", "length")
                    streamed += 1
                    time.sleep(PAUSE_S)
            return streamed

        with ThreadPoolExecutor() as pool:
            asking, streaming = pool.submit(keep_asking), pool.submit(keep_streaming)
            for step in range(2):
                for task in ("a", "b"):
                    client.session(f"{task}{step}", 1.0)
                    client.session(f"{task}{step}", 0.0)
                wait_for(lambda step=step: client.metric("policy_version") > step, process)
            stop = True
            assert asking.result() > 3  # not one request failed
            assert streaming.result() > 3
        text = httpx.get(f"{client.url}/metrics", headers={"x-api-key": KEY}).text
        names = set(re.findall(r"`(sharpen_\w+)`", PAGE.read_text()))
        assert set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) == names
        client.session("a2", 1.0)  # waits for others
        open_ = client.post("/sessions", task_id="a2")
        client.talk(open_)
        end(process)
    assert len(read_steps(run_dir(config) / "run.db")) == 2

    with running_apart(config) as (process, client, trainer):
        assert client.metric("sessions_rated") == 1
        open_["base_url"] = f"{client.url}/v1"
        client.talk(open_)  # with the key of before
        client.post("/feedback", session=open_["id"], reward=0.0)
        client.session("b2", 1.0)
        client.session("b2", 0.5)
        said = trainer.communicate(timeout=300)
        assert trainer.returncode == 0, said
        assert len(read_steps(run_dir(config) / "run.db")) == STEPS
        wait_for(lambda: client.metric("policy_version") == STEPS, process)
        end(process)
    groups = list(read_groups(run_dir(config) / "run.db"))
    assert len(groups) == 2 * STEPS
    continued = next(one for group in groups for one in group.rollouts if len(one.calls) == 4)
    assert [call.index for call in continued.calls] == [0, 1, 2, 3]
    assert {one.id for group in groups for one in group.rollouts if one.reward == 0.5} == {"step_3/b2/1"}
    assert certify(run_dir(config), logprobs=True).holds


def test_a_session_that_is_opened_at_once_knows_the_address(config: Path):
    """As an application opens one that has waited for the server. Red when sessions learn where it listens later."""
    told = []

    def say(line: str) -> None:
        if line.startswith("serving used at"):
            told.append(Client(line.split()[3]).post("/sessions", task_id="a")["base_url"])
            raise KeyboardInterrupt

    resolved = resolve(load_config(config), {"mode": "explore", "train_dataset.path": "sessions", "gateway.port": 0})
    with pytest.raises(KeyboardInterrupt):
        serve_and_learn(resolved, Options(name="used", key=KEY, idle_s=60.0, trainer=None), say)
    assert [url.removesuffix("/v1").rpartition(":")[0] for url in told] == ["http://127.0.0.1"]


def test_a_mixture_of_experts_learns_from_sessions(config: Path, write_toy_model):
    """The experts of each token travel with the calls, through the files of sessions and the exchange."""
    model = put_experts(write_toy_model(config.parent / "experts"))
    settings = ("--set", f"model.model_path={model}", "--set", "train_dataset.total_steps=1")
    with running_apart(config, *settings) as (process, client, trainer):
        for task, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0)):
            client.session(task, reward)
        wait_for(lambda: sum(one.waits for one in saved(config)) == 3, process)
        assert {call.routes_NLK.shape[1:] for one in saved(config) for call in one.calls} == {(2, 2)}
        client.session("b", 0.0)
        said = trainer.communicate(timeout=300)
        assert trainer.returncode == 0, said
        wait_for(lambda: client.metric("policy_version") == 1, process)
        end(process)
    (step,) = read_steps(run_dir(config) / "run.db")
    assert step.metrics["trainer/logprob_gap_max"] < 1e-4
    calls = [c for group in read_groups(run_dir(config) / "run.db") for one in group.rollouts for c in one.calls]
    assert {call.routes_NLK.shape[1:] for call in calls} == {(2, 2)}
    assert certify(run_dir(config), logprobs=True).holds


def trainer_of(config: Path) -> int:
    return json.loads((run_dir(config) / "run.lock").read_text())["pid"]


def saved(config: Path) -> list[Visit]:
    files = (run_dir(config) / "explore" / "sessions").glob("*.session")
    return [Visit.from_bytes(file.read_bytes()) for file in files]


def test_after_a_kill_everything_that_was_recorded_is_there_and_trains_once(config: Path):
    settings = ("--set", "train_dataset.total_steps=2")
    with running(config, *settings) as (process, client):
        rated = [client.session(task, reward) for task in "ab" for reward in (1.0, 0.0)]
        wait_for(lambda: client.metric("policy_version") == 1, process)
        rated += [client.session("c", 1.0), client.session("c", 0.0), client.session("d", 1.0)]
        open_ = client.post("/sessions", task_id="d", task={"question": "d"})
        answers = client.talk(open_)
        wait_for(lambda: sorted(len(one.calls) for one in saved(config)) == [2, 2, 2, 2], process)
        wait_for(lambda: sum(one.waits for one in saved(config)) == 3, process)
        trainer = trainer_of(config)
        process.kill()
        process.wait()
    with running(config, *settings) as (process, client):
        assert ends(trainer)  # with its server; the new one waited for it
        assert (client.metric("sessions_rated"), client.metric("sessions_open")) == (3, 1)
        client.post("/feedback", call=answers[1], reward=0.5, end=True)
        wait_for(lambda: client.metric("policy_version") == 2, process)
        wait_for(lambda: client.metric("sessions_in_batches") == 0, process)
        wait_for(lambda: client.metric("trainer_running") == 0, process)
        assert refused(client, "/feedback", {"session": rated[0], "reward": 1})[0] == 404
        end(process)
    batches = [file.read_bytes() for file in sorted((run_dir(config) / "exchange" / "batches").glob("*[1-9].batch"))]
    given = [id_ for content in batches for id_ in ExploredBatch.from_bytes(content).sessions]
    assert sorted(given) == sorted([*rated, open_["id"]])
    trained = [call.rollout_id for call in read_trained(run_dir(config) / "run.db")]
    assert len(read_steps(run_dir(config) / "run.db")) == 2
    assert len(set(trained)) == 8
    assert certify(run_dir(config), logprobs=True).holds


def test_sessions_by_idle_time_and_rewards_of_calls(config: Path):
    """With single rollouts nobody needs to open a session."""
    settings = ("algorithm.group_size=1", "algorithm.algorithm_type=reinforceplusplus", "mode=explore")
    chosen = [part for setting in settings for part in ("--set", setting)]
    with running(config, *chosen, "--idle-s", "3") as (process, client):
        shared = {"base_url": f"{client.url}/v1", "api_key": KEY}
        first, second = client.talk(shared)
        assert client.post("/feedback", call=second, reward=0.5) == {
            "session": client.post("/feedback", call=first, reward=0.25)["session"],
            "reward": 0.5,
            "ended": False,
        }
        wait_for(lambda: client.metric("sessions_rated") == 1, process)
        claude = anthropic.Anthropic(base_url=client.url, api_key=KEY)
        ask = [{"role": "user", "content": "question"}]
        with claude.messages.stream(model="m", max_tokens=4, messages=ask) as stream:
            stream.until_done()
            message = stream.get_final_message()
        client.post("/feedback", call=message.id, reward=1.0, end=True)
        wait_for(lambda: client.metric("batches_total") == 1, process)
        assert client.metric("sessions_rated") == 0
        end(process)


def refused(client: Client, path: str, body, key: str = KEY) -> tuple[int, str]:
    reply = httpx.post(f"{client.url}{path}", headers={"x-api-key": key}, content=json.dumps(body))
    return reply.status_code, reply.json()["error"]["message"]


def test_what_cannot_be_is_refused(config: Path):
    with running(config, "--set", "mode=explore") as (process, client):
        assert refused(client, "/sessions", {"task_id": 3})[0] == 400
        assert refused(client, "/sessions", {})[0] == 400
        assert refused(client, "/sessions", {"task_id": "a", "tsk": 1})[0] == 400
        assert refused(client, "/sessions", {"task_id": "a"}, key="other")[0] == 401
        assert refused(client, "/feedback", {"session": "none", "reward": 1})[0] == 404
        assert refused(client, "/feedback", {"call": "chatcmpl-1", "reward": 1})[0] == 404
        session = client.post("/sessions", task_id="a")
        for reward in ("1", True, None):
            assert refused(client, "/feedback", {"session": session["id"], "reward": reward, "end": False})[0] == 400
        assert refused(client, "/feedback", {"reward": 1})[0] == 400
        assert refused(client, "/feedback", {"session": session["id"], "reward": 1}, key=session["api_key"])[0] == 401
        assert refused(client, "/v1/chat/completions", {"messages": []})[0] == 403
        client.talk(session)
        assert client.post("/feedback", session=session["id"], reward=1.0)["ended"]
        with pytest.raises(openai.AuthenticationError):
            client.talk(session)
        opened, refusals = (f'requests_total{{path="other",status="{status}"}}' for status in (200, 400))
        assert (client.metric(opened), client.metric(refusals)) == (2, 7)
        end(process)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train_dataset.total_steps=null"], "train_dataset.total_steps"),
        (["name=null"], "needs a name"),
        (["algorithm.algorithm_type=sft"], "sft"),
        (["algorithm.algorithm_type=remax"], "remax"),
    ],
)
def test_settings_that_no_server_can_have(settings, message, config: Path, capsys):
    chosen = [part for setting in settings for part in ("--set", setting)]
    assert main(["serve", "--config", str(config), *chosen]) == BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.group_size=4"], r"algorithm\.group_size: 2 there, 4 here"),
        (["model.temperature=0.5"], r"model\.temperature: 1\.0 there, 0\.5 here"),
        ([], r"model: .*'other'"),
    ],
)
def test_a_further_server_of_another_run_is_refused(settings, message, config: Path, tmp_path: Path, capsys):
    """Red before: it replaced what the first had announced, which the trainer then refused when it began again."""
    exchange = tmp_path / "shared"
    first, other = resolve(read_yaml(config), {"train_dataset.path": "sessions"}).config, {"digest": "other"}
    said = Announcement.of(first, total_steps=STEPS, model=other, probe=()).to_bytes()
    Batches(FolderStore(exchange)).put(0, said)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # where it would end otherwise
        chosen = [
            part for setting in (*settings, f"exchange={exchange}", "mode=explore") for part in ("--set", setting)
        ]
        port = str(taken.getsockname()[1])
        assert main(["serve", "--config", str(config), "--port", port, "--api-key", KEY, *chosen]) == BAD_INPUT
    errors = capsys.readouterr().err
    assert re.search(f"this server and the one before it on the same exchange .*{message}", errors)
    assert Batches(FolderStore(exchange)).get(0) == said
    assert not (run_dir(config) / "explore").exists(), "so that it can begin with the right settings"


def test_a_model_or_a_configuration(config: Path, toy_model_dir: Path, capsys):
    assert main(["serve"]) == BAD_INPUT
    assert main(["serve", str(toy_model_dir), "--config", str(config)]) == BAD_INPUT
    assert main(["serve", str(toy_model_dir), "--idle-s", "3"]) == BAD_INPUT
    assert "--idle-s" in capsys.readouterr().err
