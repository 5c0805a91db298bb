"""The time in which the model has had work."""

import time

from sharpen.gateway.meter import BusyClock


def test_overlapping_requests_count_once_and_pauses_not_at_all():
    """Red when `__exit__` stops the clock while another request is open, or never (gateway/meter.py)."""
    clock = BusyClock()
    began = time.perf_counter()
    with clock:
        with clock:
            time.sleep(0.02)
        time.sleep(0.02)
        assert clock.seconds() >= 0.04
    open_s = time.perf_counter() - began
    counted = clock.seconds()
    assert 0.04 <= counted <= open_s
    time.sleep(0.02)
    assert clock.seconds() == counted
