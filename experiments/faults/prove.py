"""20 steps against 10, SIGKILL to one rank, the automatic restart and the rest: is the end the same, bit by bit?

    python -m experiments.faults.prove --out experiments/faults/exact.csv

For every compressor: the losses of all steps, and the files of the last checkpoint (parameters, optimizer, residuals
and all other state of every rank, by size and CRC-32). Overrides of run.py may follow.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.faults.kinds import KINDS
from experiments.faults.training import Run, compare_ends
from experiments.rows import make_parser, write_rows
from tagc.config import COMPRESSORS
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.record.manifest import describe_git
from tagc.train.checkpoint_files import list_checkpoints

STEPS, SAVE_EVERY = 20, 10
# The paced link makes a step long enough to be hit between the first checkpoint and the end.
SETTINGS = (
    *("model.layers=2", "model.width=64", "model.heads=4", "model.context=32", "compressor.min_numel=512"),
    *("bandwidth=100mbps", "network=paced", "network.time_dilation=1", f"trainer.max_steps={STEPS}"),
    f"trainer.checkpoint_every={SAVE_EVERY}",
)


def prove(compressor: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One row."""
    settings = [*SETTINGS, f"compressor={compressor}", *overrides]
    with Run(folder / "reference", folder / "reference.txt", settings) as reference:
        reference.wait_for_end()
    with Run(folder / "killed", folder / "killed.txt", settings) as run:
        run.wait_for(lambda: list_checkpoints(run.run_dir), "its first checkpoint")
        killed_at = run.step
        KINDS["kill"](run)
        run.wait_for_end()
    (resumed,) = run.resumed_steps()
    equal = compare_ends(run, reference)
    return {"compressor": compressor, "steps": run.step, "killed_at_step": killed_at, "resumed_after": resumed, **equal}


def main() -> int:
    """Prove all, write the rows as they come; returns 0 if every run ended as its reference."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    version = describe_git(ignored=["experiments/faults/*.csv"])
    rows: list[dict[str, Any]] = []

    def prove_all() -> Iterator[dict[str, Any]]:
        for compressor in COMPRESSORS:
            with tempfile.TemporaryDirectory(prefix="tagc_prove_") as folder:
                rows.append(prove(compressor, Path(folder), arguments.overrides) | version)
            sys.stdout.write(f"{rows[-1]}\n")
            yield rows[-1]

    write_rows(arguments.out, prove_all())
    return 0 if all(row["losses_equal"] and row["checkpoint_equal"] and row["no_orphan"] for row in rows) else 1


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
