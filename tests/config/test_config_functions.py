"""Functions named in YAML: found, or a sentence that says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharpen.config.functions import import_function, variables
from sharpen.errors import ConfigError


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    (tmp_path / "beside_the_agent.py").write_text("ANSWER = 42\n")
    path = tmp_path / "agent.py"
    path.write_text(
        "from beside_the_agent import ANSWER\n\nasync def run_agent(task, model):\n    return ANSWER\n\nx = 3\n"
    )
    return path


def test_a_file_is_imported_with_its_neighbours_and_once(agent: Path):
    function = import_function(f"{agent}:run_agent")
    assert function.__name__ == "run_agent"
    assert import_function(f"{agent}:run_agent") is function


def test_a_module_is_imported():
    assert import_function("json:dumps").__name__ == "dumps"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent.py", "'package.module:function' or 'path/file.py:function'"),
        ("nowhere/agent.py:run", "there is no file nowhere/agent.py"),
        ("no_such_module_here:run", "there is no module 'no_such_module_here'"),
        ("json.no_such_part:run", "there is no module 'json.no_such_part'"),
        ("json:dump_s", "json has no 'dump_s'; did you mean 'dumps'?"),
        ("math:pi", "math:pi is a float, not a function"),
    ],
)
def test_what_is_wrong_is_said(name, message):
    with pytest.raises(ConfigError) as caught:
        import_function(name)
    assert message in str(caught.value)


def test_code_that_fails_at_import_is_named_with_its_cause(tmp_path: Path):
    path = tmp_path / "broken_agent.py"
    path.write_text("import no_such_dependency\n")
    with pytest.raises(ConfigError, match=r"broken_agent\.py fails when it is imported: ModuleNotFoundError") as caught:
        import_function(f"{path}:run")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_variables_are_there_within_and_as_they_were_afterwards(monkeypatch: pytest.MonkeyPatch):
    """Red where one that was there before is removed, or one that was not stays."""
    monkeypatch.setenv("SHARPEN_BEFORE", "kept")
    monkeypatch.delenv("SHARPEN_NEW", raising=False)
    with variables({"SHARPEN_BEFORE": "other", "SHARPEN_NEW": "new"}):
        assert (os.environ["SHARPEN_BEFORE"], os.environ["SHARPEN_NEW"]) == ("other", "new")
    assert os.environ["SHARPEN_BEFORE"] == "kept"
    assert "SHARPEN_NEW" not in os.environ
