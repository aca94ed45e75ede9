"""What the parts of the check share: arguments, the file of rows, the backend under test."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.rows import append_row

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("part", "name", "setting", "metric", "unit", "value", "p20", "p80", "n")
COLUMNS += ("commit", "dirty", "python", "torch", "triton", "device")


@dataclass
class Part:
    """One part of the check in its own process."""

    name: str
    device: Any  # torch.device
    out: Path
    deadline_s: float  # on time.monotonic's clock
    commit: str | None

    @property
    def is_cpu(self) -> bool:
        """Whether the same code runs on tiny sizes, in Triton's interpreter, to prove the script."""
        return self.device.type == "cpu"

    def add_row(
        self,
        name: str,
        setting: dict[str, Any],
        metric: str,
        unit: str,
        value: float,
        spread: tuple[float | None, float | None, int] | None = None,
    ) -> None:
        """Append one row to rows.csv at once. spread: p20 and p80 (or None) and n; ``value`` is then a median."""
        path = self.out / "rows.csv"
        p20, p80, n = spread or (None, None, 1)
        words = " ".join(f"{key}={value}" for key, value in setting.items() if value is not None)
        row = dict(zip(COLUMNS, (self.name, name, words, metric, unit, value, p20, p80, n), strict=False))
        append_row(path, row | describe_origin(self.commit, self.device), COLUMNS)


@cache
def describe_origin(commit: str | None, device: Any) -> dict[str, Any]:
    """The columns that say where a row comes from. commit: None to ask git."""
    import torch

    from tagc.record.manifest import describe_git, describe_versions

    git, versions = describe_git(), describe_versions()
    return {
        "commit": commit or git["git_commit"],
        "dirty": git["git_dirty"],
        **{name: versions[name] for name in ("python", "torch", "triton")},
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
    }


def run_part(name: str, measure: Callable[[Part], bool]) -> None:
    """Parse the arguments that ``__main__`` passes on, measure, and exit with 1 if ``measure`` says that it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--commit")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.budget_s
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    # With fewer queues, streams share one, and a paced link's delay would hold up computation.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import torch

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options.out.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if measure(Part(name, device, options.out, deadline_s, options.commit)) else 1)


def load_kernels() -> ModuleType:
    """The Triton backend: compiled on a GPU, in the interpreter elsewhere."""
    from tagc.kernels import triton

    return triton


def load_option(group: str, name: str) -> dict[str, Any]:
    """What ``conf/<group>/<name>.yaml`` sets."""
    import yaml

    return yaml.safe_load((ROOT / "conf" / group / f"{name}.yaml").read_text()) or {}
