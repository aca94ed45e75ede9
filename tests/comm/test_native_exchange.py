"""The exchange's other branch, native collectives, on torch's fake process group: shapes and bytes, not values."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tagc.comm.exchange import Exchange
from tagc.compressors.base import Part
from tagc.network.pacing import PacedLink
from tests.comm.harness import TinyRun, tiny_config

RANKS = 8


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_parts_keep_their_shapes_and_are_counted(fake_group):
    exchange = Exchange(PacedLink(None), torch.device("cpu"))
    parts = [
        Part(torch.ones(RANKS, 5), "sum", "value"),
        Part(torch.ones(RANKS, 3, 2, dtype=torch.bfloat16), "sum", "value"),
        Part(torch.ones(RANKS, 7, dtype=torch.uint8), "or", "index"),
    ]
    shapes = [(tuple(t.shape), t.dtype) for t in exchange.reduce_scatter(parts, fake_group)]
    assert shapes == [((5,), torch.float32), ((3, 2), torch.float32), ((7,), torch.uint8)]
    output = torch.zeros(RANKS * 4)
    exchange.all_gather(output, torch.ones(4), fake_group, "param")
    peers = RANKS - 1
    assert exchange.take_sent_bytes() == {"value": peers * (20 + 12), "index": peers * 7, "param": peers * 16}


@pytest.mark.parametrize("name", ["noop", "fsdp", "bf16", "tagc"])
def test_a_training_step_runs_and_sends_the_closed_form(fake_group, name):
    run = TinyRun(tiny_config(name, RANKS, ratio=1.05))
    run.backward(0)
    sent = run.exchange.take_sent_bytes()
    assert {kind: sent.get(kind, 0) for kind in ("value", "index")} == run.sync.expected_bytes(0)
