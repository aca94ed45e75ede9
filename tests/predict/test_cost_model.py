"""The model against schedules that can be counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tagc.predict.cost_model import LinkCost, UnitCost, predict_iteration_ms

MB_PER_S = LinkCost(ranks=2, rate_bytes_per_s=1e6, wire_bytes_per_byte=1)  # 1,000 bytes take 1 ms


def make_units(count: int = 2, **changes: float) -> list[UnitCost]:
    """forward 8, backward 16, gather 4 ms, freed after forward, gradients 10 ms, no codec."""
    values = {"forward_ms": 8, "backward_ms": 16, "encode_ms": 0, "decode_ms": 0, "gather_bytes": 4000}
    values |= {"gradient_bytes": 10_000, "is_gathered_again": True} | changes
    return [UnitCost(**values)] * count


def test_without_a_peer_only_the_processor_counts() -> None:
    assert predict_iteration_ms(make_units(encode_ms=1, decode_ms=2), LinkCost(ranks=1)) == 2 * (8 + 16 + 1 + 2)


def test_gathers_are_waited_for_and_gradients_hide_behind_the_next_unit() -> None:
    # forward 2 (4 + 8), backward 2 (4 + 16); the first exchange hides, the last one does not
    assert predict_iteration_ms(make_units(), MB_PER_S) == pytest.approx(24 + 40 + 10)
    # With longer exchanges the link is the limit from the end of the first backward on: two gathers, three exchanges.
    units = make_units(3, gradient_bytes=20_000)
    assert predict_iteration_ms(units, MB_PER_S) == pytest.approx(36 + (4 + 16) + 2 * 4 + 3 * 20)


def test_without_overlap_every_exchange_is_waited_for() -> None:
    assert predict_iteration_ms(make_units(), MB_PER_S, overlap=False) == pytest.approx(24 + 40 + 20)


def test_the_reducer_is_one_thread_and_its_work_takes_the_processor() -> None:
    kept = make_units(3, gather_bytes=0, encode_ms=2, decode_ms=2, gradient_bytes=40_000)
    # forward 24; the first backward 16, then three times encode, exchange, decode in line: nothing else is longer. The
    # first encoding begins when a slice of the computation (2 ms) gives way.
    assert predict_iteration_ms(kept, MB_PER_S) == pytest.approx(24 + 16 + 2 + 3 * (2 + 40 + 2))
    fast = make_units(3, gather_bytes=0, encode_ms=2, decode_ms=2, gradient_bytes=1)
    assert predict_iteration_ms(fast, MB_PER_S) == pytest.approx(3 * (8 + 16 + 4), abs=0.1)


def test_prefetch_hides_gathers_behind_the_unit_before() -> None:
    units = make_units(4, gradient_bytes=0)
    in_line = predict_iteration_ms(units, MB_PER_S)
    ahead = predict_iteration_ms(units, MB_PER_S, prefetch=True)
    assert in_line == pytest.approx(4 * (8 + 16) + 8 * 4)
    assert ahead == pytest.approx(4 * (8 + 16) + 4)  # all but the first
    slow_link = replace(MB_PER_S, rate_bytes_per_s=1e5)  # gathers of 40 ms: the link is the limit
    assert predict_iteration_ms(units, slow_link, prefetch=True) == pytest.approx(8 * 40 + 16)


def test_accumulation_gathers_every_time_or_once_and_reduces_once() -> None:
    units = make_units(gradient_bytes=0)
    assert predict_iteration_ms(units, MB_PER_S, micro_steps=3) == pytest.approx(3 * (2 * 24 + 4 * 4))
    once = predict_iteration_ms(units, MB_PER_S, micro_steps=3, keeps_gathered=True)
    assert once == pytest.approx(3 * 2 * 24 + 2 * 4)
    reduced = predict_iteration_ms(make_units(), MB_PER_S, micro_steps=3, keeps_gathered=True)
    assert reduced == pytest.approx(once + 10)


def test_an_exchange_costs_messages_bytes_and_latency() -> None:
    link = LinkCost(ranks=5, rate_bytes_per_s=1e6, message_ms=0.1)
    assert link.exchange_ms(4 * (2**20 + 1)) == pytest.approx(0.1 * 4 * 2 + 4 * (2**20 + 1) / 1e3 * 1514 / 1448)
    assert link.exchange_ms(0) == 0  # noop sends nothing, so it waits for nothing
    capped = LinkCost(ranks=2, rate_bytes_per_s=math.inf, transport_bytes_per_s=2e6)
    assert capped.exchange_ms(2000) == pytest.approx(1)
    late = replace(MB_PER_S, latency_ms=3)
    extra = predict_iteration_ms(make_units(gradient_bytes=0), late) - predict_iteration_ms(
        make_units(gradient_bytes=0), MB_PER_S
    )
    assert extra == pytest.approx(4 * 3)
