"""From the numbers that all ranks gathered at the end of a step to the metrics of that step and of its layers.

Shape letters: R ranks, S slots, F numbers per slot (STATS).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.comm.buckets import Slot

#: attributes of BucketStats that every rank sends, in this order
STATS = ("kept", "densest", "union", "peers_union", "unresolved", "residual_squared", "threshold")
Metrics = dict[str, float | int | str | None]


def holds_residual(slot: Slot) -> bool:
    """Whether this step measured a residual of the slot; the same on every rank."""
    return slot.payload is not None and slot.payload.stats.residual_squared is not None


def summarise_step(slots: Sequence[Slot], stats_RSF: Tensor) -> Metrics:
    """Metrics over all ranks. Shares are those of the buckets that went compressed; None where nothing was measured."""
    kept_S, _, union_S, peers_S, unresolved_S, residual_S, _ = stats_RSF.sum(0).unbind(-1)
    compressed = torch.tensor([not slot.went_dense for slot in slots], dtype=torch.bool)
    sparse = compressed & ~union_S.isnan()  # a quantiser keeps everything and has no union
    measured = torch.tensor([holds_residual(slot) for slot in slots], dtype=torch.bool)
    ranks = stats_RSF.shape[0]
    metrics: Metrics = {
        "compressed_buckets": int(compressed.sum()),
        "dense_buckets": len(slots) - int(compressed.sum()),
        "achieved_sparsity": None,
        "union_density": None,
        "peeled_frac": None,
        "residual_norm": residual_S[measured].sum().sqrt().item(),
    }
    if sparse.any():
        shard_S = torch.tensor([slot.numel for slot in slots], dtype=torch.float64)[sparse]
        metrics["achieved_sparsity"] = 1 - (kept_S[sparse].sum() / (shard_S.sum() * ranks**2)).item()
        metrics["union_density"] = (union_S[sparse].sum() / (shard_S.sum() * ranks)).item()
        peers = peers_S[sparse].sum().item()
        metrics["peeled_frac"] = 1 - unresolved_S[sparse].sum().item() / peers if peers else None
    return metrics


def describe_layers(slots: Sequence[Slot], stats_RSF: Tensor) -> list[Metrics]:
    """One row per compressed part of an FSDP unit, over all ranks; NaN where nothing was measured.

    ``density``: share of its elements that a rank selected, mean over ranks; ``union_density``: share that any rank
    selected. ``threshold``: the magnitude they had to exceed, mean over shards and ranks. ``residual_norm``: L2 norm of
    what all ranks keep. ``ratio``: elements per sketch cell.
    """
    ranks = stats_RSF.shape[0]
    rows = []
    for slot, total_F in zip(slots, stats_RSF.sum(0).tolist(), strict=True):
        total = dict(zip(STATS, total_F, strict=True))
        elements, went_dense = slot.numel * ranks, slot.went_dense
        rows.append(
            {
                "layer": slot.compressor.spec.name.rpartition("/")[0],
                "elements": elements,
                "density": total["kept"] / (elements * ranks),
                "union_density": total["union"] / elements,
                "threshold": total["threshold"] / ranks,
                "residual_norm": math.sqrt(total["residual_squared"]),
                "ratio": None if went_dense else slot.compressor.ratio,
                "went_dense": went_dense,
                "peeled_frac": 1 - total["unresolved"] / total["peers_union"] if total["peers_union"] else None,
            }
        )
    return rows
