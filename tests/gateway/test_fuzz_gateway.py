"""The attack of `make fuzz-gateway`, in small; and that it sees what it looks for."""

from __future__ import annotations

from typing import Any

from fuzz_gateway import BROKEN, Attack, Target, fuzz


def test_a_short_attack(serve: Any) -> None:
    attack = Attack(Target(serve("hi").gateway))
    fuzz(attack, 40, 0)
    attack.close()
    assert attack.errors == []
    assert attack.num_requests >= 40
    assert attack.answers[BROKEN] > 0
    assert sum(count for status, count in attack.answers.items() if status in (200, 400)) > 0


def test_a_failure_of_ours_is_seen(serve: Any) -> None:
    def broken(request: Any) -> Any:
        raise RuntimeError("ours")

    attack = Attack(Target(serve(broken).gateway))
    fuzz(attack, 40, 0)
    attack.close()
    assert any("500" in error for error in attack.errors)
