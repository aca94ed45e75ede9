"""The learning-rate curve, the decay groups, and the norm on one process."""

from __future__ import annotations

import pytest
import torch

from tagc.config import TrainerConfig
from tagc.train.optimizer import build_optimizer, clip_gradients, learning_rate_at
from tests.model.common import build_plain, global_batch


def test_the_learning_rate_follows_the_documented_example() -> None:
    trainer = TrainerConfig(learning_rate=1.0, min_learning_rate_frac=0.1, warmup_steps=2, max_steps=5)
    rates = [learning_rate_at(step, trainer) for step in range(6)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(0, 1), (0, 7), (1, 1), (10, 5), (10, 120)])
def test_the_learning_rate_rises_to_the_peak_and_falls_to_the_floor(warmup_steps: int, max_steps: int) -> None:
    trainer = TrainerConfig(learning_rate=2.0, warmup_steps=warmup_steps, max_steps=max_steps)
    rates = [learning_rate_at(step, trainer) for step in range(max_steps)]
    rising, falling = rates[: warmup_steps + 1], rates[warmup_steps:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 2.0 for rate in rates)
    if max_steps > warmup_steps:
        assert rates[warmup_steps] == 2.0
    if max_steps > warmup_steps + 1:
        assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("tie_weights", [False, True])
def test_matrices_decay_and_vectors_do_not(tie_weights: bool) -> None:
    gpt = build_plain(tie_weights=tie_weights)
    trainer = TrainerConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, learning_rate=0.5)
    optimizer = build_optimizer(gpt, trainer)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    grouped = [names.pop(id(p)) for group in optimizer.param_groups for p in group["params"]]
    assert not names and len(grouped) == len(set(grouped))
    matrices = set(grouped[: len(decaying["params"])])
    assert {"wte.weight", "wpe.weight", "blocks.1.attn.qkv.weight", "blocks.0.mlp.proj.weight"} <= matrices
    assert ("lm_head.weight" in matrices) is not tie_weights
    assert not any(name.endswith("bias") or ".ln_" in name or name.startswith("ln_f") for name in matrices)
    assert all((group["betas"], group["lr"]) == ((0.8, 0.9), 0.5) for group in optimizer.param_groups)


def test_clipping_scales_to_the_limit_and_zero_only_measures() -> None:
    gpt = build_plain()
    inputs, targets = global_batch(0, 16)
    gpt(inputs, targets).backward()
    gradients = [parameter.grad.clone() for parameter in gpt.parameters()]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().float()

    for limit in (0.0, 2 * expected.item()):  # measured only; below the limit
        norm = clip_gradients(gpt.parameters(), limit)
        torch.testing.assert_close(norm, expected)
        assert norm.dtype == torch.float32 and norm.shape == () and type(norm) is torch.Tensor
        assert all(torch.equal(p.grad, g) for p, g in zip(gpt.parameters(), gradients, strict=True))

    torch.testing.assert_close(clip_gradients(gpt.parameters(), 0.25), expected)
    torch.testing.assert_close(clip_gradients(gpt.parameters(), 0.0), torch.tensor(0.25), rtol=1e-4, atol=0)


def test_the_norm_shows_a_gradient_that_is_not_finite() -> None:
    gpt = build_plain()
    inputs, targets = global_batch(0, 16)
    gpt(inputs, targets).backward()
    gpt.ln_f.bias.grad[3] = float("nan")
    assert not torch.isfinite(clip_gradients(gpt.parameters(), 0.0))
