"""The modelled link, on a clock that the test turns."""

import threading
import time

import pytest

from tagc.config import BandwidthConfig, NetworkConfig
from tagc.network import PacedLink, build_link
from tagc.network.link import WIRE_BYTES_PER_BYTE


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def make_link(payload_rate, latency_s=0.0):
    clock = Clock()
    rate = None if payload_rate is None else payload_rate * WIRE_BYTES_PER_BYTE
    return PacedLink(rate, latency_s, clock=lambda: clock.now_s, sleep=clock.sleep), clock


def test_bytes_take_their_time_and_queue():
    link, clock = make_link(1000.0)
    assert link.reserve("send", 500) == pytest.approx(100.5)
    assert link.reserve("send", 500) == pytest.approx(101.0)  # behind the first
    assert link.reserve("receive", 500) == pytest.approx(100.5)  # full duplex: the other direction is free
    link.wait_until(101.0)
    assert clock.now_s == pytest.approx(101.0)
    clock.now_s = 200.0
    assert link.reserve("send", 1000) == pytest.approx(201.0)  # an idle link saves nothing up


def test_latency_delays_but_does_not_occupy_the_link():
    link, _ = make_link(1000.0, latency_s=0.25)
    assert link.reserve("send", 1000) == pytest.approx(101.25)
    assert link.reserve("send", 1000) == pytest.approx(102.25)


def test_no_cap_is_no_delay():
    link, clock = make_link(None)
    assert not link.is_capped
    link.wait_until(link.reserve("send", 10**12))
    assert clock.now_s == 100.0


def test_the_rate_can_change_while_ranks_run():
    link, _ = make_link(1000.0)
    assert link.reserve("send", 1000) == pytest.approx(101.0)
    link.set_rate(100.0 * WIRE_BYTES_PER_BYTE, latency_s=0.5)
    assert link.reserve("send", 1000) == pytest.approx(111.5)  # behind what was queued at the old rate


def test_concurrent_exchanges_share_the_link():
    """Two threads with 5 kB each on a 100 kB/s link: together they need 0.1 s, however they interleave."""
    link = PacedLink(100_000.0)

    def send():
        for _ in range(5):
            link.wait_until(link.reserve("send", 1000))

    begin_s = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin_s >= 0.1


@pytest.mark.parametrize(("dilation", "rate"), [(1.0, 1.25e9), (100.0, 1.25e7)])
def test_ten_gigabit_in_bytes_per_second(dilation, rate):
    link = build_link(BandwidthConfig("10gbps", 10_000.0), NetworkConfig(latency_ms=0.1, time_dilation=dilation))
    assert link.rate_bytes_per_s == pytest.approx(rate)
    assert link.latency_s == pytest.approx(1e-4 * dilation)
