"""``python -m tagc.record.wandb.dashboard``: save the dashboard as a view of the W&B project (``--print`` shows it).

The dashboard is this file: iteration time by bandwidth, loss against step and against time, bytes, and what happens in
the layers. A view of the same name is replaced: what was changed in it by hand is lost. Needs
``pip install -e '.[dashboard]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tagc.config import LoggingConfig
from tagc.errors import UserError
from tagc.record.wandb.run import HISTOGRAM_KEYS, require_key
from tagc.host.pipe import closed_pipe_ends_quietly

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

NAME = "TAGC"
# W&B keeps a config value under `.value`, behind the whole key where keys hold dots themselves.
BANDWIDTH, COMPRESSOR = "bandwidth.label.value", "compressor.name.value"
COLUMNS = (
    *(f"config:{BANDWIDTH}", f"config:{COMPRESSOR}", "config:cluster.ranks.value", "config:seed.value"),
    *("summary:status", "summary:iteration_ms_median", "summary:grad_wire_bytes_per_step", "summary:val_loss"),
)


def build_workspace(entity: str, project: str) -> Workspace:
    """The dashboard, not saved yet. Errors: ``UserError`` without the package ``wandb-workspaces``."""
    try:
        from wandb_workspaces import workspaces
    except ImportError as error:
        raise UserError("the dashboard needs wandb-workspaces: pip install -e '.[dashboard]'") from error

    sections = [_times(), _losses(), _bytes(), _layers()]
    settings = workspaces.WorkspaceSettings(x_axis="step", max_runs=30)
    columns = workspaces.RunsetSettings(pinned_columns=list(COLUMNS))
    return workspaces.Workspace(
        entity=entity, project=project, name=NAME, sections=sections, settings=settings, runset_settings=columns
    )


def _section(name: str, *panels: Any) -> Section:
    from wandb_workspaces.workspaces import Section

    return Section(name=name, panels=list(panels), is_open=True)


def _lines(title: str, *metrics: str, x: str = "step", **options: Any) -> Any:
    from wandb_workspaces.reports.v2 import LinePlot

    return LinePlot(title=title, x=x, y=list(metrics), **options)


def _bars(title: str, metric: str, group: str) -> Any:
    from wandb_workspaces.reports.v2 import BarPlot

    return BarPlot(title=title, metrics=[metric], groupby=group, groupby_aggfunc="median", groupby_rangefunc="minmax")


def _times() -> Section:
    from wandb_workspaces.reports.v2 import ScatterPlot, SummaryMetric

    rate, measured, scaled = map(SummaryMetric, ("rate_mbps", "iteration_ms_median", "scaled_iteration_ms_median"))
    return _section(
        "Iteration time by bandwidth",
        ScatterPlot(title="Measured ms over the link's Mbit/s", x=rate, y=measured, log_x=True, log_y=True),
        ScatterPlot(title="ms over time dilation", x=rate, y=scaled, log_x=True, log_y=True),
        _bars("Iteration ms by bandwidth", "iteration_ms_median", BANDWIDTH),
        _bars("Iteration ms by compressor", "iteration_ms_median", COMPRESSOR),
        _lines("Iteration ms", "iteration_ms", log_y=True),
        _lines("Where it goes, ms", "compute_ms", "exposed_comm_ms", "encode_ms", "exchange_ms", "decode_ms"),
    )


def _losses() -> Section:
    panels = [
        _lines(f"{kind} loss against {name}", f"{key}_loss", x=x)
        for kind, key in (("Training", "train"), ("Validation", "val"))
        for name, x in (("step", "step"), ("seconds of iterations", "train_time_s"))
    ]
    return _section("Loss", *panels)


def _bytes() -> Section:
    return _section(
        "Bytes that a rank sends",
        _lines("Gradient bytes per step", "grad_wire_bytes"),
        _lines("of which", "value_wire_bytes", "index_wire_bytes", "return_wire_bytes"),
        _bars("Gradient bytes per step by compressor", "grad_wire_bytes_per_step", COMPRESSOR),
        _bars("All bytes per step by compressor", "wire_bytes_per_step", COMPRESSOR),
    )


def _layers() -> Section:
    per_layer = [
        _lines(title, metric_regex=f"layers/.*/{key}")
        for title, key in (
            ("Share selected, per layer", "density"),
            ("Threshold, per layer", "threshold"),
            ("Residual norm, per layer", "residual_norm"),
            ("Elements per sketch cell, per layer", "ratio"),
        )
    ]
    histograms = [_lines(f"Over the layers: {key}", f"histograms/{key}") for key in HISTOGRAM_KEYS]
    whole = _lines("Sparsity, union density, share peeled", "achieved_sparsity", "union_density", "peeled_frac")
    return _section("Sparsity per layer", whole, *per_layer, *histograms)


def describe_spec(workspace: Workspace) -> dict[str, Any]:
    """What W&B stores for the view, as the library writes it."""
    return json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save_workspace(workspace: Workspace) -> str:
    """Save the dashboard in place of the project's view of the same name, or as a new one; returns what was done.

    Errors: ``ValueError`` when the project does not exist; whatever ``wandb`` raises.
    """
    import wandb

    views = wandb.Api().reports(f"{workspace.entity}/{workspace.project}", per_page=100)
    views.variables["viewType"] = "project-view"  # W&B keeps saved views and reports in one list
    same = [view for view in views if view.display_name == workspace.name]
    if same:  # the library's only other way to a view is its address
        workspace._internal_id, workspace._internal_name = same[0].id, same[0].name
    workspace.save()
    others = f"; {len(same) - 1} more of this name were left alone" if len(same) > 1 else ""
    return f"{'updated' if same else 'saved'}: {workspace.url}{others}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 after a message when the view could not be saved."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    parser = argparse.ArgumentParser(prog="python -m tagc.record.wandb.dashboard", description=__doc__)
    parser.add_argument("--project", default=LoggingConfig().wandb_project, help="W&B project (default: %(default)s)")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="W&B user or team (default: yours)")
    parser.add_argument("--print", action="store_true", help="show the view's spec, send nothing")
    options = parser.parse_args(arguments)
    try:
        if options.print:
            console.print_json(data=describe_spec(build_workspace(options.entity or "", options.project)))
            return 0
        require_key()
        import wandb

        workspace = build_workspace(options.entity or wandb.Api().default_entity, options.project)
        console.print(save_workspace(workspace))
    except Exception as error:  # a server that does not answer, a project that does not exist
        console.print(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        return 1
    return 0


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
