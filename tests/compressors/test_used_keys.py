"""What tagc/config/schema.py declares in ``used_by`` is what each compressor reads of its configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tagc.comm.policy import is_compressed
from tagc.compressors import COMPRESSORS, BucketSpec
from tagc.config import CompressorConfig, keys_used_by
from tagc.kernels import resolve_backend
from tests.compressors.simulate import integer_gradients, run_step

RANKS, NUMEL = 3, 640
VARIANTS: list[dict[str, Any]] = [
    {},
    {"warmup_steps": 2},
    {"sparsity": 0.0},
    {"sparsity": 0.0, "adaptive_ratio": False, "ratio": 0.5},
    {"adaptive_ratio": False, "ratio": 4.0},  # overloaded: dense, and without the fallback values are returned
    {"adaptive_ratio": False, "ratio": 4.0, "dense_fallback": False},
    {"adaptive_ratio": False, "ratio": 4.0, "dense_fallback": False, "estimate_unresolved": True},
    {"threshold": "exact", "residual_decay": 0.5},
    {"threshold": "lognormal", "value_dtype": "float32"},
    {"error_feedback": False, "residual_dtype": "bfloat16"},
    {"error_feedback": False, "warmup_steps": 2},
    {"block": 8, "value_dtype": "bfloat16"},
]


class RecordingConfig(CompressorConfig):
    """Remembers which of its keys were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in CompressorConfig.__dataclass_fields__:
            self.__dict__.setdefault("read", set()).add(name)
        return super().__getattribute__(name)


def read_keys(name: str, changes: dict[str, Any]) -> set[str]:
    """The keys that a method reads from its start through four steps, ``name`` left out."""
    config = RecordingConfig(name=name, **changes)
    kernels = resolve_backend("reference")[1]
    parts = (("first", NUMEL // 2), ("second", NUMEL // 2))
    specs = [BucketSpec("unit", parts, RANKS, rank, torch.device("cpu"), seed=5) for rank in range(RANKS)]
    compressors = [COMPRESSORS[name](config, spec, kernels) for spec in specs]
    if compressors[0].follows_layer_policy:
        assert is_compressed("mlp.weight", torch.Size([config.min_numel, 1]), config)
    for step in range(4):
        run_step(compressors, integer_gradients(RANKS, NUMEL, step), step)
        _adapt(compressors, step)
    return config.__dict__.get("read", set()) - {"name"}


def _adapt(compressors: list[Any], step: int) -> None:
    """As the trainer does with the largest numbers of all ranks."""

    def largest(counts: list[torch.Tensor | None]) -> float:
        return max((math.nan if count is None else float(count) for count in counts), default=math.nan)

    densest = largest([compressor.payload.stats.densest for compressor in compressors])
    union = largest([compressor.payload.stats.peers_union for compressor in compressors])
    for compressor in compressors:
        compressor.adapt(compressor.payload, densest, union)
        compressor.expected_bytes(step + 1)
        compressor.explain_dense()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_declared_keys_are_those_that_are_read(name: str) -> None:
    read = set().union(*(read_keys(name, changes) for changes in VARIANTS))
    assert read == set(keys_used_by(name, "compressor"))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_keys_that_are_not_declared_change_no_number(name: str) -> None:
    """Nothing is read past the configuration object either: from another place, or under another name."""
    changes = {"sparsity": 0.5, "ratio": 1.0, "capacity_slack": 2.0, "block": 8, "warmup_steps": 1, "retry_steps": 7}
    unused = {key: value for key, value in changes.items() if key not in keys_used_by(name, "compressor")}

    def sums(settings: dict[str, Any]) -> torch.Tensor:
        config, kernels = CompressorConfig(name=name, **settings), resolve_backend("reference")[1]
        specs = [BucketSpec("unit", (("w", NUMEL),), RANKS, rank, torch.device("cpu"), seed=5) for rank in range(RANKS)]
        compressors = [COMPRESSORS[name](config, spec, kernels) for spec in specs]
        return torch.stack([run_step(compressors, integer_gradients(RANKS, NUMEL, step), step)[0] for step in range(3)])

    assert torch.equal(sums(unused), sums({}))
