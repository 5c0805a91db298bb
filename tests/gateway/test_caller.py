"""Who opened a connection, where many wait at the same time."""

import gc
import weakref
from collections import deque

import pytest

from sharpen.gateway.caller import MAX_UNUSED, Connections

COUNT = 4 * MAX_UNUSED


class Attempt:
    label = "a rollout"


class Socket:
    """A socket that is connected from `port`, or closed; `looks` counts those at all of them."""

    looks = 0

    def __init__(self, port):
        self.port, self.closed = port, False

    def getsockname(self):
        Socket.looks += 1
        if self.closed:
            raise OSError
        return "127.0.0.1", self.port


@pytest.fixture
def callers():
    """Who opens the next connections."""
    return deque()


@pytest.fixture
def connections(callers):
    return Connections(0, callers.popleft)


def opened(connections, callers, first):
    """Open connections from so many ports, each in an attempt of its own."""
    attempts, sockets = [Attempt() for _ in range(COUNT)], [Socket(first + number) for number in range(COUNT)]
    callers.extend(attempts)
    for one in sockets:
        connections.note(one)
    return attempts, sockets


def test_each_of_many_open_connections_is_looked_at_a_few_times(connections, callers):
    """Break: all that are open looked at again for each of them, as long as they are more than `MAX_UNUSED`."""
    attempts, sockets = opened(connections, callers, 1)
    Socket.looks = 0
    assert [connections.opener(one.port) for one in sockets] == attempts
    assert Socket.looks <= 4 * COUNT


def test_closed_connections_that_sent_nothing_are_forgotten(connections, callers):
    """Break: nothing is removed."""
    attempts, sockets = opened(connections, callers, 1)
    connections.opener(sockets[0].port)
    for one in sockets:
        one.closed = True
    seen = weakref.WeakSet(attempts)
    del attempts
    waves = [opened(connections, callers, wave * COUNT + 1) for wave in (1, 2)]
    connections.opener(waves[0][1][0].port)
    gc.collect()
    assert not seen
