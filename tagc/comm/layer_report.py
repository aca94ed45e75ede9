"""What every layer of a compressed model does, as rows and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tagc.comm.gradient_sync import GradientSync
from tagc.comm.step_close import StepReport
from tagc.compressors import Dense


@dataclass
class LayerReport:
    """One row per compressor: a unit has one for what the layer policy selects, and one for the rest.

    Keys of a row: ``layer`` (the FSDP unit), ``part`` (compressed or dense), ``method``, ``elements`` (of the full
    gradient, padding included), ``why_dense`` (None if it is not), ``expected_bytes`` and ``sent_bytes`` (what this
    rank sends its peers in a step, closed form, and what it sent in the newest one), ``sparsity`` (share of the
    elements that a rank did not send, mean over ranks) and ``peeled_frac``; None where nothing was measured.
    """

    rows: list[dict[str, Any]]
    notes: list[str]

    def __str__(self) -> str:
        lines = [f"{'layer':<24} {'part':<10} {'method':<8} {'elements':>12} {'expected B':>12} {'sent B':>12}  notes"]
        for row in self.rows:
            measured = [f"{key} {row[key]:.3f}" for key in ("sparsity", "peeled_frac") if row[key] is not None]
            notes = "; ".join([*measured, *([row["why_dense"]] if row["why_dense"] else [])])
            lines.append(
                f"{row['layer']:<24} {row['part']:<10} {row['method']:<8} {row['elements']:>12,} "
                f"{row['expected_bytes']:>12,} {row['sent_bytes']:>12,}  {notes}"
            )
        total = {key: sum(row[key] for row in self.rows) for key in ("elements", "expected_bytes", "sent_bytes")}
        lines.append(
            f"{'total':<24} {'':<10} {'':<8} {total['elements']:>12,} {total['expected_bytes']:>12,} "
            f"{total['sent_bytes']:>12,}"
        )
        return "\n".join([*lines, *self.notes])


def list_layers(sync: GradientSync, report: StepReport | None) -> LayerReport:
    """The rows of ``sync``'s layers, with what ``report`` measured of them."""
    if not sync.buckets:
        return LayerReport([], ["one rank has nobody to exchange gradients with: nothing is compressed"])
    settings = sync.settings
    measured = {layer["layer"]: layer for layer in report.layers} if report else {}
    rows = []
    for bucket in sync.buckets:
        for slot in bucket.slots:
            compressor = slot.compressor
            part = compressor.spec.name.rpartition("/")[2]
            is_method = part == "compressed"
            layer = measured.get(bucket.name) if is_method and compressor.follows_layer_policy else None
            has_selection = (
                layer is not None and not layer["went_dense"] and layer["union_density"] == layer["union_density"]
            )
            rows.append(
                {
                    "layer": bucket.name,
                    "part": part,
                    "method": settings.method_name if is_method else "fp32",
                    "elements": slot.numel * compressor.spec.ranks,
                    "why_dense": _why_dense(compressor, is_method, sync.step),
                    "expected_bytes": sum(compressor.expected_bytes(sync.step).values()),
                    "sent_bytes": slot.sent_bytes,
                    "sparsity": 1 - float(layer["density"] or 0) if layer and has_selection else None,
                    "peeled_frac": layer["peeled_frac"] if layer and has_selection else None,
                }
            )
    notes = [sync.weights.describe(), *sync.weights.explain_whole()] if sync.weights.gathers else []
    return LayerReport(rows, notes)


def _why_dense(compressor: Any, is_method: bool, step: int) -> str | None:
    if not is_method:
        config = compressor.config
        return f"not selected by layers={config.layers}, or fewer than min_numel={config.min_numel} elements"
    if isinstance(compressor, Dense):
        return "a dense method"
    reason = compressor.explain_dense()
    return reason or ("warm-up, or its sketch was overloaded" if compressor.is_dense(step) else None)
