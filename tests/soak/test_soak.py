"""The ten minutes of `make soak`; and, in the fast suite, that it sees what it looks for."""

from pathlib import Path

import pytest
from soak import WAYS, Sample, problems, slope, soak, table


def grown(name: str, per_1000: float) -> list[Sample]:
    """Samples of 10,000 rollouts in which one number grows, and memory swings by 3 MB."""
    samples = []
    for place in range(40):
        values = {"memory_mb": 500.0 + place % 4, "files": 20, "threads": 7, "objects": 80_000, "journal_mb": 1.0}
        values[name] += per_1000 * place / 4
        samples.append(Sample(rollouts=250 * (place + 1), **values))
    return samples


def test_what_grows_is_seen_and_noise_is_not() -> None:
    assert problems(grown("memory_mb", 0.0)) == []
    assert slope(grown("memory_mb", 12.0), "memory_mb")[0] == pytest.approx(12.0, abs=0.5)
    for name, per_1000 in (("memory_mb", 4.0), ("files", 1.0), ("threads", 1.0)):
        (problem,) = problems(grown(name, per_1000))
        assert problem.startswith(name)
    assert "bytes for each rollout" in problems(grown("journal_mb", 10.0))[-1]
    assert any("memory MB" in line for line in table("http", grown("files", 1.0)))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows_over_many_rollouts(way, tmp_path: Path) -> None:
    """Five minutes for each way."""
    samples, _ = soak(tmp_path, way, 5000)
    assert samples[-1].rollouts >= 4750
    assert problems(samples) == []
