"""The command `trinity`: Trinity-RFT's own where that is installed, else `sharpen run`."""

from sharpen.cli.main import BAD_INPUT
from sharpen.cli.trinity import main


def test_run_is_ours_where_trinity_is_not_installed(tmp_path, capsys):
    missing = tmp_path / "none.yaml"
    assert main(["run", "-c", str(missing), "--plugin_dir", str(tmp_path)]) == BAD_INPUT
    assert str(missing) in capsys.readouterr().err


def test_other_commands_are_named(capsys):
    assert main(["studio"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "`trinity studio`" in said
    assert "sharpen run" in said
    assert main([]) == BAD_INPUT


def test_trinity_s_own_command_comes_first():
    assert main(["run"], command=lambda: 7) == 7
