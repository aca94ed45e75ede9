"""What may be compared with what, and what may be averaged: a run's settings, its arm, and what to warn of."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from analysis.records.cells import describe_machine
from analysis.records.load import Recorded, Run
from tagc.config import affects

DILATION_TOLERANCE = 0.02
FEW_BLOCKS = 5

Setting = dict[str, Any]


class Notice(NamedTuple):
    """Something that a reader must know before trusting a comparison."""

    where: str
    text: str


def loss_setting(run: Run) -> Setting:
    """All but compressor and seed that the losses depend on. Equal settings: losses may be compared."""
    keys = [key for key in run.config if key.split(".")[0] in ("model", "data", "trainer") and key != "data.path"]
    setting = {key: run.config[key] for key in keys if affects(key) == "numbers"}  # a fingerprint stands for data.path
    setting["cluster.ranks"] = run.config["cluster.ranks"]
    setting["data.fingerprint"] = run.manifest.get("data", {}).get("fingerprint")
    setting["device"] = run.manifest.get("device")
    return setting


def time_setting(run: Run) -> Setting:
    """All but compressor and seed that a step's time depends on, machine and link included."""
    setting = loss_setting(run)
    setting |= {
        key: value for key, value in run.config.items() if key.startswith("trainer.") and affects(key) == "time"
    }
    keys = ("bandwidth.rate_mbps", "network.latency_ms", "network.time_dilation", "network.reference_gpu")
    setting |= {key: run.config.get(key) for key in keys}
    setting["network"] = run.manifest.get("network", run.config.get("network.name"))
    setting["machine"] = describe_machine(run.manifest.get("hardware", {}))
    setting |= {key: run.manifest.get(key) for key in ("kernels", "threads_per_rank")}
    return setting


def identify_run(run: Run) -> Setting:
    """Everything that tells this run from another: settings of time and loss, compressor, weights, seed."""
    method = {key: value for key, value in run.config.items() if key.startswith(("compressor.", "weights."))}
    return time_setting(run) | method | {"seed": run.config["seed"]}


def freeze(setting: Setting) -> Hashable:
    """The setting as a key of a dict; a key that older rows lack is as good as one that is not set."""
    return tuple(sorted((key, repr(value)) for key, value in setting.items() if value is not None))


def group_runs(runs: Iterable[Run], setting_of: Any) -> dict[str, list[Run]]:
    """Runs by setting, under labels that tell the settings apart, in the order of their first run."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        groups.setdefault(freeze(setting_of(run)), []).append(run)
    labels = label_settings([setting_of(members[0]) for members in groups.values()])
    return dict(zip(labels, groups.values(), strict=True))


def label_settings(settings: Sequence[Setting]) -> list[str]:
    """``nano, 2 ranks, pystdlib, 300 steps``, and the keys in which settings of one such name differ besides."""
    shown = ("model.name", "cluster.ranks", "data.name", "trainer.max_steps")
    bases = ["{}, {} ranks, {}, {} steps".format(*(setting.get(key) for key in shown)) for setting in settings]
    labels = list(bases)
    for base in set(bases):
        members = [i for i, other in enumerate(bases) if other == base]
        for i, difference in zip(members, describe_differences([settings[i] for i in members]), strict=True):
            labels[i] = ", ".join([base, *difference])
    return labels


def describe_differences(settings: Sequence[Setting]) -> list[list[str]]:
    """For each setting ``key=value`` of every key in which not all are equal."""
    keys = sorted(set().union(*settings)) if settings else []
    differing = [key for key in keys if len({repr(setting.get(key)) for setting in settings}) > 1]
    return [[f"{key}={_shorten(setting.get(key))}" for key in differing] for setting in settings]


def _shorten(value: Any) -> str:
    text = str(value)
    return text[:8] if len(text) == 64 else text  # a fingerprint


def sort_by_start(runs: Iterable[Run]) -> list[Run]:
    """The newest last."""
    return sorted(runs, key=lambda run: (str(run.manifest.get("started_at")), run.name))


def select_newest(runs: Iterable[Run]) -> dict[tuple[str, int], Run]:
    """By arm and seed, the run that started last: a repetition of a seed is no further seed."""
    newest: dict[tuple[str, int], Run] = {}
    for run in sort_by_start(runs):
        newest[run.arm, run.config["seed"]] = run
    return newest


def find_notices(recorded: Recorded) -> list[Notice]:
    """What the report says in front: runs that were left out, and what is doubtful about the others."""
    notices = [Notice(where, f"DAMAGED, in nothing below: {why}") for where, why in recorded.damaged]
    notices += [Notice(where, f"left out: {why}") for where, why in recorded.left_out]
    for run in recorded.runs:
        notices += [Notice(run.name, problem) for problem in run.problems]
        if not run.is_done:
            steps = f"{run.steps} of {run.config['trainer.max_steps']} steps"
            notices.append(Notice(run.name, f"{run.summary.get('status')} after {steps}: in no comparison"))
    done = [run for run in recorded.runs if run.is_done]
    groups = group_runs(done, loss_setting)
    if len(groups) > 1:
        notices.append(Notice("runs", f"{len(groups)} settings of model, data or training: each compared by itself"))
    for label, runs in groups.items():
        notices += _judge_losses(label, runs)
    for label, runs in group_runs(done, time_setting).items():
        notices += _judge_times(label, runs)
    return notices + _judge_commits(recorded) + _judge_cells(recorded)


def _judge_losses(label: str, runs: Sequence[Run]) -> list[Notice]:
    newest = select_newest(runs)
    found: list[Notice] = []
    seeds_of: dict[str, set[int]] = {}
    for arm, seed in newest:
        seeds_of.setdefault(arm, set()).add(seed)
    if "fsdp" not in seeds_of:
        found.append(Notice(label, "no run of fsdp: no degradation can be given"))
    single = [arm for arm, seeds in seeds_of.items() if len(seeds) == 1]
    if single:
        found.append(Notice(label, f"one seed only, so no interval: {', '.join(single)}"))
    unpaired = [arm for arm, seeds in seeds_of.items() if "fsdp" in seeds_of and not seeds & seeds_of["fsdp"]]
    if unpaired:
        found.append(Notice(label, f"no seed in common with fsdp: {', '.join(unpaired)}"))
    lossless = sorted({arm for (arm, _), run in newest.items() if math.isnan(run.final_loss)})
    if lossless:
        found.append(
            Notice(label, f"last loss is no number: it diverged or was never validated: {', '.join(lossless)}")
        )
    if len(runs) > len(newest):
        found.append(Notice(label, f"{len(runs) - len(newest)} repetitions of an arm and seed: the newest counts"))
    return found


def _judge_times(label: str, runs: Sequence[Run]) -> list[Notice]:
    dilations = [run.summary["time_dilation"] for run in runs if run.summary.get("time_dilation")]
    if len(dilations) > 1 and max(dilations) > (1 + DILATION_TOLERANCE) * min(dilations):
        text = f"measured time dilation from {min(dilations):.4g} to {max(dilations):.4g}: the links were not the same"
        return [Notice(label, f"{text}; give all runs one network.time_dilation")]
    return []


def _judge_commits(recorded: Recorded) -> list[Notice]:
    """Runs and cells from changed or unknown code; several commits or machines."""
    sources = [("run " + run.name, run.manifest) for run in recorded.runs]
    sources += [("cell " + cell.shared["cell"]["key"], cell.shared) for cell in recorded.cells]
    dirty = [name for name, source in sources if source.get("git_dirty") or not source.get("git_commit")]
    found = []
    if dirty:
        found.append(Notice(_list_some(dirty), "recorded with local changes or without a commit: cannot be repeated"))
    kinds = {"commits": {(source.get("git_commit") or "unknown")[:7] for _, source in sources}}
    kinds["machines"] = {describe_machine(source.get("hardware", {})) for _, source in sources}
    kinds["versions of torch"] = {str(source.get("versions", {}).get("torch")) for _, source in sources}
    for kind, values in kinds.items():
        if len(values) > 1:
            found.append(Notice("all", f"recorded on {len(values)} {kind}: {', '.join(sorted(values))}"))
    return found


def _judge_cells(recorded: Recorded) -> list[Notice]:
    """Settings whose cells do not have the same arms; cells of few blocks."""
    arms_of: dict[str, set[tuple[str, ...]]] = {}
    for cell in recorded.cells:
        arms_of.setdefault(cell.shared["setting"], set()).add(tuple(cell.shared["cell"]["arms"]))
    found = [
        Notice(setting, "its cells differ in arms: not every arm was measured at every link")
        for setting, arms in arms_of.items()
        if len(arms) > 1
    ]
    for cell in recorded.cells:
        key, blocks = cell.shared["cell"]["key"], cell.shared["cell"]["blocks"]
        if blocks < FEW_BLOCKS:
            found.append(Notice(key, f"{blocks} blocks only: its intervals are little more than the range"))
    return found


def _list_some(names: Sequence[str], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
