"""`sharpen doctor`: what it finds, what it says to do, and its exit code."""

import json
import sys
from http.server import BaseHTTPRequestHandler

import http_here
import pytest

from sharpen.cli.doctor import checks
from sharpen.cli.doctor.command import run_doctor
from sharpen.cli.doctor.gradients import finding_of as finding_of_gradients
from sharpen.cli.doctor.gradients import gradients_check, probe_model
from sharpen.cli.doctor.step import StepResult, finding_of, step_check, train_step
from sharpen.cli.main import build_parser
from sharpen.evidence.certificate.gradient_probe import GradientProbe
from sharpen.evidence.certificate.likeness import Gap


@pytest.mark.parametrize(
    ("release", "system", "state"),
    [
        ((3, 10, 9), "Linux", "problem"),
        ((3, 14, 0), "Linux", "problem"),
        ((3, 12, 1), "Darwin", "warning"),
        ((3, 11, 0), "Linux", "ok"),
    ],
)
def test_python(release, system, state):
    found = checks.python_check(release, system)
    assert found.state == state
    assert bool(found.todo) == (state != "ok")


def test_packages_that_are_missing_or_too_old_are_named_with_the_command():
    found = checks.packages_check(["torch>=2", "numpy>=99", "no-such-package>=1", "never; extra == 'dev'"])
    assert found.state == "problem"
    assert "numpy" in found.what
    assert "no-such-package is missing" in found.what
    assert "torch" not in found.what
    assert found.todo == "pip install 'numpy>=99' 'no-such-package>=1'"
    here = checks.packages_check()
    assert here.state == "ok"
    assert "torch " in here.what


def test_memory_and_disk(tmp_path):
    assert checks.memory_check(available=checks.GIB).state == "problem"
    assert checks.memory_check(available=8 * checks.GIB).state == "ok"
    assert checks.disk_check(tmp_path / "not" / "yet", free=100 * checks.GIB).state == "ok"
    little = checks.disk_check(tmp_path, free=checks.GIB)
    assert (little.state, "1.0 GiB" in little.what, "checkpoint_root_dir" in little.todo) == ("warning", True, True)


def test_a_gpu_that_torch_cannot_use_is_a_warning(tmp_path):
    driver = tmp_path / "version"
    assert checks.gpu_check(driver).state == "ok"
    driver.touch()
    found = checks.gpu_check(driver)
    assert found.state == "warning"
    assert "CUDA_VISIBLE_DEVICES" in found.todo


class Answer(BaseHTTPRequestHandler):
    """A hub that answers with the status in its path."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_hub_answers_fails_or_is_not_there():
    with http_here.answering(Answer) as url:
        assert checks.hub_check({"HF_ENDPOINT": f"{url}/200"}).state == "ok"
        down = checks.hub_check({"HF_ENDPOINT": f"{url}/503"})
    assert (down.state, "503" in down.what) == ("warning", True)
    gone = checks.hub_check({"HF_ENDPOINT": f"{url}/200"})
    assert (gone.state, url in gone.what, "HF_ENDPOINT" in gone.todo) == ("warning", True, True)
    offline = checks.hub_check({"HF_HUB_OFFLINE": "1"})
    assert (offline.state, "HF_HUB_OFFLINE" in offline.what) == ("warning", True)


@pytest.mark.parametrize(
    ("endpoint", "proxy"),
    [("http://[::1", ""), ("http://127.0.0.1:9", "socks5://127.0.0.1:9")],
)
def test_an_address_or_a_proxy_that_no_request_can_be_made_with_is_said(monkeypatch, endpoint, proxy):
    """Red as a traceback: the client's errors for these are no errors of HTTP."""
    for name in ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    if proxy:
        monkeypatch.setenv("ALL_PROXY", proxy)
    found = checks.hub_check({"HF_ENDPOINT": endpoint})
    assert (found.state, endpoint in found.what, "ALL_PROXY" in found.todo) == ("warning", True, True)


def test_a_proxy_for_calls_to_this_machine_is_a_warning():
    proxy = {"HTTP_PROXY": "http://proxy:3128"}
    assert checks.proxy_check(proxy).state == "warning"
    assert checks.proxy_check({**proxy, "no_proxy": "localhost,127.0.0.1"}).state == "ok"
    assert checks.proxy_check({}).state == "ok"


def test_the_step_really_trains(tmp_path):
    result = train_step(tmp_path)
    assert result.changed
    assert result.certified
    assert finding_of(result).state == "ok"


@pytest.mark.parametrize("wrong", [{"changed": False}, {"certified": False}])
def test_a_step_that_trains_nothing_is_a_problem(wrong):
    whole = {"device": "the processor", "rollouts": 8, "changed": True, "certified": True, "seconds": 1.0}
    assert finding_of(StepResult(**(whole | wrong))).state == "problem"


@pytest.mark.parametrize(
    ("code", "told"),
    [("import sys; sys.exit('no memory left')", "no memory left"), ("import os; os.abort()", "-6")],
)
def test_a_step_that_crashes_is_a_problem(tmp_path, code, told):
    found = step_check(tmp_path, program=(sys.executable, "-c", code))
    assert found.state == "problem"
    assert told in found.what
    assert str(tmp_path) in found.todo


def test_a_step_that_hangs_is_a_problem(tmp_path):
    found = step_check(tmp_path, timeout_s=0.2, program=(sys.executable, "-c", "import time; time.sleep(60)"))
    assert (found.state, "0 s" in found.what) == ("problem", True)


def test_gradients_of_a_model_are_compared(toy_model_dir):
    found = finding_of_gradients(probe_model(str(toy_model_dir)))
    assert found.state == "ok", found
    assert "those of a plain loop in all tensors" in found.what


def test_they_are_compared_in_a_process_of_its_own():
    answer = "import json, sys; print(json.dumps({'name': 'gradients', 'state': 'ok', 'what': sys.argv[1]}))"
    assert gradients_check("a/model", program=(sys.executable, "-c", answer)).what == "a/model"
    found = gradients_check("a/model", program=(sys.executable, "-c", "import os; os.abort()"))
    assert (found.name, found.state) == ("gradients", "problem")
    assert "comparing the gradients of a/model failed" in found.what


@pytest.mark.parametrize(
    ("found", "state", "told"),
    [
        (
            GradientProbe(gaps=(Gap(name="layers.3.up", distance=2.0, bound=1e-5),), num_tokens=9),
            "problem",
            "layers.3.up",
        ),
        (GradientProbe(not_probed="too large"), "warning", "too large"),
    ],
)
def test_gradients_that_differ_or_were_not_compared_are_said(found, state, told):
    finding = finding_of_gradients(found)
    assert (finding.name, finding.state) == ("gradients", state)
    assert told in finding.what
    assert finding.todo


def test_the_command(monkeypatch, capsys):
    """Exit code 0 and one JSON value, whatever warnings there are."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = build_parser().parse_args(["doctor", "--no-step", "--json"])
    assert run_doctor(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"]
    assert [finding["name"] for finding in answer["findings"]][:2] == ["python", "packages"]
    assert next(f for f in answer["findings"] if f["name"] == "hub")["todo"]
    arguments = build_parser().parse_args(["doctor", "--no-step"])
    assert run_doctor(arguments) == 0
    assert "ready, with warnings: hub" in capsys.readouterr().out
