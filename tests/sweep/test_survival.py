"""A real sweep of four points: one fails, the last is killed half-way with the whole sweep; the same command again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tagc.cli.entry import compose_config
from tagc.sweep.identity import name_folder
from tagc.sweep.states import State, read_state
from tagc.train.checkpoint_files import list_checkpoints
from tests.comm.harness import VOCAB
from tests.train.harness import write_tokens

pytestmark = pytest.mark.end_to_end
ROOT = Path(__file__).parents[2]
STEPS = 30
SETTINGS = (
    *("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512"),
    *("data=bin", f"data.vocab_size={VOCAB}", "logging.wandb=disabled", "kernels=reference", "compressor=tagc2"),
    *(f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=6", "trainer.eval_every=1000"),
)
# The last axis decides no loss, so every point has a twin that says what an undisturbed run records.
GRID = [(f"seed={seed}", f"trainer.timing_warmup_steps={warmup}") for seed in (0, 1) for warmup in (1, 2)]
FAILS, KILLED = 1, 3  # points; each one's twin is the one before


def _load_losses(run_dir: Path) -> list[tuple[Any, ...]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["train_loss"], row["grad_norm"]) for row in rows]


def test_the_same_command_finishes_what_failed_and_what_was_killed(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    common = (*SETTINGS, f"data.path={tmp_path}")
    folders = [tmp_path / "sweep" / name_folder(compose_config([*common, *point])) for point in GRID]
    axes = ("seed=0,1", "trainer.timing_warmup_steps=1,2")
    command = [sys.executable, "run.py", "-m", *common, *axes, f"hydra.sweep.dir={tmp_path}/sweep"]
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "multirun.yaml").touch()
    (folders[FAILS] / "log.txt").mkdir(parents=True)  # no file can be written there
    with (tmp_path / "said").open("w") as said:
        sweep = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            while sweep.poll() is None and not list_checkpoints(folders[KILLED]):
                time.sleep(0.005)
        finally:
            os.killpg(sweep.pid, signal.SIGKILL)
            sweep.wait()
    expected = [State.DONE] * len(GRID)
    expected[FAILS], expected[KILLED] = State.FAILED, State.INTERRUPTED
    assert [read_state(folder) for folder in folders] == expected, (tmp_path / "said").read_text()
    assert "log.txt" in (folders[FAILS] / "error.txt").read_text()
    kept = len((folders[KILLED] / "metrics.jsonl").read_text().splitlines())
    assert kept < STEPS
    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders[:FAILS]]

    (folders[FAILS] / "log.txt").rmdir()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "4 point(s), 2 done, 1 failed, 1 interrupted" in again.stdout
    assert [read_state(folder) for folder in folders] == [State.DONE] * len(GRID)
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders[:FAILS]] == before
    assert "continu" in (folders[KILLED] / "log.txt").read_text()
    for point in (FAILS, KILLED):
        losses = _load_losses(folders[point])
        assert len(losses) == STEPS and losses == _load_losses(folders[point - 1])
    assert len({_load_losses(folders[point])[-1] for point in (0, 2)}) == 2, "seeds that train alike prove nothing"
