"""What the extrapolation feeds to the model, and how it reads a crossover from it."""

from __future__ import annotations

import math

import pytest

from tagc.cli.entry import compose_config
from tagc.predict.answer import find_last
from tagc.predict.inputs import CodecTimes, build_workload, compute_shares, make_units

VOCAB = 4096


def test_a_units_times_add_up_to_the_steps() -> None:
    config = compose_config(["compressor=packed", "trainer.micro_batch=4", "trainer.reshard_after_forward=false"])
    workload = build_workload(config, VOCAB)
    shares = compute_shares(workload)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["wte"] == shares["root"] == 0  # a lookup multiplies nothing
    # 6 matrix elements and, in a block, attention's 12 T C: 442,368 and 294,912 against 786,432 in the head
    assert shares["blocks.0"] / shares["head"] == pytest.approx(
        (6 * 442_368 + 12 * 128 * 192) / (6 * 786_432), rel=0.01
    )
    units = make_units(workload, compute_ms=300.0, codec=CodecTimes(10.0, 5.0, 2, 0.2), slowdown=2.0)
    assert sum(u.forward_ms + u.backward_ms for u in units) == pytest.approx(300 / 3)  # of each of three micro-batches
    assert sum(u.encode_ms for u in units) == pytest.approx(2 * 10e-6 * workload.numel)
    assert sum(u.decode_ms for u in units) == pytest.approx(2 * 5e-6 * workload.numel)
    assert not any(u.is_gathered_again for u in units)


def test_a_bucket_that_goes_dense_is_not_decoded() -> None:
    config = compose_config(["compressor=tagc", "cluster.ranks=4"])
    units = make_units(build_workload(config, VOCAB), 100.0, CodecTimes(10.0, 5.0, 2, 0.2))
    decoded = [unit.decode_ms > 0 for unit in units]
    assert decoded == [True] + [False] * 6  # the root has nothing that the policy compresses


def test_the_crossover_is_the_last_win() -> None:
    assert find_last(lambda gbps: gbps < 7) == pytest.approx(7, rel=0.02)
    assert find_last(lambda gbps: False) is None
    assert find_last(lambda gbps: True) == math.inf
    assert find_last(lambda gbps: 2 < gbps < 50) == pytest.approx(50, rel=0.02)  # hidden below, not above
