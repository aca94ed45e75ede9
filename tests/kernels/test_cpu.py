"""The numba backend: the contract, what it refuses, threads, and peeling near its threshold."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from tagc.codec.bitmap import bitmap_bytes, unpack_bits
from tagc.codec.hashing import build_hash_table, plan_layout
from tagc.kernels import cpu, reference
from tagc.kernels.cpu.arrays import as_array, check_numel
from tests.kernels.cases import Case, make_inputs, make_layout, make_table
from tests.kernels.contract import KernelContract

CPU = torch.device("cpu")


class TestCpu(KernelContract):
    @pytest.fixture
    def backend(self):
        return cpu


def encode(gradient, carry, owed, layout, table, wire_dtype=torch.float32):
    options = {"decay": 1.0, "rank": 0, "wire_dtype": wire_dtype, "error_feedback": True}
    return cpu.encode_sketch(gradient, carry, owed, torch.zeros(1), layout=layout, table=table, **options)


class TestRefusals:
    """What does not fit is an error that names it."""

    def setup_method(self):
        self.layout = plan_layout(257, 2.0)
        self.table = make_table(self.layout, CPU)
        self.state = torch.zeros(2, 257), torch.zeros(2, bitmap_bytes(257), dtype=torch.uint8)

    def test_dtype(self):
        with pytest.raises(ValueError, match=r"gradient as torch.float32, got torch.float64"):
            encode(torch.zeros(2, 257, dtype=torch.float64), *self.state, self.layout, self.table)
        with pytest.raises(ValueError, match=r"cells as torch.float32 or torch.bfloat16, got torch.float16"):
            encode(torch.zeros(2, 257), *self.state, self.layout, self.table, wire_dtype=torch.float16)

    def test_memory_layout(self):
        with pytest.raises(ValueError, match="gradient contiguous"):
            encode(torch.zeros(257, 2).T, *self.state, self.layout, self.table)

    def test_device(self):
        with pytest.raises(ValueError, match="gradient is on meta"):
            as_array(torch.zeros(3, device="meta"), "gradient", torch.float32)

    def test_shapes(self):
        with pytest.raises(ValueError, match="must both be"):
            encode(torch.zeros(2, 256), *self.state, self.layout, self.table)
        with pytest.raises(ValueError, match="does not fit"):
            index, cells = torch.zeros(33, dtype=torch.uint8), torch.zeros(self.layout.sketch_numel)
            cpu.decode_sketch(index, cells, torch.zeros(1), layout=self.layout, table=self.table, estimate=False)
        with pytest.raises(ValueError, match="do not fit a shard of 9"):
            cpu.decode_packed(torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 9), torch.zeros(9))
        with pytest.raises(ValueError, match="do not fit a shard of 9"):
            codes = torch.zeros(1, 8, dtype=torch.uint8)
            cpu.decode_blocks(codes, torch.zeros(1, 1), torch.zeros(9), bits=8, block=256)

    def test_a_table_of_another_layout(self):
        other = plan_layout(300, 2.0)
        with pytest.raises(ValueError, match="another layout"):
            encode(torch.zeros(2, 257), *self.state, self.layout, make_table(other, CPU))

    def test_more_rows_in_a_cell_than_a_byte_counts(self):
        layout = replace(plan_layout(300, 2.0), cells=1)
        state = torch.zeros(2, 300), torch.zeros(2, bitmap_bytes(300), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"at most 255 rows per cell, got 300; lower compressor.ratio"):
            encode(torch.zeros(2, 300), *state, layout, build_hash_table(300, 1, 0, CPU))

    def test_more_elements_than_an_int32_counts(self):
        check_numel(2**31 - 1)
        with pytest.raises(ValueError, match="2147483648 elements in one shard"):
            check_numel(2**31)

    def test_an_odd_block_of_nibbles(self):
        with pytest.raises(ValueError, match="even number"):
            cpu.encode_blocks(torch.zeros(2, 9), torch.zeros(2, 9), decay=0.0, rank=0, bits=4, block=3)


def test_bits_behind_the_last_element_reach_no_other_memory():
    memory = torch.zeros(128)
    index = torch.full((1, 2), 255, dtype=torch.uint8)
    total, union = cpu.decode_packed(index, torch.ones(1, 16), memory[:9])
    assert total.tolist() == [1.0] * 9
    assert not memory[9:].any()
    del union


@pytest.mark.parametrize(("ratio", "goes_further"), [(1.72, True), (1.75, False)])  # loads 0.857 and 0.872
def test_near_its_threshold_peeling_goes_on_where_the_reference_stops(ratio, goes_further):
    """What the reference resolves is resolved, with the right values; what is left cannot be peeled by anybody."""
    case = Case(60_013, 0.5, ranks=2, decay=0.0, wire_dtype=torch.float32)
    layout = make_layout(case, ratio)
    table = make_table(layout, CPU)
    gradient = make_inputs(case).gradient_WN.mul(1000).round()
    sent = encode(gradient.clone(), torch.zeros(2, 60_013), torch.zeros(2, 7502, dtype=torch.uint8), layout, table)
    arguments = {"layout": layout, "table": table, "estimate": False}
    got = cpu.decode_sketch(sent.index_WB[1], sent.cells_WS[1], torch.zeros(60_013), **arguments)
    expected = reference.decode_sketch(sent.index_WB[1], sent.cells_WS[1], torch.zeros(60_013), **arguments)
    left, left_expected = (unpack_bits(each.unresolved_B, 60_013) for each in (got, expected))
    assert left_expected.sum() > 1000
    assert not (left & ~left_expected).any()
    assert torch.equal(left, left_expected) != goes_further
    resolved = unpack_bits(sent.index_WB[1], 60_013) & ~left
    assert torch.equal(got.total_N[resolved], gradient[1][resolved])
    assert is_stuck(left, layout, table)


def is_stuck(left_N, layout, table):
    """Whether every cell holds none or at least two of these elements."""
    position = left_N.nonzero().squeeze(1)
    row, lane = position // layout.lanes, position % layout.lanes
    for h in range(3):
        count = torch.bincount(table.cell_HR[h, row] * layout.lanes + lane)
        if (count == 1).any():
            return False
    return True


def test_threads_do_not_disturb_each_other():
    """Compiled code runs without the interpreter lock, and keeps no state between calls."""
    case = Case(100_003, 0.3, decay=0.0)
    layout = make_layout(case)
    table, inputs = make_table(layout, CPU), make_inputs(case)

    def work(results):
        for _ in range(4):
            gradient, carry, owed = inputs.gradient_WN.clone(), inputs.carry_WN.clone(), inputs.owed_WB.clone()
            results.append(encode(gradient, carry, owed, layout, table))

    first, second = [], []
    threads = [threading.Thread(target=work, args=(results,)) for results in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in (first, second):
        for each in results:
            for name in each._fields:
                assert torch.equal(getattr(each, name), getattr(first[0], name))
    assert len(second) == 4
