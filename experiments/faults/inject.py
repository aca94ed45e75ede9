"""Inject a scripted list of faults into a real run, and compare its end with that of the same run without faults.

    python -m experiments.faults.inject --faults 12:kill,24:damage,36:requeue --out faults.csv \
        trainer.max_steps=60 trainer.checkpoint_every=5

kill, abort: a rank gets SIGKILL or SIGABRT. hang: a rank is stopped (SIGSTOP) until ``cluster.timeout_s`` ends it.
damage: the newest checkpoint loses its last byte, then a rank is killed. crash: the launcher is killed, and started
again. requeue: the launcher gets SIGUSR1, ends with exit code 75 and is started again. The overrides are run.py's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tagc.launch import REQUEUE_EXIT_CODE
from tagc.train.checkpoint_files import list_checkpoints, read_info

ROOT = Path(__file__).parents[2]
SIGNALS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "hang": signal.SIGSTOP, "damage": signal.SIGKILL}
KINDS = (*SIGNALS, "crash", "requeue")
COLUMNS = ("kind", "at_step", "repeated_steps", "seconds_to_next_step")


class Run:
    """One run folder and the command that fills it."""

    def __init__(self, run_dir: Path, overrides: list[str]) -> None:
        self.run_dir = run_dir
        self._command = [sys.executable, "run.py", *overrides, f"hydra.run.dir={run_dir}", "logging.wandb=disabled"]
        self.seen_ranks: set[int] = set()
        self.start()

    def start(self) -> None:
        """Run the command (again)."""
        output = (self.run_dir.parent / f"{self.run_dir.name}.txt").open("a")
        self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=output, stderr=output)

    def rows(self) -> list[dict[str, Any]]:
        """The complete rows of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        """Errors: ``RuntimeError`` if the run ends before."""
        while len(self.rows()) < step:
            if self.process.poll() is not None and len(self.rows()) < step:
                raise RuntimeError(f"the run ended with exit code {self.process.returncode} before step {step}")
            time.sleep(0.02)

    def find_ranks(self) -> list[int]:
        """Processes of the ranks that live."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ranks = sorted(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        self.seen_ranks.update(ranks)
        return ranks

    def inject(self, kind: str) -> None:
        """Let the fault happen; a launcher that ended is started again."""
        ranks = self.find_ranks()
        if kind == "damage":
            path = list_checkpoints(self.run_dir)[0] / "__0_0.distcp"
            os.truncate(path, path.stat().st_size - 1)
        if kind in SIGNALS:
            os.kill(ranks[-1], SIGNALS[kind])
            return
        self.process.send_signal(signal.SIGKILL if kind == "crash" else signal.SIGUSR1)
        code = self.process.wait()
        if kind == "requeue" and code != REQUEUE_EXIT_CODE:
            raise RuntimeError(f"after SIGUSR1 the run ended with exit code {code}")
        self.start()

    def count_orphans(self) -> int:
        """Ranks ever seen that still live."""
        return sum(Path(f"/proc/{pid}").exists() for pid in self.seen_ranks)

    def resumed_steps(self) -> list[int]:
        """The steps after which this run was continued, from its log."""
        log = (self.run_dir / "log.txt").read_text().splitlines()
        return [int(line.split(" after step ")[1].split(",")[0]) for line in log if "WARNING continuing" in line]


def inject_faults(run: Run, faults: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """One row per fault, in the order of their steps."""
    report = []
    for step, kind in sorted(faults):
        run.wait_for_step(step)
        before, resumed = len(run.rows()), len(run.resumed_steps())
        begin_s = time.monotonic()
        run.inject(kind)
        while len(run.resumed_steps()) == resumed:
            if run.process.poll() not in (None, 0):
                raise RuntimeError(f"the run did not survive {kind} at step {step}; see {run.run_dir}.txt")
            time.sleep(0.05)
        from_step = run.resumed_steps()[-1]
        run.wait_for_step(max(before, from_step) + 1)
        seconds = round(time.monotonic() - begin_s, 1)
        report.append(dict(zip(COLUMNS, (kind, before, max(0, before - from_step), seconds), strict=True)))
    return report


def compare_ends(run: Run, reference: Run) -> dict[str, bool]:
    """Whether losses, steps and the last checkpoint's files (parameters, optimizer, residuals) are the reference's."""
    losses, expected = ([row["train_loss"] for row in each.rows()] for each in (run, reference))
    files, expected_files = (read_info(list_checkpoints(each.run_dir)[0]).files for each in (run, reference))
    data = [name for name in expected_files if name.endswith(".distcp")]
    same_files = all(files.get(name) == expected_files[name] for name in data)
    return {"same losses": losses == expected, "same last checkpoint": same_files, "no orphan": not run.count_orphans()}


def main() -> int:
    """Run twice, print the comparison, write the rows; returns 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", required=True, help="STEP:KIND,...; kinds: " + ", ".join(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="CSV of the faults")
    parser.add_argument("overrides", nargs="*", help="of run.py, with a small trainer.checkpoint_every")
    arguments = parser.parse_args()
    faults = [(int(step), kind) for step, kind in (fault.split(":") for fault in arguments.faults.split(","))]
    if unknown := {kind for _, kind in faults} - {*KINDS}:
        parser.error(f"unknown kinds {sorted(unknown)}; the kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="tagc_faults_") as folder:
        reference = Run(Path(folder, "reference"), arguments.overrides)
        reference.process.wait()
        restarts = f"cluster.max_restarts={len(faults)}"
        run = Run(Path(folder, "faults"), [*arguments.overrides, restarts])
        report = inject_faults(run, faults)
        run.process.wait()
        result = compare_ends(run, reference)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(report)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if all(result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
