"""Commands in the documentation are commands that there are, with options that they have."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex

import pytest
from pages import ROOT, blocks, inline_code

from sharpen.cli.main import build_parser

PLACEHOLDER = re.compile(r"[…\[\]]|\.\.\.")


def test_the_page_of_commands_is_what_the_parser_says() -> None:
    """Red when an option is added and the page is not written again."""
    page = runpy.run_path(str(ROOT / "docs" / "make_commands.py"))["page"]()
    written = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert written == page, "run: python docs/make_commands.py"
    empty = [row for row in page.splitlines() if row.startswith("| `") and row.endswith("|  |")]
    assert empty == []


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def lines_of_blocks() -> list[tuple[str, str]]:
    """Each line of a block that is a command of ours, without prompt and comment, with its place."""
    found = []
    for block in blocks():
        for line in block.text.replace("\\\n", " ").splitlines() if block.language in {"", "sh", "bash"} else []:
            line = PLACEHOLDER.sub("", line.strip().removeprefix("$ "))
            if re.match(r"sharpen [a-z-]+(\s|$)", line):
                found.append((str(block), line.removeprefix("sharpen ")))
    return found


@pytest.mark.parametrize(("place", "line"), lines_of_blocks())
def test_each_command_line_is_accepted(place: str, line: str) -> None:
    try:
        build_parser().parse_args(shlex.split(line, comments=True))
    except SystemExit:
        pytest.fail(f"{place}: 'sharpen {line}' is not accepted")


def test_commands_within_sentences_exist_with_their_options() -> None:
    known = commands()
    seen = 0
    for page, text in inline_code():
        words = text.split()
        if len(words) < 2 or words[0] != "sharpen" or not re.fullmatch(r"[a-z][a-z-]+", words[1]):
            continue
        assert words[1] in known, f"{page}: '{text}' names no command"
        for word in words[2:]:
            if word.startswith("--"):
                option = word.partition("=")[0]
                assert option in known[words[1]]._option_string_actions, f"{page}: '{text}': no {option}"
        seen += 1
    assert seen > 60
