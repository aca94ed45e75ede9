"""The layer policy: which parameters a compressor gets, by the role of their module and by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tagc.config import CompressorConfig

#: part of a name -> role, first match wins
_ROLES = (
    (("attn", "attention"), "attention"),
    (("mlp", "feed_forward", "ffn"), "mlp"),
    (("lm_head", "head", "output"), "head"),
    (("wpe", "position"), "position"),
    (("wte", "embed"), "embedding"),
    (("ln", "norm"), "norm"),
)
#: TAGC's "non-attention linear layers": the MLP matrices, the token embedding and the LM head (section 3)
NON_ATTENTION_ROLES = ("mlp", "embedding", "head")


def role_of(name: str) -> str:
    """The role of a parameter by its fully qualified name: attention, mlp, embedding, position, head, norm or other.

    >>> role_of("blocks.3.mlp.fc.weight"), role_of("wte.weight"), role_of("blocks.0.ln_1.bias")
    ('mlp', 'embedding', 'norm')
    """
    for part in name.split(".")[:-1]:
        for keys, role in _ROLES:
            if any(part == key or part.startswith(key) for key in keys):
                return role
    return "other"


def is_compressed(name: str, shape: Sequence[int], config: CompressorConfig) -> bool:
    """Whether ``config.layers`` gives this parameter to the compressor. Small ones always stay dense."""
    if math.prod(shape) < config.min_numel:
        return False
    if config.layers == "all":
        return True
    if config.layers == "non_attention":
        return len(shape) >= 2 and role_of(name) in NON_ATTENTION_ROLES
    return any(fnmatchcase(name, pattern.strip()) for pattern in config.layers.split("|"))


@dataclass
class RoleSummary:
    """One line of the table printed at start."""

    role: str
    parameters: int = 0  # elements
    compressed: int = 0  # elements that the compressor gets
    dense_bytes: int = 0  # gradient bytes a rank sends per step in fp32
    sent_bytes: int = 0  # the same with the compressor


def format_policy(summary: list[RoleSummary]) -> list[str]:
    """The table printed at start: a heading, one line per role, the total."""
    total = RoleSummary("total")
    for line in summary:
        total.parameters += line.parameters
        total.compressed += line.compressed
        total.dense_bytes += line.dense_bytes
        total.sent_bytes += line.sent_bytes
    lines = ["gradients by role   elements   compressed    sent per step, fp32 -> at best"]
    for line in [*sorted(summary, key=lambda line: -line.parameters), total]:
        share = line.compressed / line.parameters
        lines.append(
            f"  {line.role:<12} {line.parameters:>13,}  {share:>11.1%}   "
            f"{line.dense_bytes / 1e6:>9.2f} MB -> {line.sent_bytes / 1e6:.2f} MB"
        )
    return lines
