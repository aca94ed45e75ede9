"""A sweep on a real SLURM, both ways: `run.py -m cluster=slurm` and `sbatch --array slurm/sweep.sbatch`.

Each array has a point that is stopped half-way and comes back, one that fails and one that is cancelled. What one array
interrupts the other runs undisturbed, so the two tell whether a requeue changes a single bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.comm.harness import VOCAB
from tests.slurm.daemons import Slurm, wait_until
from tests.train.harness import write_tokens

pytestmark = [pytest.mark.slurm, pytest.mark.end_to_end]
ROOT = Path(__file__).parents[2]
STEPS = 30
SETTINGS = (
    *("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512"),
    *("data=bin", f"data.vocab_size={VOCAB}", "logging.wandb=disabled", "kernels=reference"),
    *(f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=0", "trainer.eval_every=1000"),
    *("network.latency_ms=30", "network.time_dilation=1"),  # a run takes a while, and the cores are free meanwhile
)
FIRST, SECOND, FAILS, CANCELLED = range(4)


def load_rows(run_dir: Path | None) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl" if run_dir else None
    lines = path.read_text().split("\n")[:-1] if path and path.exists() else []
    return [json.loads(line) for line in lines]


def _find_point(sweep_dir: Path, tokens: str) -> Path | None:
    """The folder of the point that trains on the file of this name."""
    for path in sweep_dir.rglob("config.yaml"):
        if path.parent.name != ".hydra" and Path(yaml.safe_load(path.read_text())["data"]["path"]).name == tokens:
            return path.parent
    return None


def _states(slurm: Slurm, array: str) -> list[tuple[str, str]]:
    """(state, restarts) of the four tasks."""
    jobs = [slurm.describe_job(f"{array}_{index}") for index in range(4)]
    return [(job.get("JobState", ""), job.get("Restarts", "")) for job in jobs]


def test_a_sweep_through_submitit_and_through_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    names = ["tokens0", "tokens1", "missing", "tokens3"]
    for index in (FIRST, SECOND, CANCELLED):
        (tmp_path / names[index]).mkdir()
        write_tokens(tmp_path / names[index])
    sweep = [*SETTINGS, "data.path=" + ",".join(str(tmp_path / name) for name in names)]
    submitit_dir, sbatch_dir = tmp_path / "submitit", tmp_path / "sbatch"

    sbatch = [
        "sbatch",
        "--parsable",
        "--time=5",
        "--array=0-3%3",
        f"--output={tmp_path}/%a.out",
        "slurm/sweep.sbatch",
        *sweep,
    ]
    run_py = [sys.executable, "run.py", "-m", "cluster=slurm", "cluster.time=5", "cluster.array_parallelism=3", *sweep]
    by_sbatch = subprocess.run(
        [*sbatch, f"hydra.sweep.dir={sbatch_dir}"], cwd=ROOT, env=slurm.environment, capture_output=True, text=True
    )
    assert by_sbatch.returncode == 0, by_sbatch.stderr
    second_array = by_sbatch.stdout.strip()
    with (tmp_path / "run.out").open("w+") as said:
        command = [*run_py, f"hydra.sweep.dir={submitit_dir}"]
        waiting = subprocess.Popen(command, cwd=ROOT, env=slurm.environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: list(submitit_dir.glob(".submitit/*_0")) or waiting.poll() is not None, "an array")
            said.seek(0)
            assert waiting.poll() is None, said.read()
            first_array = next(submitit_dir.glob(".submitit/*_0")).name.removesuffix("_0")
            slurm.ask("scancel", f"{first_array}_{CANCELLED}")

            wait_until(lambda: len(load_rows(_find_point(submitit_dir, "tokens0"))) > 3, "rows of the first point")
            slurm.ask("scancel", "--signal=USR1", f"{first_array}_{FIRST}")  # as at the end of the time
            wait_until(lambda: len(load_rows(_find_point(sbatch_dir, "tokens1"))) > 3, "rows of the second point")
            slurm.ask("scontrol", "requeue", f"{second_array}_{SECOND}")  # as preemption does
            wait_until(lambda: load_rows(_find_point(sbatch_dir, "tokens3")), "rows of the cancelled point")
            slurm.ask("scancel", f"{second_array}_{CANCELLED}")

            wait_until(lambda: waiting.poll() is not None, "the end of run.py", 150)
        finally:
            waiting.kill()
        said.seek(0)
        told = said.read()
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", second_array), "the end of the second array", 60)

    assert waiting.returncode not in (0, None), told
    assert _states(slurm, first_array) == [
        ("COMPLETED", "1"), ("COMPLETED", "0"), ("FAILED", "0"), ("CANCELLED", "0"),
    ], told  # fmt: skip
    assert _states(slurm, second_array) == [
        ("COMPLETED", "0"), ("COMPLETED", "1"), ("FAILED", "0"), ("CANCELLED", "0"),
    ]  # fmt: skip
    for name in ("tokens0", "tokens1"):
        both = [load_rows(_find_point(sweep_dir, name)) for sweep_dir in (submitit_dir, sbatch_dir)]
        losses = [[(row["step"], row["train_loss"]) for row in rows] for rows in both]
        assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
