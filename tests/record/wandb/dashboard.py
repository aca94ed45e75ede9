"""Whether what the W&B dashboard plots is there: its names against the files of a real run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tagc.record import load_rows
from tagc.record.wandb.dashboard import build_workspace, describe_spec
from tagc.record.wandb.run import describe_run, read_summary, summarise_layers


def list_panels(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels' configurations."""
    for section in spec["section"]["panelBankConfig"]["sections"]:
        yield from (panel | {"section": section["name"]} for panel in section["panels"])


def find_missing(run_dir: Path) -> list[str]:
    """What the dashboard names and W&B would not get from this run."""
    spec = describe_spec(build_workspace("me", "tagc"))
    rows = load_rows(run_dir / "metrics.jsonl")
    history = {key for row in rows for key, value in row.items() if value is not None} | {"train_time_s"}
    layers = [row for row in load_rows(run_dir / "layers.jsonl") if row["step"] == 1]
    history |= {key for key, value in summarise_layers(layers).items() if value is not None}
    summary, config = read_summary(run_dir), describe_run(run_dir)["config"]
    missing = []
    for panel in list_panels(spec):
        named, options = [], panel["config"]
        if panel["viewType"] == "Run History Line Plot":
            named = [*options["metrics"], options["xAxis"]]
            known = history
            if pattern := options.get("metricRegex"):
                named += [] if any(re.fullmatch(pattern, key) for key in history) else [pattern]
        elif panel["viewType"] == "Scatter Plot":
            named = [options[axis].removeprefix("summary:") for axis in ("xAxis", "yAxis")]
            known = {key for key, value in summary.items() if value is not None}
        else:
            named, known = options["metrics"], set(summary)
            missing += [] if options["groupBy"].removesuffix(".value") in config else [options["groupBy"]]
        missing += [name for name in named if name not in known and name != options.get("metricRegex")]
        assert named, panel
    columns = spec["section"]["runSets"][0]["runFeed"]["columnOrder"]
    for column in columns:
        kind, _, name = column.partition(":")
        places = {"config": {f"{key}.value" for key in config}, "summary": set(summary), "run": {"displayName"}}
        missing += [] if name in places[kind] else [column]
    return missing
