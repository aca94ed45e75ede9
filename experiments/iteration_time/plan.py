"""The plan: which cells there are, and the run configuration of every arm in them.

A cell is one model, number of ranks, parameter dtype, reshard setting and link. All its arms share one launch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from experiments.iteration_time.arms import OTHER_TRANSPORT, arm_overrides
from tagc.cli import entry as cli
from tagc.config import Config, flatten, to_dict
from tagc.errors import UserError

PLAN_PATH = Path(__file__).with_name("plan.yaml")
_LINK = re.compile(
    r"uncapped|(?P<ratio>[\d.]+)x|(?P<rate>[\d.]+)(?P<unit>[mg])bps(?:@(?P<gpu>\w+))?",
)


@dataclass(frozen=True)
class LinkSpec:
    """A cap as the plan names it; at most one of the first two is set. Its rate may depend on measured computation."""

    rate_mbps: float | None = None  # Mbit/s per direction; with ``gpu``: on the machine with that GPU
    comm_over_compute: float | None = None  # the baseline's link time over its computation
    gpu: str | None = None


def parse_link(text: str) -> LinkSpec:
    """``uncapped``, ``200mbps``, ``5x`` or ``10gbps@rtx3080``. Errors: ``UserError`` for anything else."""
    match = _LINK.fullmatch(text)
    if match is None:
        raise UserError(f"link {text} in the plan is not legal; write uncapped, 200mbps, 1gbps, 5x or 10gbps@rtx3080")
    if match["ratio"]:
        return LinkSpec(comm_over_compute=float(match["ratio"]))
    if match["rate"]:
        return LinkSpec(float(match["rate"]) * (1000 if match["unit"] == "g" else 1), gpu=match["gpu"])
    return LinkSpec()


@dataclass(frozen=True)
class Cell:
    """One launch. Every field but ``key`` is explained in plan.yaml."""

    key: str  # names the recorded files
    model: str
    overrides: tuple[str, ...]  # the model's Hydra overrides
    network: str
    link: str
    arms: tuple[str, ...]
    ranks: int
    param_dtype: str
    reshard: bool
    blocks: int
    block_steps: int
    warmup_steps: int
    uncapped_steps: int
    vocab_size: int | None = None  # None: the data's
    reference_tokens: int | None = None  # None: as many as here

    @property
    def setting(self) -> str:
        """The name without the link: what cells at several rates have in common."""
        return self.key.removesuffix("-" + _slug(self.link))

    @property
    def steps(self) -> int:
        """Optimizer steps that every arm makes."""
        return self.warmup_steps + self.uncapped_steps + self.blocks * self.block_steps


def _slug(link: str) -> str:
    return link.replace("@", "_at_")


def load_plan(network: str, path: Path = PLAN_PATH) -> list[Cell]:
    """All cells of a plan file, in its order, for one way of capping the link (``network``).

    Errors: ``UserError`` naming the key for a setting that no cell has, an unknown arm, no arm ``fsdp``, or two cells
    of one name.
    """
    plan = yaml.safe_load(path.read_text())
    cells = [_make_cell(plan, group, link, network) for group in plan["groups"] for link in group["links"]]
    keys = [cell.key for cell in cells]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise UserError(f"{path}: two cells are called {', '.join(sorted(twice))}; give one of the groups a `name`")
    return cells


def _make_cell(plan: dict[str, Any], group: dict[str, Any], link: str, network: str) -> Cell:
    settings = plan["defaults"] | plan["models"][group["model"]] | group
    name = settings.pop("name", settings["model"])
    settings.pop("links")
    parse_link(link)
    dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(settings["param_dtype"], settings["param_dtype"])
    reshard = "reshard" if settings["reshard"] else "keep"
    key = f"{name}-r{settings['ranks']}-{dtype}-{reshard}-{_slug(link)}"
    for arm in settings["arms"]:
        arm_overrides(arm)
    if "fsdp" not in settings["arms"]:
        raise UserError(f"cell {key}: its arms lack fsdp, the baseline of every comparison")
    arms = tuple(arm for arm in settings.pop("arms") if network == "namespaces" or arm not in OTHER_TRANSPORT)
    known = {field.name for field in fields(Cell)}
    if set(settings) - known:
        raise UserError(f"plan.yaml: {', '.join(sorted(set(settings) - known))} is no setting of a group")
    settings["overrides"] = tuple(settings["overrides"])
    return Cell(key=key, network=network, link=link, arms=arms, **settings)


def select_cells(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose key matches any pattern (``*`` stands for anything). Errors: ``UserError`` if none does."""
    chosen = [cell for cell in cells if not patterns or any(fnmatchcase(cell.key, pattern) for pattern in patterns)]
    if not chosen:
        names = "\n  ".join(cell.key for cell in cells)
        raise UserError(f"--cells {' '.join(patterns)} matches nothing; there are\n  {names}")
    return chosen


def compose_config(cell: Cell, arm: str) -> Config:
    """The run that ``python run.py`` with these overrides would make, link uncapped: the harness sets the rate."""
    overrides = [
        *cell.overrides,
        f"network={cell.network}",
        *([f"network.reference_gpu={gpu}"] if (gpu := parse_link(cell.link).gpu) else []),
        "bandwidth=unlimited",
        "cluster.max_restarts=0",  # there is nothing to continue: the command itself starts the cell again
        f"cluster.ranks={cell.ranks}",
        f"trainer.param_dtype={cell.param_dtype}",
        f"trainer.reshard_after_forward={str(cell.reshard).lower()}",
        f"trainer.max_steps={cell.steps}",
        *arm_overrides(arm),  # last: an arm may set what the cell sets
    ]
    return _compose(tuple(overrides))


@cache
def _compose(overrides: tuple[str, ...]) -> Config:
    return cli.compose_config(overrides)


def describe_cell(cell: Cell) -> dict[str, Any]:
    """All that the cell's numbers depend on but code and machine, flat and as JSON has it.

    The baseline's whole configuration, and of the other arms what is different.
    """
    flat = {f"cell.{key}": value for key, value in asdict(cell).items()}
    baseline = flatten(to_dict(compose_config(cell, "fsdp")))
    flat |= {f"fsdp.{key}": value for key, value in baseline.items()}
    for arm in cell.arms:
        config = flatten(to_dict(compose_config(cell, arm)))
        flat |= {f"{arm}.{key}": value for key, value in config.items() if value != baseline[key]}
    return json.loads(json.dumps(flat))


def shorten(cell: Cell) -> Cell:
    """The cell with five arms and few steps: for a look, not for a result."""
    arms = tuple(arm for arm in ("noop", "fsdp", "bf16", "tagc2", "packed") if arm in cell.arms)
    return replace(cell, arms=arms, blocks=2, block_steps=3, warmup_steps=2, uncapped_steps=2)
