"""No line of a command is wider than the terminal, and none of its words is cut."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest

from sharpen.cli.main import main
from sharpen.learning.experience.reading import find_rollouts
from sharpen.screen import columns_of, command_lines, fitted, text_width

CONFIG = """
workflow: agent.py:answer
train_dataset: {{path: {dataset}, total_steps: 2}}
eval_dataset: {{path: {dataset}, split: test}}
model: {{model_path: {model}, max_model_len: 64}}
algorithm: {{group_size: 4, batch_size: 2, learning_rate: 0.001}}
"""
AGENT = """
from sharpen import WorkflowOutput

async def answer(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))
"""
NAMES = {60: "a-name-that-leaves-no-room-for-more", 80: "second"}


@contextlib.contextmanager
def terminal(columns: int):
    """A real terminal as standard output and error; what was written to it is in the list at the end."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    found, pieces = [], []

    def read():
        with contextlib.suppress(OSError):
            while piece := os.read(leader, 65536):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(follower, "w", encoding="utf-8")
    with stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield found
    reader.join()
    os.close(leader)
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    found += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")


def too_wide(lines: list[str], columns: int) -> list[str]:
    """The lines that the terminal breaks, but for those whose last word (a path) is as wide as it."""
    return [line for line in lines if len(line) > columns and len(line.split()[-1]) < columns]


@pytest.fixture(scope="module")
def said(tmp_path_factory, toy_model_dir, toy_dataset):
    """A folder with two runs, and what each printed to a terminal of so many columns."""
    folder, said = tmp_path_factory.mktemp("wide"), {}
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.yaml").write_text(CONFIG.format(dataset=toy_dataset, model=toy_model_dir))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("TERM", "xterm")
        for columns, name in NAMES.items():
            with terminal(columns) as said[columns]:
                assert main(["run", "--config", "run.yaml", "--set", f"name={name}"]) == 0
    return folder, said


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_of_a_run_is_wider_than_the_terminal(said, columns):
    """From the first line to the verdict."""
    lines = said[1][columns]
    assert not too_wide(lines, columns)
    assert any("difference" in line for line in lines)
    assert any(line.startswith("verdict: ") for line in lines)


def test_no_line_of_a_command_is_wider_than_the_terminal(said, monkeypatch):
    (folder, _), columns = said, 80
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    first = NAMES[60]
    rollout = next(iter(find_rollouts(folder / "checkpoints/Sharpen/second/run.db", last=1))).id
    for command in (
        "check --config run.yaml",
        "plan --config run.yaml",
        "explain --config run.yaml",
        "ls",
        f"show {first}",
        "show second --step 1",
        "show second --task 1",
        f"show second --rollout {rollout}",
        f"show second --rollout {rollout} --tokens",
        "show second --rollout no-such-rollout-anywhere",
        f"compare {first} second",
        "diagnose second",
        f"certify {first} --no-logprobs",
        f"report {first}",
        "models",
        "algorithms",
    ):
        with terminal(columns) as lines:
            main(command.split())
        assert any(map(str.strip, lines)), command
        assert not too_wide(lines, columns), command


def test_a_pipe_has_no_width(said, monkeypatch, capsys):
    monkeypatch.chdir(said[0])
    monkeypatch.setenv("COLUMNS", "40")
    main(["compare", *NAMES.values()])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("A "))
    assert len(line) > 80


def test_columns_narrows_a_terminal_and_never_widens_it(monkeypatch):
    for given, found in (("", 100), ("70", 70), ("200", 100), ("many", 100)):
        monkeypatch.setenv("COLUMNS", given)
        with terminal(100):
            assert columns_of(sys.stdout) == found
    monkeypatch.delenv("COLUMNS")
    with terminal(160):
        assert (columns_of(sys.stdout), text_width(sys.stdout)) == (160, 100)


def test_lines_are_broken_at_words_and_hang_behind_their_label():
    line = "note:   the quick brown fox jumps over the lazy dog"
    assert fitted(line, 30) == ["note:   the quick brown fox", "        jumps over the lazy", "        dog"]
    assert fitted("  a sentence of words", 12) == ["  a sentence", "    of words"]
    assert fitted("ok", 1) == ["ok"]
    assert fitted("漢字 漢字", 7) == ["漢字", "  漢字"]
    assert fitted(line, None) == [line]
    path = "/a/path/that/is/wider/than/the/screen"
    assert fitted(f"use: {path}", 20) == [f"use: {path}"], "to be broken by the terminal, so that it can be copied"


def test_a_command_that_is_too_wide_can_be_copied_all_the_same():
    lines = command_lines("watch  ", "sharpen show checkpoints/Sharpen/one --rollout step-0/train/1/0", 50)
    assert all(len(line) <= 50 for line in lines)
    joined = "\n".join(lines).removeprefix("watch  ")
    assert joined.replace("\\\n", "").split() == [
        "sharpen",
        "show",
        "checkpoints/Sharpen/one",
        "--rollout",
        "step-0/train/1/0",
    ]
