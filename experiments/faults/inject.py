"""Inject a scripted list of faults into a real run, and compare its end with that of the same run without faults.

    python -m experiments.faults.inject --faults 12:kill,24:damage,36:requeue --out faults.csv \
        trainer.max_steps=60 trainer.checkpoint_every=5

    python -m experiments.faults.inject @experiments/faults/soak.args --out experiments/faults/soak.csv

Kinds: see experiments/faults/kinds.py. The overrides are run.py's. A fault waits for a checkpoint to go back to.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.faults.kinds import KINDS, RESTARTING, small_disk
from experiments.faults.training import Run, compare_ends
from experiments.rows import write_rows
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.train.checkpoint_files import list_checkpoints

COLUMNS = ("kind", "at_step", "repeated_steps", "seconds_to_next_step")


def inject_fault(run: Run, kind: str, step: int) -> dict[str, Any]:
    """Wait for ``step``, break the run, and wait for a step that it had not made before. Returns the row."""
    run.wait_for_step(step)
    run.wait_for(lambda: list_checkpoints(run.run_dir), "its first checkpoint")
    at_step = reached = run.step
    resumed = len(run.resumed_steps())
    begin_s = time.monotonic()
    KINDS[kind](run)

    def has_resumed() -> bool:
        nonlocal reached
        reached = max(reached, run.step)  # a fault may take some steps to show
        return len(run.resumed_steps()) > resumed

    repeated = 0
    if kind in RESTARTING:
        run.wait_for(has_resumed, f"it went on after {kind} at {step}")
        repeated = max(0, reached - run.resumed_steps()[-1])
    run.wait_for_step(reached + 1)
    return dict(zip(COLUMNS, (kind, at_step, repeated, round(time.monotonic() - begin_s, 1)), strict=True))


def main() -> int:
    """Run twice, print the comparison, write the rows; returns 0 if nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("--faults", required=True, help="STEP:KIND,...; kinds: " + ", ".join(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="CSV of the faults")
    parser.add_argument("overrides", nargs="*", help="of run.py, with a small trainer.checkpoint_every")
    arguments = parser.parse_args()
    faults = [(int(step), kind) for step, kind in (fault.split(":") for fault in arguments.faults.split(","))]
    if unknown := {kind for _, kind in faults} - KINDS.keys():
        parser.error(f"unknown kinds {sorted(unknown)}; the kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="tagc_faults_") as folder, ExitStack() as stack:
        disk = Path(folder, "disk")
        disk.mkdir()
        if any(kind == "full" for _, kind in faults):
            stack.enter_context(small_disk(disk))
        with Run(Path(folder, "reference"), Path(folder, "reference.txt"), arguments.overrides) as reference:
            reference.wait_for_end()
        restarts = f"cluster.max_restarts={len(faults)}"
        with Run(disk / "faults", Path(folder, "faults.txt"), [*arguments.overrides, restarts]) as run:
            report = [inject_fault(run, kind, step) for step, kind in sorted(faults)]
            run.wait_for_end()
        result = compare_ends(run, reference)
    write_rows(arguments.out, report, COLUMNS)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if all(result.values()) else 1


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
