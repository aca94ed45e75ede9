"""The Triton backend against the contract, compiled on a GPU or interpreted elsewhere, and what is its own."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from tagc.codec import peel as reference_peel
from tagc.codec.sparsify import draw_positions
from tagc.errors import UserError
from tagc.kernels import reference
from tests.kernels.cases import Case, make_cases, make_inputs, make_layout, make_table
from tests.kernels.contract import KernelContract, assert_same
from tests.kernels.triton_backend import DEVICE, backend, launch, peel

ON_GPU = DEVICE == "cuda"


def test_the_kernels_can_run_here():
    """Without a GPU this fails if something imported Triton before the interpreter was asked for."""
    assert launch.INTERPRETED is not ON_GPU
    assert launch.explain_unusable(torch.device(DEVICE)) is None


class TestTriton(KernelContract):
    """The interpreter is slow: without a GPU, every third case in tiles that hold more, and fewer launched rounds."""

    device = DEVICE
    timed = ON_GPU
    cases = make_cases() if ON_GPU else make_cases()[::3]
    decode_sizes = KernelContract.decode_sizes if ON_GPU else (1, 2503)
    decode_lanes = KernelContract.decode_lanes if ON_GPU else (7, 251)

    @pytest.fixture
    def backend(self, monkeypatch):
        if not ON_GPU:
            monkeypatch.setattr(launch, "PEEL_WORDS", 4096)
            monkeypatch.setattr(launch, "PEEL_BYTES", 4096)
            monkeypatch.setattr(launch, "LAUNCHED_ROUNDS", 6)
        return backend


@functools.cache
def _inputs_on_device(case: Case) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(case)
    return tuple(t.to(DEVICE) for t in (inputs.gradient_WN, inputs.carry_WN, inputs.owed_WB, inputs.threshold_W1))


def encode_inputs(case: Case) -> list[torch.Tensor]:
    """Fresh copies, on the device, of gradient, carry, owed and threshold."""
    return [tensor.clone() for tensor in _inputs_on_device(case)]


def encode_sketch(case: Case):
    """(what encode_sketch gives, the inputs it changed, layout and table for a decoder)."""
    layout = make_layout(case)
    table = make_table(layout, torch.device(DEVICE))
    tensors = encode_inputs(case)
    encoded = backend.encode_sketch(
        *tensors,
        decay=case.decay,
        rank=case.rank,
        layout=layout,
        table=table,
        wire_dtype=case.wire_dtype,
        error_feedback=True,
    )
    return encoded, tensors, {"layout": layout, "table": table}


def decode_sketch(encoded, sizes, estimate=False):
    return backend.decode_sketch(
        encoded.index_WB[0], encoded.cells_WS[0].float(), encoded.own_N.clone(), **sizes, estimate=estimate
    )


# Several tiles of every kernel, in production block sizes.
LARGE = Case(4500, 0.1, ranks=3, wire_dtype=torch.float32, state_dtype=torch.bfloat16, lanes=31)


class TestPeeling:
    @pytest.mark.parametrize("launched", [0, 3])
    def test_rounds_launched_and_rounds_in_one_program_give_the_same_bits(self, launched, monkeypatch):
        encoded, _, sizes = encode_sketch(LARGE)
        expected = decode_sketch(encoded, sizes, estimate=True)
        monkeypatch.setattr(launch, "LAUNCHED_ROUNDS", launched)
        for got, same in zip(decode_sketch(encoded, sizes, estimate=True), expected, strict=True):
            assert torch.equal(got, same)

    @pytest.mark.parametrize(("limit", "launched"), [(1, 0), (2, 12), (3, 1)])
    def test_rounds_end_where_the_reference_ends(self, limit, launched, monkeypatch):
        monkeypatch.setattr(reference_peel, "MAX_ROUNDS", limit)
        monkeypatch.setattr(peel, "MAX_ROUNDS", limit)
        monkeypatch.setattr(launch, "LAUNCHED_ROUNDS", launched)
        encoded, _, sizes = encode_sketch(Case(2503, 0.3, lanes=7, wire_dtype=torch.float32))
        table = make_table(sizes["layout"], torch.device("cpu"))
        expected = reference.decode_sketch(
            *(t.cpu().clone() for t in (encoded.index_WB[0], encoded.cells_WS[0], encoded.own_N)),
            layout=sizes["layout"],
            table=table,
            estimate=False,
        )
        got = decode_sketch(encoded, sizes)
        assert_same(got.unresolved_B, expected.unresolved_B)
        assert expected.unresolved > 0, "a limit that does not matter tests nothing"


def run_all() -> list[torch.Tensor]:
    """Results of every operation of the contract at several tiles, the changed state included."""
    encoded, state, sizes = encode_sketch(LARGE)
    results = [*encoded, *state[1:3], *decode_sketch(encoded, sizes, estimate=True)]
    gradient, carry, owed, threshold = encode_inputs(LARGE)
    results.append(backend.add_residual(gradient.clone(), carry, owed, 0.5))
    results += [backend.threshold_exact(gradient, 0.1), backend.threshold_lognormal(gradient, 0.1)]
    position = draw_positions(LARGE.numel, 1024, 3, gradient.device)
    results.append(backend.sample_values(gradient, carry, owed, position, 0.5))
    residual = carry.clone()
    packed = backend.encode_packed(
        gradient.clone(),
        residual,
        threshold,
        decay=1.0,
        rank=1,
        capacity=150,  # too small: some stay
        wire_dtype=torch.bfloat16,
        error_feedback=True,
    )
    results += [*packed, residual, *backend.decode_packed(packed.index_WB, packed.values_WC, packed.own_N.clone())]
    residual = carry.clone()
    blocks = backend.encode_blocks(gradient.clone(), residual, decay=1.0, rank=1, bits=4, block=256)
    total = backend.decode_blocks(blocks.codes_WM, blocks.scales_WK, blocks.own_N.clone(), bits=4, block=256)
    target, replica_WN = gradient[0], carry.clone()
    delta = backend.encode_delta(target, carry[1], bits=3, block=256, rotate=5)
    sent = [part.expand(len(carry), -1).contiguous() for part in delta]
    backend.apply_delta(*sent, replica_WN, bits=3, block=256, rotate=5)
    return [*results, *blocks, residual, total, *delta, replica_WN]


class TestDifferences:
    @pytest.mark.parametrize("bits", [8, 4, 3, 2])
    @pytest.mark.parametrize(
        ("numel", "block", "seed", "target_dtype", "replica_dtype"),
        [
            (5003, 256, None, torch.bfloat16, torch.float32),  # several programs, the last one not full
            (5003, 256, 5, torch.float32, torch.bfloat16),
            (2049, 8, 5, torch.bfloat16, torch.bfloat16),
            (9001, 8192, 3, torch.float32, torch.float32),
        ],
    )
    def test_bits_are_those_of_the_reference(self, bits, numel, block, seed, target_dtype, replica_dtype):
        generator = torch.Generator().manual_seed(numel)
        target_N = torch.randn(numel, generator=generator).to(target_dtype)
        replica_WN = torch.randn(2, numel, generator=generator).to(replica_dtype)
        target_N[3], target_N[700], target_N[-1] = 1e30, torch.nan, 1e-40
        sizes = {"bits": bits, "block": block, "rotate": seed}
        expected = [reference.encode_delta(target_N, replica_N, **sizes) for replica_N in replica_WN]
        for replica_N, sent in zip(replica_WN, expected, strict=True):
            got = backend.encode_delta(target_N.to(DEVICE), replica_N.to(DEVICE), **sizes)
            assert torch.equal(got.codes_M.cpu(), sent.codes_M)
            torch.testing.assert_close(got.scales_K.cpu(), sent.scales_K, rtol=0, atol=0, equal_nan=True)
        assert expected[0].scales_K.isnan().sum() == 1
        rows = [torch.stack(parts) for parts in zip(*expected, strict=True)]
        changed_WN = replica_WN.to(DEVICE, copy=True)
        backend.apply_delta(*(row.to(DEVICE) for row in rows), changed_WN, **sizes)
        reference.apply_delta(*rows, replica_WN, **sizes)
        torch.testing.assert_close(changed_WN.cpu(), replica_WN, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("block", [24, 16384])
    def test_blocks_that_no_program_can_hold(self, block):
        x = torch.ones(1, 64, device=DEVICE)
        with pytest.raises(UserError, match=f"block={block}: kernels=triton"):
            backend.encode_delta(x[0], x[0], bits=4, block=block)
        with pytest.raises(UserError, match=f"block={block}: kernels=triton"):
            backend.apply_delta(x, x, x, bits=4, block=block)

    def test_codes_that_do_not_fit_the_replica(self):
        codes, scales = torch.zeros(1, 31, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.bfloat16)
        with pytest.raises(UserError, match=r"codes has shape \(1, 31\) where \(1, 32\)"):
            backend.apply_delta(
                *(codes.to(DEVICE), scales.to(DEVICE), torch.zeros(1, 64, device=DEVICE)), bits=4, block=32
            )


@pytest.mark.skipif(ON_GPU, reason="a GPU runs programs in an order of its own")
def test_results_do_not_depend_on_the_order_of_programs(monkeypatch):
    """The interpreter cannot show races, but it can show that no program needs another one of its launch."""
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    forward, grid = run_all(), []
    set_dim, set_idx = interpreter.set_grid_dim, interpreter.set_grid_idx

    def note_grid(*dims: int) -> None:
        grid[:] = dims
        set_dim(*dims)

    monkeypatch.setattr(interpreter, "set_grid_dim", note_grid)
    monkeypatch.setattr(
        interpreter, "set_grid_idx", lambda *at: set_idx(*(n - 1 - i for n, i in zip(grid, at, strict=True)))
    )
    for first, second in zip(forward, run_all(), strict=True):
        assert torch.equal(first, second)
    assert grid, "the programs were not reversed"


@pytest.mark.skipif(not ON_GPU, reason="only a GPU can be waited for")
def test_nothing_waits_for_the_gpu():
    """PyTorch raises at any wait. The first run compiles, and copies hash tables, which may wait."""
    expected = run_all()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for first, second in zip(expected, results, strict=True):
        assert torch.equal(first, second)


class TestBadInput:
    def encode(self, **changes):
        arguments = {
            "gradient_WN": torch.ones(2, 64, device=DEVICE),
            "residual_WN": torch.zeros(2, 64, device=DEVICE),
            "threshold_W1": torch.zeros(2, 1, device=DEVICE),
            "wire_dtype": torch.float32,
        } | changes
        return backend.encode_packed(**arguments, decay=1.0, rank=0, capacity=64, error_feedback=True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"gradient_WN": torch.ones(2, 64, dtype=torch.float64)}, "gradient has dtype torch.float64"),
            ({"residual_WN": torch.zeros(2, 64, dtype=torch.float16)}, "residual has dtype torch.float16"),
            ({"residual_WN": torch.zeros(2, 63)}, r"residual has shape \(2, 63\) where \(2, 64\)"),
            ({"residual_WN": torch.zeros(64, 2).T}, "residual is not contiguous"),
            ({"residual_WN": torch.zeros(2, 64, device="meta")}, "residual is on meta"),
            ({"threshold_W1": torch.zeros(3, 1)}, "threshold has 3 elements for 2 shards"),
            ({"wire_dtype": torch.float16}, "wire_dtype=torch.float16"),
        ],
    )
    def test_arguments_that_a_kernel_would_misread(self, changes, message):
        moved = {
            key: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
            for key, value in changes.items()
        }
        with pytest.raises(UserError, match=message):
            self.encode(**moved)

    def test_one_element_more_than_an_int32_can_index(self):
        gradient = torch.empty(2, 2**31, device="meta")
        with pytest.raises(UserError, match="2147483648 elements"):
            self.encode(gradient_WN=gradient, residual_WN=gradient)
        launch.check_numel(2**31 - 1)

    @pytest.mark.parametrize("block", [0, 1, 100, 16384])
    def test_blocks_that_no_tile_can_hold(self, block):
        x = torch.ones(2, 64, device=DEVICE)
        with pytest.raises(UserError, match=f"block={block}:"):
            backend.encode_blocks(x, x.clone(), decay=1.0, rank=0, bits=8, block=block)

    def test_a_table_of_another_layout(self):
        encoded, _, sizes = encode_sketch(Case(64))
        other = make_table(make_layout(Case(640)), torch.device(DEVICE))
        with pytest.raises(UserError, match=r"table\.cell_HR has shape"):
            decode_sketch(encoded, sizes | {"table": other})

    def test_a_device_without_kernels(self, monkeypatch):
        monkeypatch.setattr(launch, "INTERPRETED", False)
        assert "needs a GPU" in launch.explain_unusable(torch.device("cpu"))


def test_a_damaged_index_reads_nothing_beyond_the_message():
    index = torch.full((2, 8), 255, dtype=torch.uint8, device=DEVICE)
    decoded = backend.decode_packed(index, torch.ones(2, 3, device=DEVICE), torch.zeros(64, device=DEVICE))
    assert decoded.total_N.sum() == 6
