"""The share that is really sent: on gradients of a real training, and where no threshold can be right."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

from tagc.compressors import COMPRESSORS, BucketSpec, Compressor
from tagc.config import THRESHOLDS, CompressorConfig, ModelConfig
from tagc.kernels import resolve_backend
from tagc.model.gpt import GPT
from tagc.model.init import materialize
from tests.policy.sources import PACKAGE

VOCAB, CONTEXT, BATCH, STEPS = 4096, 64, 8, 5
SETTLED = 2  # errors count from the third step on


def make_compressor(name: str, numel: int, **config) -> Compressor:
    settings = CompressorConfig(name=name, dense_fallback=False, **config)
    spec = BucketSpec("bucket", (("weight", numel),), ranks=2, rank=0, device=torch.device("cpu"), seed=1)
    return COMPRESSORS[name](settings, spec, resolve_backend("auto")[1])


def read_tokens() -> Tensor:
    """The words of this package's sources, the most frequent first, as in a trained vocabulary."""
    text = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    words = re.findall(r"\w+|[^\w\s]", text)
    number = {
        word: i % VOCAB for i, (word, _) in enumerate(sorted(Counter(words).items(), key=lambda w: (-w[1], w[0])))
    }
    return torch.tensor([number[word] for word in words])


@pytest.fixture(scope="module")
def gradients() -> dict[str, list[Tensor]]:
    """What a model of nano's width produces in its first steps: float32 [2, N] by bucket and step."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(ModelConfig(layers=1, context=CONTEXT), VOCAB)
    materialize(model, 0, "cpu")
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-3), read_tokens()
    recorded: dict[str, list[Tensor]] = {"wte": [], "mlp": [], "head": []}
    for _ in range(STEPS):
        begin = torch.randint(len(tokens) - CONTEXT - 1, (BATCH, 1))
        text = tokens[begin + torch.arange(CONTEXT + 1)]
        model(text[:, :-1], text[:, 1:]).backward()
        for bucket, found in recorded.items():
            parts = [p.grad.view(2, -1) for name, p in model.named_parameters() if bucket in name and p.dim() == 2]
            found.append(torch.cat(parts, dim=1))
        optimizer.step()
        optimizer.zero_grad()
    return recorded


@pytest.mark.parametrize("name", ["tagc2", "packed"])
@pytest.mark.parametrize("sparsity", [0.8, 0.95])
@pytest.mark.parametrize("bucket", ["wte", "mlp", "head"])
def test_the_default_is_within_a_point_of_its_target_on_real_gradients(gradients, name, sparsity, bucket):
    numel = gradients[bucket][0].shape[1]
    compressor = make_compressor(name, numel, sparsity=sparsity)
    assert numel > 2 * compressor.config.threshold_sample, "nothing would be sampled"
    for step, gradient in enumerate(gradients[bucket]):
        x = gradient + compressor.residuals()["weight"]
        wanted = (x != 0).float().mean(dim=1).clamp(max=1 - sparsity)  # zeros are never sent
        stats = compressor.encode(gradient.clone(), step).stats
        if step >= SETTLED:
            assert stats.kept.item() / (2 * numel) == pytest.approx(wanted.mean().item(), abs=0.01)
            assert stats.densest.item() / numel == pytest.approx(wanted.max().item(), abs=0.01)


def test_the_real_gradients_have_rows_of_zeros_and_grow_apart(gradients):
    assert all((gradient == 0).float().mean() > 0.5 for gradient in gradients["wte"])
    assert all((gradient == 0).float().mean() < 0.01 for gradient in gradients["head"])
    scale = [gradient.square().mean().sqrt().item() for gradient in gradients["mlp"]]
    assert max(scale) > 1.2 * min(scale), "a threshold that holds for every step would pass"


LARGE = 100_000  # more than the sample
CASES = {
    "all zero": (torch.zeros(LARGE), 0),
    "all equal": (torch.full((LARGE,), -3.0), LARGE),
    "one value": (torch.zeros(LARGE).index_fill(0, torch.tensor(777), 2.0), 1),
    "fewer values than wanted": (torch.zeros(LARGE).index_fill(0, torch.arange(0, LARGE, 10), 5.0), LARGE // 10),
    "fewer elements than the sample": (torch.arange(1.0, 1001), 200),
    "one element": (torch.ones(1), 1),
}


@pytest.mark.parametrize("name", ["tagc2", "packed"])
@pytest.mark.parametrize("threshold", ["sampled", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_where_no_threshold_can_be_right_the_answer_is_still_sound(name, threshold, case):
    values, expected = CASES[case]
    compressor = make_compressor(name, len(values), threshold=threshold, capacity_slack=10.0)
    stats = compressor.encode(values.repeat(2, 1), 0).stats
    assert stats.kept.item() == 2 * expected


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_no_estimate_passes_the_largest_value(threshold):
    """A few huge values and a long lower tail: something is sent, at every step."""
    x = torch.randn(2, LARGE, generator=torch.Generator().manual_seed(0))
    x[:, :3000] *= 1e-20
    x[:, 5000:5003] = 1e30
    compressor = make_compressor("packed", LARGE, threshold=threshold)
    for step in range(3):
        stats = compressor.encode(x.clone(), step).stats
        assert stats.kept.item() >= 6
