"""A real run as a child process: start it, watch its folder, find its ranks, compare its end with another run's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tagc.record import load_rows
from tagc.train.checkpoint_files import list_checkpoints, read_info

ROOT = Path(__file__).parents[2]


def find_ranks(launcher: int) -> list[int]:
    """The processes of a launcher's ranks on a CPU: the children of its fork server, in the order of their start."""
    servers = [pid for pid in _children(launcher) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(pid for server in servers for pid in _children(server))


def _children(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(pid) for path in threads for pid in path.read_text().split()]


class Run:
    """One run folder and the command that fills it; ``output`` takes what it prints. As a context: ends with it."""

    def __init__(self, run_dir: Path, output: Path, overrides: list[str]) -> None:
        self.run_dir, self.output = run_dir, output
        self._command = [sys.executable, "run.py", *overrides, f"hydra.run.dir={run_dir}", "logging.wandb=disabled"]
        self._seen_ranks: set[int] = set()
        self.start()

    def start(self) -> None:
        """Run the command (again)."""
        with self.output.open("a") as output:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=output, stderr=output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def step(self) -> int:
        """Steps on record."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Errors: ``RuntimeError`` if the run ends before."""
        while not condition():
            if self.process.poll() is not None and not condition():
                end = "\n".join(self.output.read_text().splitlines()[-10:])
                raise RuntimeError(f"the run ended with exit code {self.process.returncode} before {what}:\n{end}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Errors: as :meth:`wait_for`."""
        self.wait_for(lambda: self.step >= step, f"step {step}")

    def wait_for_end(self) -> None:
        """Errors: ``RuntimeError`` if it did not end well."""
        self.wait_for(lambda: self.process.poll() == 0, "its end")

    def find_ranks(self) -> list[int]:
        """Processes of the ranks that live."""
        ranks = find_ranks(self.process.pid)
        self._seen_ranks.update(ranks)
        return ranks

    def has_orphans(self) -> bool:
        """Whether a rank lives that :meth:`find_ranks` ever saw."""
        return any(Path(f"/proc/{pid}").exists() for pid in self._seen_ranks)

    def resumed_steps(self) -> list[int]:
        """The steps after which this run was continued, from its log."""
        log = (self.run_dir / "log.txt").read_text().splitlines()
        return [int(line.split(" after step ")[1].split(",")[0]) for line in log if "WARNING continuing" in line]


def compare_ends(run: Run, reference: Run) -> dict[str, bool]:
    """Whether losses, steps and the last checkpoint's files (parameters, optimizer, residuals) are the reference's."""
    losses, expected = (
        [row["train_loss"] for row in load_rows(each.run_dir / "metrics.jsonl")] for each in (run, reference)
    )
    files, expected_files = (read_info(list_checkpoints(each.run_dir)[0]).files for each in (run, reference))
    data = [name for name in expected_files if name.endswith(".distcp")]
    same_files = all(files.get(name) == expected_files[name] for name in data)
    return {"losses_equal": losses == expected, "checkpoint_equal": same_files, "no_orphan": not run.has_orphans()}
