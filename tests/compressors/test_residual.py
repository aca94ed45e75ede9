"""The residual's storage, whatever the method: dtype, memory, names."""

import math

import pytest
import torch

from tests.compressors.simulate import make_compressors, run_step, total_residual

METHODS = ["tagc", "packed", "int8", "int4"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_a_bf16_residual_follows_the_fp32_one(name, warmup_steps):
    residuals, applied = {}, {}
    for dtype in ("float32", "bfloat16"):
        # The rounding of bf16 cells is not fed back; that of packed values and of dense steps is.
        value_dtype = "float32" if name == "tagc" else "bfloat16"
        settings = {"threshold": "exact", "value_dtype": value_dtype, "warmup_steps": warmup_steps}
        compressors = make_compressors(name, 2, 5003, residual_dtype=dtype, **settings)
        generator = torch.Generator().manual_seed(0)
        gradients = torch.randn(4, 2, 2, 5003, generator=generator)
        applied[dtype] = sum(run_step(compressors, gradients[step], step)[0] for step in range(4))
        residuals[dtype] = total_residual(compressors)
        # The residual's own rounding is all that is lost.
        error = applied[dtype] + residuals[dtype] - gradients.sum(dim=(0, 1))
        assert error.norm() / gradients.sum(dim=(0, 1)).norm() < (1e-6 if dtype == "float32" else 4e-3)
    # A rounded residual can change what the next steps select, so only the whole is alike.
    assert (applied["bfloat16"] - applied["float32"]).norm() < 0.05 * applied["float32"].norm()
    assert residuals["bfloat16"].norm() == pytest.approx(residuals["float32"].norm().item(), rel=0.02)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_reported_and_copies_go_by_name(name, dtype):
    numel, item = 5003, 4 if dtype == "float32" else 2
    compressor = make_compressors(name, 3, numel, residual_dtype=dtype)[0]
    owed = math.ceil(numel / 8) if name == "tagc" else 0
    assert compressor.residual_bytes == 3 * (numel * item + owed)
    residuals = compressor.residuals()
    assert {key: tuple(part.shape) for key, part in residuals.items()} == {"first": (3, 3336), "second": (3, 1667)}
    for part in residuals.values():
        assert part.dtype == torch.float32
        part.fill_(7.0)
    assert not any(part.any() for part in compressor.residuals().values())


@pytest.mark.parametrize("name", ["fsdp", "bf16", "noop"])
def test_a_method_without_a_residual_keeps_and_copies_nothing(name):
    compressor = make_compressors(name, 3, 5003)[0]
    payload = compressor.encode(torch.ones(3, 5003), 0)
    assert payload.state_before == {}
    compressor.undo(payload)
    assert compressor.state_dict() == {}
    assert compressor.residual_bytes == 0
    assert compressor.residuals() == {}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("went_dense", [False, True])
def test_undo_takes_a_step_back_bit_by_bit(name, residual_dtype, went_dense):
    """Also of a step with NaN, and with all that the method keeps beside the residual."""
    settings = {"residual_dtype": residual_dtype, "value_dtype": "bfloat16", "capacity_slack": 1.0}
    compressor, other = make_compressors(name, 2, 5003, **settings)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        run_step([compressor, other], torch.randn(2, 2, 5003, generator=generator), step)
    before = {key: tensor.clone() for key, tensor in compressor.state_dict().items()}
    assert any(residual.any() for residual in compressor.residuals().values())
    if went_dense:
        compressor.dense_until = 3
    gradient_WN = torch.randn(2, 5003, generator=generator)
    gradient_WN[:, ::7] = torch.nan
    payload = compressor.encode(gradient_WN, 2)
    assert payload.went_dense == went_dense
    assert any(residual.isnan().any() for residual in compressor.residuals().values())
    compressor.undo(payload)
    compressor.dense_until = 0
    after = compressor.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
