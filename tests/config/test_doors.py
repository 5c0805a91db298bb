"""Parts that others bring are found by name, by entry point, by module and name; what is not found is said."""

import sys
from pathlib import Path

import pytest

from sharpen.config.doors import find_part, names
from sharpen.errors import ConfigError

OURS = {"mean": 1, "sum": 2}


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package's metadata, and a module, on the path of this process."""

    def install(package: str, points: str, code: str = "part = object()\n") -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (tmp_path / f"{package}.py").write_text(code)
        monkeypatch.delitem(sys.modules, package, raising=False)

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def test_ours_come_first_then_what_is_announced_then_what_is_named(announce):
    announce("theirs_a", "[sharpen.sums]\nmean = theirs_a:part\nmedian = theirs_a:part\n")
    import theirs_a

    assert find_part("sums", "mean", OURS) == 1
    assert find_part("sums", "median", OURS) is theirs_a.part
    assert names("sums", OURS) == ["mean", "sum", "median"]


def test_what_is_installed_meanwhile_is_found(announce):
    """Red when what was announced once is asked for no more."""
    announce("theirs_a", "[sharpen.sums]\nmedian = theirs_a:part\n")
    assert names("sums", OURS) == ["mean", "sum", "median"]
    announce("theirs_b", "[sharpen.sums]\nmode = theirs_b:part\n")
    assert names("sums", OURS) == ["mean", "sum", "median", "mode"]


def test_a_part_of_a_file_is_found(tmp_path):
    (tmp_path / "own.py").write_text("def part(): return 7\n")
    assert find_part("sums", f"{tmp_path / 'own.py'}:part", OURS)() == 7


def test_what_is_not_found_is_said_with_the_nearest_name(announce):
    announce("theirs_b", "[sharpen.sums]\nmedian = theirs_b:part\n")
    with pytest.raises(
        ConfigError, match=r"no 'medain' among sharpen.sums: .*mean, median, sum; did you mean 'median'"
    ):
        find_part("sums", "medain", OURS)


def test_two_packages_with_one_name_are_refused(announce):
    announce("theirs_c", "[sharpen.sums]\nmedian = theirs_c:part\n")
    announce("theirs_d", "[sharpen.sums]\nmedian = theirs_d:part\n")
    with pytest.raises(ConfigError, match=r"several packages announce 'median' .*theirs_[cd].*theirs_[cd]"):
        find_part("sums", "median", OURS)


def test_a_package_that_fails_is_named(announce):
    announce("theirs_e", "[sharpen.sums]\nmedian = theirs_e:part\n", code="raise OSError('no disk')\n")
    with pytest.raises(ConfigError, match=r"theirs_e:part, which sharpen.sums announces as 'median', fails: .*no disk"):
        find_part("sums", "median", OURS)
