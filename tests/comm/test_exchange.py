"""The exchange between real gloo ranks: values, bytes, pacing."""

import time

import pytest
import torch
import torch.distributed as dist

from tagc.codec.bitmap import pack_bits, unpack_bits
from tagc.comm.exchange import PIECE_BYTES, Exchange
from tagc.compressors.base import Part
from tagc.network.pacing import PacedLink
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def make_exchange(rate=None, latency_s=0.0):
    return Exchange(PacedLink(rate, latency_s), CPU), dist.group.WORLD


def values_of(rank, ranks, numel):
    return torch.randn(ranks, numel, generator=torch.Generator().manual_seed(rank))


def reduce_everything(rank, ranks, numel):
    """A value part in fp32, one in bf16, an index part and a part that is only moved, in one exchange."""
    exchange, group = make_exchange()
    rows = [values_of(r, ranks, numel) for r in range(ranks)]
    masks = [row > 0.5 for row in rows]
    parts = [
        Part(pack_bits(masks[rank]), "or", "index"),
        Part(rows[rank], "sum", "value"),
        Part(rows[rank].bfloat16(), "sum", "value"),
        Part(masks[rank].view(torch.int8), "stack", "value"),
    ]
    index, total, rounded, stacked = exchange.reduce_scatter(parts, group)
    assert torch.equal(unpack_bits(index, numel), torch.stack(masks).any(dim=0)[rank]), "OR of overlapping masks"
    expected, expected_rounded = rows[0][rank].clone(), rows[0][rank].bfloat16().float()
    for row in rows[1:]:  # in rank order, in fp32
        expected += row[rank]
        expected_rounded += row[rank].bfloat16().float()
    assert total.dtype == rounded.dtype == torch.float32
    assert torch.equal(total, expected)
    assert torch.equal(rounded, expected_rounded)
    assert torch.equal(stacked, torch.stack([mask[rank] for mask in masks]).view(torch.int8))
    peers = ranks - 1
    assert exchange.take_sent_bytes() == {"index": peers * -(-numel // 8), "value": peers * numel * 7}
    assert exchange.take_sent_bytes() == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 33, PIECE_BYTES // 4 + 1])
def test_parts_are_reduced_and_counted(ranks, numel):
    run_ranks(reduce_everything, ranks, ranks, numel)


def gather_shards(rank, ranks, numel, dtype):
    exchange, group = make_exchange()
    shards = [values_of(r, 1, numel)[0].to(dtype) for r in range(ranks)]
    for in_place in (False, True):  # FSDP2 passes a view of the output
        output = torch.full((ranks * numel,), torch.nan, dtype=dtype)
        own = output.view(ranks, numel)[rank].copy_(shards[rank]) if in_place else shards[rank]
        exchange.all_gather(output, own, group, "param")
        assert torch.equal(output, torch.cat(shards))
    assert exchange.take_sent_bytes().get("param", 0) == 2 * (ranks - 1) * numel * dtype.itemsize


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("numel", "dtype"), [(1, torch.float32), (33, torch.bfloat16), (700_001, torch.float32)])
def test_shards_are_gathered_in_rank_order(ranks, numel, dtype):
    run_ranks(gather_shards, ranks, ranks, numel, dtype)


def refuse_wrong_shapes(rank):
    exchange, group = make_exchange()
    for tensor in (torch.zeros(3, 5), torch.zeros(5, 2).T):
        with pytest.raises(ValueError, match="one per rank"):
            exchange.reduce_scatter([Part(tensor, "sum", "value")], group)


def test_a_part_of_another_shape_is_refused():
    run_ranks(refuse_wrong_shapes, 2)


def time_paced_exchange(rank, ranks, numel, rate, latency_s):
    """When this rank began to send and when it had received: clock times, the same clock in every process."""
    exchange, group = make_exchange(rate, latency_s)
    part = Part(torch.zeros(ranks, numel), "sum", "value")
    exchange.reduce_scatter([part], group, diagnostic=True)  # connections are made at the first message
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)  # a late sender: its receivers must still wait for its bytes to pass the link
    begin_s = time.monotonic()
    exchange.reduce_scatter([part], group)
    return begin_s, time.monotonic(), exchange.take_sent_bytes()["value"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_capped_exchange_takes_at_least_its_bytes_and_latency(ranks):
    numel, rate, latency_s = 300_000, 10e6, 0.05
    # A sender takes its receivers in turn, so all but the last of them have their last piece a little earlier.
    early_bytes = (ranks - 2) * (numel * 4 % PIECE_BYTES)
    needed_s = ((ranks - 1) * numel * 4 - early_bytes) / rate + latency_s
    results = run_ranks(time_paced_exchange, ranks, ranks, numel, rate, latency_s)
    last_begin_s = max(begin_s for begin_s, _, _ in results)
    for _, end_s, counted in results:
        assert end_s - last_begin_s >= needed_s
        assert counted == (ranks - 1) * numel * 4


class RefusingLink(PacedLink):
    """A capped link that nobody may use."""

    def reserve(self, direction, nbytes):
        raise AssertionError("a diagnostic reserved time on the link")


def run_diagnostic(rank):
    exchange = Exchange(RefusingLink(1.0), CPU)
    exchange.reduce_scatter([Part(torch.zeros(2, 1000), "sum", "value")], dist.group.WORLD, diagnostic=True)
    exchange.metered = False
    exchange.all_gather(torch.zeros(2000), torch.zeros(1000), dist.group.WORLD, "param")
    return exchange.take_sent_bytes()


def test_diagnostics_and_validation_are_neither_counted_nor_paced():
    assert run_ranks(run_diagnostic, 2) == [{}, {}]
