"""The transport's measurement: the cap is in force from the first byte, and times become rates."""

from __future__ import annotations

import pytest

from experiments.transport.measure import configure, summarise
from tagc.network import build_link


def test_the_link_is_capped_from_the_start():
    config = configure(200.0)
    config.network.name = "paced"  # needs no rights
    assert build_link(config.bandwidth, config.network).rate_bytes_per_s == 25e6


def test_a_rate_is_that_of_the_median_time():
    timing = {"what": "all_gather", "transport": "exchange", "payload_bytes": 2_500_000, "wire_bytes": 2_600_000}
    (line,) = summarise(200.0, [timing | {"seconds": seconds} for seconds in (0.1, 0.125, 0.2)])
    assert float(line["payload_mbps"]) == pytest.approx(160) and float(line["payload_frac"]) == pytest.approx(0.8)
    assert line["n"] == 3 and float(line["wire_mb"]) == pytest.approx(2.6)
