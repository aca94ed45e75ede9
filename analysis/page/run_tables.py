"""Tables of run folders and kept runs: what was run, bytes by kind, shares, times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from analysis.arms import sort_arms
from analysis.numbers.cells import read_estimate
from analysis.numbers.run_times import compare_run_times
from analysis.page.cell_tables import describe_commit
from analysis.page.sheet import MISSING, Sheet, format_estimate, format_number
from analysis.records.cells import describe_machine
from analysis.records.identity import Notice, describe_differences, group_runs, loss_setting, select_newest
from analysis.records.load import Recorded, Run


def make_notice_sheet(notices: Sequence[Notice]) -> Sheet:
    """What to know before trusting a number below."""
    note = "Nothing below is averaged over different models, data, training settings, links or machines."
    return Sheet("notices", "Read this first", note, ("where", "what"), [tuple(notice) for notice in notices])


def make_source_sheet(recorded: Recorded) -> Sheet:
    """What was run, where, by which code: one line per commit, machine and kind of record."""
    sources: dict[tuple[str, ...], list[str]] = {}
    for cell in recorded.cells:
        key = _describe_source("cells", cell.shared)
        sources.setdefault(key, []).append(cell.shared["started_at"][:10])
    for run in recorded.runs:
        key = _describe_source("runs", run.manifest)
        sources.setdefault(key, []).append(str(run.manifest.get("started_at"))[:10])
    lines = [
        (kind, str(len(days)), " to ".join(sorted({min(days), max(days)})), *rest)
        for (kind, *rest), days in sorted(sources.items())
    ]
    if len(recorded.modelled):
        lines.append(("modelled rows", str(len(recorded.modelled)), *([MISSING] * 5)))
    headers = ("what", "n", "when", "commit", "machine", "versions", "kernels, device")
    note = (
        "Every number below comes from these records. Cells: several arms in turn in the same processes; runs: one arm."
    )
    return Sheet("sources", "What was run, and on what", note, headers, lines)


def _describe_source(kind: str, source: dict) -> tuple[str, ...]:
    versions = source.get("versions", {})
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "numba", "triton") if versions.get(name)
    )
    memory = source.get("hardware", {}).get("memory_bytes")
    machine = describe_machine(source.get("hardware", {})) + (f", {memory / 1e9:.0f} GB" if memory else "")
    commit = describe_commit(source.get("git_commit"), source.get("git_dirty"))
    return kind, commit, machine, shown, f"{source.get('kernels')}, {source.get('device')}"


def make_setting_sheet(runs: Sequence[Run]) -> Sheet:
    """What the names of settings in the tables of losses stand for."""
    groups = group_runs([run for run in runs if run.is_done], loss_setting)
    differing = describe_differences([loss_setting(members[0]) for members in groups.values()])
    lines = [
        (label, str(len(groups[label])), ", ".join(keys) or MISSING)
        for label, keys in zip(groups, differing, strict=True)
    ]
    note = "All keys on which losses depend and in which these settings differ; only runs of one setting are compared."
    return Sheet("settings", "Settings", note, ("setting", "runs", "differs in"), lines)


def make_run_sheet(runs: Sequence[Run]) -> Sheet:
    """Every run, one line."""
    lines = [
        (
            run.name,
            run.arm,
            str(run.config["model.name"]),
            str(run.config["cluster.ranks"]),
            str(run.config["data.name"]),
            str(run.config["seed"]),
            f"{run.steps}/{run.config['trainer.max_steps']}",
            str(run.summary.get("status")),
            _describe_rate(run.config.get("bandwidth.rate_mbps")),
            describe_commit(run.manifest.get("git_commit"), run.manifest.get("git_dirty")),
        )
        for run in runs
    ]
    headers = ("run", "arm", "model", "ranks", "data", "seed", "steps", "status", "link", "commit")
    return Sheet("runs", "Runs", "One line per recorded run.", headers, lines)


def _describe_rate(rate_mbps: float | None) -> str:
    return "no cap" if rate_mbps is None else f"{rate_mbps:g} Mbit/s"


def make_mean_sheet(
    runs: Sequence[Run],
    name: str,
    title: str,
    note: str,
    columns: Mapping[str, tuple[str, Callable[[float], str]]],
) -> Sheet:
    """Means over steps, then over seeds, of columns of the rows: one line per setting and arm.

    columns: column of the rows -> header, form of the mean.
    """
    lines, numbers = [], []
    for setting, members in group_runs([run for run in runs if run.is_done], loss_setting).items():
        newest = select_newest(members)
        for arm in sort_arms(arm for arm, _ in newest):
            mine = [run for (label, _), run in newest.items() if label == arm]
            means = {column: _mean_over(mine, column) for column in columns}
            numbers.append({"setting": setting, "arm": arm, "runs": len(mine), **means})
            shown = (MISSING if pd.isna(means[key]) else form(means[key]) for key, (_, form) in columns.items())
            lines.append((setting, arm, str(len(mine)), *shown))
    headers = ("setting", "arm", "runs", *(header for header, _ in columns.values()))
    return Sheet(name, title, note, headers, lines, pd.DataFrame(numbers))


def _mean_over(runs: Sequence[Run], column: str) -> float:
    """Mean over the steps of each run, then over runs; NaN where no row has the column."""
    means = []
    for run in runs:
        if column in run.rows:
            kept = run.rows[[column, "steps"]].dropna()
            if kept["steps"].sum():
                means.append((kept[column] * kept["steps"]).sum() / kept["steps"].sum())
    return sum(means) / len(means) if means else float("nan")


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def make_bytes_sheet(runs: Sequence[Run]) -> Sheet:
    """Bytes that a rank sends per step, by kind."""
    kinds = {"value": "values", "index": "index", "return": "returned", "grad": "gradients", "param": "parameters"}
    columns = {f"{kind}_wire_bytes": (f"{label}, MB", _megabytes) for kind, label in kinds.items()}
    note = "Mean MB that one rank sends to the others per step, all steps; gradients = values + index + returned."
    return make_mean_sheet(runs, "bytes", "Bytes by kind", note, columns)


def make_shares_sheet(runs: Sequence[Run]) -> Sheet:
    """Sparsity, union density and peeled share of the buckets that went compressed."""
    columns = {
        "achieved_sparsity": ("sparsity", _percent),
        "union_density": ("union density", _percent),
        "peeled_frac": ("peeled", lambda share: f"{share:.3%}"),
        "fidelity_cosine": ("cosine", lambda value: f"{value:.4f}"),
    }
    note = "Means over steps of the buckets that went compressed. Cosine: decoded against dense mean gradient."
    return make_mean_sheet(runs, "shares", "Sparsity, union and peeling", note, columns)


def make_run_time_sheet(runs: Sequence[Run]) -> Sheet:
    """Iteration times of runs, which did not take turns."""
    table = compare_run_times(runs)
    lines = [
        (
            line["setting"],
            _describe_rate(None if pd.isna(line["rate_mbps"]) else line["rate_mbps"]),
            line["arm"],
            str(line["runs"]),
            f"{line['iteration_ms_median']:.0f} ({line['iteration_ms_p20']:.0f}-{line['iteration_ms_p80']:.0f})",
            format_number(line["time_dilation"], ".4g"),
            MISSING
            if line["arm"] == "fsdp"
            else format_estimate(read_estimate(line, "saved_vs_fsdp_frac", line["pairs_fsdp"])),
            MISSING
            if line["arm"] == "bf16"
            else format_estimate(read_estimate(line, "saved_vs_bf16_frac", line["pairs_bf16"])),
        )
        for _, line in table.iterrows()
    ]
    note = (
        "Of whole runs that followed one another: a drift of the machine is in these numbers. Times as measured; "
        "shares of scaled time, paired by seed."
    )
    headers = ("setting", "link", "arm", "runs", "ms per step (p20-p80)", "dilation", "shorter than fsdp", "than bf16")
    return Sheet("run_times", "Iteration time of runs", note, headers, lines, table)
