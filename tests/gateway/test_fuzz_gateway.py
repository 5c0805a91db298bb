"""The attack of `make fuzz-gateway`, in small; and that it sees what it looks for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from fuzz_gateway import BROKEN, MAX_SLOW, Attack, Target, fuzz


class Draws:
    """Draws true, 1 and the first of a choice; and remembers what it drew from."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def draw(self, strategy: Any) -> Any:
        self.drawn.append(kind := repr(strategy).partition("(")[0])
        return {"booleans": True, "integers": 1}[kind] if kind != "sampled_from" else strategy.elements[0]


def attack_until(attack: Attack, seen: Callable[[], bool]) -> None:
    """Attack in rounds of 40 requests until something was seen, which a round holds more often than not. What it holds
    depends on more than its number: hypothesis also draws the constants of our modules that are loaded."""
    for number in range(50):
        if not seen():
            fuzz(attack, 40, number)
    attack.close()


def test_a_short_attack(serve: Any) -> None:
    attack = Attack(Target(serve("hi").gateway))
    fuzz(attack, 40, 0)
    attack_until(attack, lambda: attack.answers[BROKEN] > 0 and attack.answers[200] + attack.answers[400] > 0)
    assert attack.errors == []
    assert attack.num_requests >= 40
    assert attack.answers[BROKEN] > 0
    assert attack.answers[200] + attack.answers[400] > 0


def test_a_failure_of_ours_is_seen(serve: Any) -> None:
    def broken(request: Any) -> Any:
        raise RuntimeError("ours")

    attack = Attack(Target(serve(broken).gateway))
    attack_until(attack, lambda: any("500" in error for error in attack.errors))
    assert any("500" in error for error in attack.errors)


def test_what_is_drawn_does_not_depend_on_the_network(serve: Any) -> None:
    """Hypothesis fails a test that draws otherwise the second time. Red when a boolean is drawn once a connection is
    made, or while few requests are slow."""
    attack = Attack(Target(serve("hi").gateway))
    drawn = []
    with contextlib.closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        for address, num_slow in ((attack.address, 0), (attack.address, MAX_SLOW), (silent.getsockname(), 0)):
            attack.address = address
            attack._slow.extend((socket.socket(), b"") for _ in range(num_slow))
            draws = Draws()
            attack._broken(draws, "/v1/chat/completions", b"{}", "key")
            drawn.append(draws.drawn)
    attack.close()
    assert drawn[0] == drawn[1] == drawn[2] != []
