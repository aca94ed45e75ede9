"""The tests that every backend passes. Subclass :class:`KernelContract` in a test module and name the backend:

    class TestCpu(KernelContract):
        @pytest.fixture
        def backend(self):
            return resolve_backend("cpu")[1]

Every result is compared with an oracle that works element by element (tests/kernels/oracle.py). Integers, masks and
what is kept must be equal; sums may differ in their order. Sizes and device are class attributes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from tagc.codec.bitmap import unpack_bits
from tagc.codec.sparsify import draw_positions
from tests.kernels import oracle
from tests.kernels.cases import SEED, TIMED, Case, Inputs, make_cases, make_inputs, make_layout, make_table

BLOCK = 256


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal values and dtypes; NaN equals NaN, and 0.0 equals -0.0."""
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def assert_sums(actual: Tensor, expected: Tensor, rounding: float = 1e-5) -> None:
    """Equal but for the order of the additions and the rounding of their result."""
    expected = expected.cpu()
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    if expected.dtype == torch.bfloat16:
        rounding = 2**-7
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=rounding, atol=rounding * max(largest, 1e-6) / 4, equal_nan=True
    )


class KernelContract:
    """A backend against the oracle."""

    device: ClassVar[str] = "cpu"
    timed: ClassVar[bool] = True  # whether the benchmark times this backend here
    cases: ClassVar[list[Case]] = make_cases()
    decode_sizes: ClassVar[tuple[int, ...]] = (1, 33, 257, 5003, 12_289)
    decode_lanes: ClassVar[tuple[int | None, ...]] = (None, 7, 127, 251)

    @pytest.fixture
    def backend(self):
        raise NotImplementedError("name the backend to test")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", [self.mark(case, case == TIMED) for case in self.cases])
        if "decode_case" in metafunc.fixturenames:
            lanes = self.decode_lanes  # four, and five densities: each meets all sizes and all densities
            every = [
                (*each, lanes[n % len(lanes)])
                for n, each in enumerate(product(self.decode_sizes, (0.0, "one", 0.01, 0.15, 1.0)))
            ]
            largest = max(self.decode_sizes)
            metafunc.parametrize("decode_case", [self.mark(each, each[:2] == (largest, 0.15)) for each in every])

    def mark(self, value: object, is_timed: bool) -> ParameterSet:
        """A parameter, marked if it is what ``make bench QUICK=1`` is gated on."""
        return pytest.param(value, id=str(value), marks=[pytest.mark.timed] if is_timed and self.timed else [])

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device under test."""
        return tensor.clone().to(self.device)

    # --- sketch: encode -----------------------------------------------------------------------------------------

    def encode_sketch(self, backend, case: Case, inputs: Inputs):
        """(what the backend gave, its new carry and owed, what the oracle says)."""
        layout, device = make_layout(case), torch.device(self.device)
        carry, owed = self.put(inputs.carry_WN), self.put(inputs.owed_WB)
        encoded = backend.encode_sketch(
            self.put(inputs.gradient_WN),
            carry,
            owed,
            inputs.threshold_W1.to(device),
            decay=case.decay,
            rank=case.rank,
            layout=layout,
            table=make_table(layout, device),
            wire_dtype=case.wire_dtype,
            error_feedback=case.error_feedback,
        )
        x_WN = oracle.add_owed_residual(inputs.gradient_WN, inputs.carry_WN, inputs.owed_WB, case.decay)
        arguments = (x_WN, inputs.threshold_W1, case.rank, layout, SEED, case.error_feedback)
        return encoded, carry, owed, oracle.encode_sketch(*arguments)

    def check_encoded_sketch(self, backend, case: Case, inputs: Inputs, finite: bool = True) -> None:
        got, carry, owed, expected = self.encode_sketch(backend, case, inputs)
        assert_same(carry, expected.carry_WN.to(case.state_dtype))
        for name in ("index_WB", "own_N", "kept_W"):
            assert_same(getattr(got, name), getattr(expected, name))
        assert_same(owed, expected.owed_WB)
        if finite:
            assert_sums(got.cells_WS, expected.cells_WS.to(case.wire_dtype))
            assert_sums(got.residual_squared, expected.residual_squared.float(), rounding=1e-4)
        else:
            assert_same(got.cells_WS.isfinite(), expected.cells_WS.isfinite())
        assert got.cells_WS.dtype == case.wire_dtype
        assert not got.cells_WS[case.rank].any()

    def test_encode_sketch(self, backend, case):
        self.check_encoded_sketch(backend, case, make_inputs(case))

    @pytest.mark.parametrize("decay", [0.0, 1.0])
    @pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
    def test_encode_sketch_keeps_nan_and_sends_infinity(self, backend, decay, wire_dtype):
        case = Case(1021, 1.0, ranks=3, decay=decay, wire_dtype=wire_dtype, lanes=7)
        inputs = make_inputs(case)
        for w in range(case.ranks):
            inputs.gradient_WN[w, 5 + w] = torch.nan
            inputs.gradient_WN[w, 900 - w] = torch.inf
            inputs.gradient_WN[w, 500 + w] = -torch.inf
            inputs.carry_WN[w, 100:103] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        self.check_encoded_sketch(backend, case, inputs, finite=False)
        got, carry, owed, _ = self.encode_sketch(backend, case, inputs)
        peer = 0
        sent, kept = (unpack_bits(bits[peer].cpu(), case.numel) for bits in (got.index_WB, owed))
        assert not sent[5]
        assert kept[5]
        assert carry[peer, 5].isnan()
        assert sent[900]
        assert sent[500]

    @pytest.mark.parametrize("value", [0.0, 3.0, -1e-40])
    def test_encode_sketch_of_equal_values(self, backend, value):
        case = Case(1021, decay=0.0, lanes=7)
        inputs = make_inputs(case)
        inputs.gradient_WN.fill_(value)
        for threshold in (0.0, abs(value)):
            inputs.threshold_W1.fill_(threshold)
            self.check_encoded_sketch(backend, case, inputs)

    def test_encode_sketch_takes_one_threshold_for_all_shards(self, backend):
        case = Case(257, ranks=3)
        inputs = make_inputs(case)
        inputs.threshold_W1 = torch.tensor([0.4])
        self.check_encoded_sketch(backend, case, inputs)

    def test_add_residual(self, backend, case):
        inputs = make_inputs(case)
        expected = oracle.add_owed_residual(inputs.gradient_WN, inputs.carry_WN, inputs.owed_WB, case.decay)
        gradient = self.put(inputs.gradient_WN)
        got = backend.add_residual(gradient, self.put(inputs.carry_WN), self.put(inputs.owed_WB), case.decay)
        assert_same(got, expected)
        assert got.data_ptr() == gradient.data_ptr()

    # --- sketch: decode -----------------------------------------------------------------------------------------

    def make_received(self, numel: int, density: float | str, lanes: int | None, ranks: int = 3, ratio: float = 2.0):
        """(index_B, cells_S, own_N, layout) at the owner, rank 0, from encoders that send all their non-zeros."""
        case = Case(numel, density, ranks=ranks, lanes=lanes)
        layout, index, cells_S = make_layout(case, ratio), [0] * numel, 0.0
        for rank in range(1, ranks):
            x_1N = make_inputs(case, seed=100 * rank).gradient_WN[:1]
            sent = oracle.encode_sketch(x_1N, torch.zeros(1), -1, layout, SEED, error_feedback=True)
            index = [a | b for a, b in zip(index, oracle.read_bits(sent.index_WB[0], numel), strict=True)]
            cells_S = cells_S + sent.cells_WS[0]
        return oracle.write_bits(index), cells_S.float(), make_inputs(case).gradient_WN[0], layout

    def decode_sketch(self, backend, received, estimate: bool):
        """What the backend gives; it leaves what it received as it was."""
        index_B, cells_S, own_N, layout = received
        index, cells = self.put(index_B), self.put(cells_S)
        table = make_table(layout, torch.device(self.device))
        got = backend.decode_sketch(index, cells, self.put(own_N), layout=layout, table=table, estimate=estimate)
        assert_same(index, index_B)
        assert_same(cells, cells_S)
        return got

    def check_decoded_sketch(self, backend, received, estimate: bool):
        got = self.decode_sketch(backend, received, estimate)
        expected = oracle.decode_sketch(*received, SEED, estimate)
        for name in ("union", "peers_union", "unresolved", "unresolved_B"):
            assert_same(getattr(got, name), getattr(expected, name))
        assert_sums(got.total_N, expected.total_N.float(), rounding=1e-3)  # errors grow along chains of subtractions
        return got

    def test_decode_sketch(self, backend, decode_case):
        """Loads from 0 to 2: all is recovered below 0.8, and above it the same positions are left by all backends."""
        received = self.make_received(*decode_case)
        for estimate in (True, False):
            self.check_decoded_sketch(backend, received, estimate)

    @pytest.mark.parametrize("ratio", [0.3, 1.0, 6.0, 20.0])
    def test_decode_sketch_at_other_ratios(self, backend, ratio):
        self.check_decoded_sketch(backend, self.make_received(9001, 0.04, 13, ratio=ratio), estimate=False)

    def test_decode_sketch_of_positions_that_cancel(self, backend):
        """Two peers send opposite values: the union has the position, its sum is zero."""
        index_B, cells_S, own_N, layout = self.make_received(4001, 0.1, 7)
        got = self.check_decoded_sketch(backend, (index_B, torch.zeros_like(cells_S), own_N, layout), estimate=False)
        assert got.peers_union > 100
        assert_same(got.total_N, own_N)

    def test_decode_sketch_of_nan_leaves_the_rest_alone(self, backend):
        """A NaN cell spoils only values that can depend on it, and no mask."""
        received = self.make_received(4001, 0.02, 7)
        received[1][17] = torch.nan
        got = self.decode_sketch(backend, received, estimate=False)
        expected = oracle.decode_sketch(*received, SEED, estimate=False)
        assert_same(got.unresolved_B, expected.unresolved_B)
        total = got.total_N.cpu()
        assert total.isfinite().float().mean() > 0.99
        both = total.isfinite() & expected.total_N.isfinite()
        assert_sums(total[both], expected.total_N[both].float())

    def test_decode_sketch_gives_the_same_bits_again(self, backend):
        received = self.make_received(9001, 0.17, 31)
        first, second = (self.decode_sketch(backend, received, estimate=True) for _ in range(2))
        for name in first._fields:
            assert torch.equal(getattr(first, name), getattr(second, name))

    # --- packed values ------------------------------------------------------------------------------------------

    def check_encoded_packed(self, backend, case: Case, inputs: Inputs, capacity: int, finite: bool = True):
        x_WN = oracle.add_old_residual(inputs.gradient_WN, inputs.carry_WN, case.decay)
        index_WB, values_WC, own_N, kept_W, residual_WN = oracle.encode_packed(
            x_WN, inputs.threshold_W1, case.rank, capacity, case.wire_dtype, case.error_feedback
        )
        state = self.put(inputs.carry_WN)
        got = backend.encode_packed(
            self.put(inputs.gradient_WN),
            state,
            self.put(inputs.threshold_W1),
            decay=case.decay,
            rank=case.rank,
            capacity=capacity,
            wire_dtype=case.wire_dtype,
            error_feedback=case.error_feedback,
        )
        assert_same(got.index_WB, index_WB)
        assert_same(got.values_WC, values_WC)
        assert_same(got.own_N, own_N)
        assert_same(got.kept_W, kept_W)
        assert_same(state, residual_WN.to(case.state_dtype))
        if finite:
            assert_sums(got.residual_squared, residual_WN.square().sum(), rounding=1e-2)
        return got

    @pytest.mark.parametrize("room", [1.0, 0.3])
    def test_encode_packed(self, backend, case, room):
        """With room for all, and with too little: what does not fit stays in the residual."""
        inputs = make_inputs(case)
        capacity = max(1, round(room * case.numel * (0.5 if room < 1 else 1)))
        self.check_encoded_packed(backend, case, inputs, capacity)

    @pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
    def test_encode_packed_keeps_nan_and_sends_infinity(self, backend, wire_dtype):
        case = Case(1021, 1.0, ranks=3, wire_dtype=wire_dtype)
        inputs = make_inputs(case)
        for w in range(case.ranks):
            inputs.gradient_WN[w, 5 + w] = torch.nan
            inputs.gradient_WN[w, 900 - w] = torch.inf
        got = self.check_encoded_packed(backend, case, inputs, 1021, finite=False)
        sent = unpack_bits(got.index_WB[0].cpu(), case.numel)
        assert not sent[5]
        assert sent[900]

    def test_decode_packed(self, backend, case):
        index_WB, values_WC, own_N = [], [], None
        capacity = case.numel
        for rank in range(case.ranks):
            inputs = make_inputs(case, seed=100 * rank)
            encoded = oracle.encode_packed(
                inputs.gradient_WN, inputs.threshold_W1, rank, capacity, case.wire_dtype, True
            )
            index_WB.append(encoded[0][0])
            values_WC.append(encoded[1][0])
            own_N = encoded[2] if rank == 0 else own_N
        index_WB, values_WC = torch.stack(index_WB), torch.stack(values_WC)
        got = backend.decode_packed(self.put(index_WB), self.put(values_WC), self.put(own_N))
        total_N, union = oracle.decode_packed(index_WB, values_WC, own_N)
        assert_same(got.total_N, total_N)
        assert int(got.union) == union

    # --- blocks -------------------------------------------------------------------------------------------------

    def check_encoded_blocks(self, backend, case: Case, inputs: Inputs, bits: int) -> None:
        x_WN = oracle.add_old_residual(inputs.gradient_WN, inputs.carry_WN, case.decay)
        codes_WM, scales_WK, own_N, residual_WN = oracle.encode_blocks(x_WN, case.rank, bits, BLOCK)
        state = self.put(inputs.carry_WN)
        gradient = self.put(inputs.gradient_WN)
        got = backend.encode_blocks(gradient, state, decay=case.decay, rank=case.rank, bits=bits, block=BLOCK)
        assert_same(got.codes_WM, codes_WM)
        assert_same(got.scales_WK, scales_WK)
        assert_same(got.own_N, own_N)
        # q * scale may be rounded before the subtraction, or not (fused multiply-add).
        is_bf16 = case.state_dtype == torch.bfloat16
        largest = x_WN[x_WN.isfinite()].abs().max().item()
        torch.testing.assert_close(
            state.cpu().float(), residual_WN, rtol=2**-8 if is_bf16 else 0, atol=2**-22 * largest, equal_nan=True
        )
        if residual_WN.isfinite().all():
            assert_sums(got.residual_squared, residual_WN.square().sum(), rounding=1e-2)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_encode_blocks(self, backend, case, bits):
        self.check_encoded_blocks(backend, case, make_inputs(case), bits)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_a_block_that_is_not_finite_is_not_sent(self, backend, bits, value):
        case = Case(1021, 1.0, ranks=3)
        inputs = make_inputs(case)
        inputs.gradient_WN[:, 300] = value
        self.check_encoded_blocks(backend, case, inputs, bits)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_halves_round_to_even(self, backend, bits):
        case = Case(600, decay=0.0)
        inputs = make_inputs(case)
        inputs.gradient_WN[:] = torch.arange(600) % 13 / 2 - 3.0
        inputs.gradient_WN[:, ::BLOCK] = 127.0 if bits == 8 else 7.0  # the scale is 1
        self.check_encoded_blocks(backend, case, inputs, bits)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_decode_blocks(self, backend, case, bits):
        parts = []
        for rank in range(case.ranks):
            inputs = make_inputs(case, seed=100 * rank)
            parts.append(oracle.encode_blocks(inputs.gradient_WN, rank, bits, BLOCK))
        codes_WM, scales_WK = (torch.stack([part[field][0] for part in parts]) for field in (0, 1))
        own_N = parts[0][2]
        got = backend.decode_blocks(self.put(codes_WM), self.put(scales_WK), self.put(own_N), bits=bits, block=BLOCK)
        assert_sums(got, oracle.decode_blocks(codes_WM, scales_WK, own_N, bits, BLOCK), rounding=1e-6)

    # --- thresholds ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("owes_all", [True, False])
    def test_sample_values(self, backend, case, owes_all):
        """At the positions given, in any order and twice too, exactly what an encoder computes."""
        case = replace(case, decay=0.9 * case.decay)  # a product that is rounded, unless it is fused
        inputs = make_inputs(case)
        inputs.carry_WN[:, -1] = torch.nan
        owed = torch.full_like(inputs.owed_WB, 255) if owes_all else inputs.owed_WB
        position = torch.cat([draw_positions(case.numel, 700, 5, torch.device("cpu")), torch.zeros(3).long()])
        x_WN = inputs.gradient_WN.clone()
        if case.decay:
            x_WN = oracle.add_owed_residual(x_WN, inputs.carry_WN, owed, case.decay)
        gradient, state = self.put(inputs.gradient_WN), self.put(inputs.carry_WN)
        bits = None if owes_all else self.put(owed)
        got = backend.sample_values(gradient, state, bits, self.put(position), case.decay)
        assert_same(got, x_WN[:, position])
        assert_same(gradient, inputs.gradient_WN)
        assert_same(state, inputs.carry_WN)

    def test_a_threshold_among_nan_and_infinity(self, backend):
        """They count as the largest, so that what is sound is not sent in their place."""
        x = torch.tensor([[1.0, torch.nan, -torch.inf, 2.0, -3.0, 0.0], [torch.nan] * 6])
        for share in (0.2, 0.5, 0.7, 1.0):
            assert_same(backend.threshold_exact(self.put(x), share), oracle.threshold_exact(x, share))

    @pytest.mark.parametrize("density", [0.0, "one", 0.3, 1.0])
    def test_thresholds(self, backend, density):
        case = Case(20_011, density, ranks=3)
        x = make_inputs(case).gradient_WN
        for share in (0.001, 0.2, 1.0):
            assert_same(backend.threshold_exact(self.put(x), share), oracle.threshold_exact(x, share))
            lognormal = backend.threshold_lognormal(self.put(x), share)
            torch.testing.assert_close(lognormal.cpu(), oracle.threshold_lognormal(x, share), rtol=1e-4, atol=1e-7)
