"""The Python on the pages for users runs as it stands there, on two ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tagc
from tests.distributed import run_ranks
from tests.policy.sources import ROOT

pytestmark = pytest.mark.distributed

CLASSES, WIDTH = 31, 64


class Block(nn.Module):
    """A residual block whose matrices are large enough for the default ``min_numel``."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Reader(nn.Module):
    """What a reader of the page has: a model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def find_blocks(page: str) -> list[str]:
    """The fenced Python of a page, in its order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def train(names: dict[str, Any], rank: int, steps: int = 10) -> list[float]:
    """The loop that the page leaves as it is; on the page it is three dots."""
    model, optimizer, losses = names["model"], names["optimizer"], []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        tokens = torch.randint(CLASSES, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % CLASSES)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Reader()
    return {"torch": torch, "tagc": tagc, "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def measure(names: dict[str, Any]) -> tuple[int, int]:
    """Gradient bytes that were counted, without returns, and what the closed form says."""
    compression = names["compression"]
    metrics = compression.metrics()
    sent = int(metrics["grad_wire_bytes"]) - int(metrics["return_wire_bytes"])
    return sent, sum(compression.sync.expected_bytes(compression.step - 1).values())


def run_quick_start(rank: int, code: str) -> tuple[list[float], tuple[int, int], str]:
    before, after = re.split(r"^\.\.\..*$", code, maxsplit=1, flags=re.MULTILINE)
    names = start()
    exec(before, names)
    losses = train(names, rank)
    exec(after, names)
    return losses, measure(names), str(names["compression"].report())


@pytest.mark.parametrize("page", ["docs/library.md", "README.md"])
def test_the_quick_start_runs(page: str) -> None:
    code = find_blocks(page)[0]
    assert "compress(" in code and "report()" in code
    for losses, (sent, expected), report in run_ranks(run_quick_start, 2, code):
        assert losses[-1] < 0.7 * losses[0]
        assert sent == expected > 0
        assert re.search(r"blocks\.0 +compressed +tagc2", report), report


def run_own_compressor(rank: int, written: str, called: str) -> dict[str, Any]:
    results = {}
    for name, line in {"own": called, "plain": called.replace("Sign", '"fsdp"').replace(', layers="all"', "")}.items():
        names = start()
        for block in names["model"].blocks:
            fully_shard(block)
        fully_shard(names["model"])
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=3e-3)
        exec(written, names)
        exec(line, names)
        results[name] = train(names, rank), measure(names), str(names["compression"].report())
    return results


def test_the_compressor_of_ones_own_is_30_lines_that_train() -> None:
    _, written, called = find_blocks("docs/library.md")
    assert len(written.splitlines()) <= 30
    for found in run_ranks(run_own_compressor, 2, written, called):
        losses, (sent, expected), report = found["own"]
        plain_losses, (plain_sent, _), _ = found["plain"]
        assert losses[-1] < 0.7 * losses[0] and plain_losses[-1] < 0.7 * plain_losses[0]
        assert sent == expected and sent < 0.1 * plain_sent
        assert " Sign " in report


def run_weights_line(rank: int, line: str) -> float:
    names = start()
    exec(find_blocks("docs/library.md")[0].split("compression =")[0], names)
    exec(f"compression = {line}", names)
    train(names, rank, steps=3)
    return float(names["compression"].metrics()["param_wire_bytes"])


def test_the_line_with_weights_runs() -> None:
    (line,) = re.findall(r"^`(tagc\.compress\(.*weights=.*?\))`", (ROOT / "docs/library.md").read_text(), re.MULTILINE)
    assert all(sent > 0 for sent in run_ranks(run_weights_line, 2, line))
