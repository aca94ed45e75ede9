"""A long run as it goes: a rank is killed, all ranks start again, and SLURM's warning ends them with a checkpoint.

Its record goes on as if nothing had happened, the mirror in W&B included.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.faults.training import find_ranks
from tagc.train.checkpoint_files import list_checkpoints, read_info
from tests.comm.harness import VOCAB
from tests.record.wandb.offline_log import history_of, read_log
from tests.train.harness import write_tokens

pytestmark = pytest.mark.end_to_end
ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512"),
    *("data=bin", f"data.vocab_size={VOCAB}", "logging.wandb=offline", "kernels=reference"),
    *("trainer.max_steps=100000", "trainer.checkpoint_every=3", "trainer.eval_every=100000"),
    "logging.histograms_every=2",
)


def _load_rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _wait_for(run: subprocess.Popen[str], condition: Callable[[], Any], timeout_s: float = 300) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and run.poll() is None:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(run.communicate() if run.poll() is not None else "nothing happened")


def test_a_killed_rank_costs_no_step_and_sigusr1_leaves_a_checkpoint(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    run_dir = tmp_path / "run"
    command = [sys.executable, "run.py", *SETTINGS, f"data.path={tmp_path}", f"hydra.run.dir={run_dir}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(run, lambda: list_checkpoints(run_dir) and len(_load_rows(run_dir)) > 7)
        os.kill(find_ranks(run.pid)[1], signal.SIGKILL)
        before = _wait_for(run, lambda: _load_rows(run_dir))
        layers_before = _load_rows(run_dir, "layers.jsonl")
        _wait_for(run, lambda: "restart 1 of" in (run_dir / "log.txt").read_text())
        _wait_for(run, lambda: len(_load_rows(run_dir)) > len(before) + 3)
        run.send_signal(signal.SIGUSR1)
        out, err = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 75, err
    assert "restart 1 of at most 3 after: rank 1 was killed" in out
    assert "interrupted by SIGUSR1" in err and "the same command continues" in err
    rows = _load_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["train_loss"] for row in rows[: len(before)]] == [row["train_loss"] for row in before]
    assert read_info(list_checkpoints(run_dir)[0]).step == len(rows)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    layers = _load_rows(run_dir, "layers.jsonl")
    assert [layer["step"] for layer in layers] == [s for s in range(1, len(rows) + 1, 2) for _ in range(3)]
    assert layers[: len(layers_before)] == layers_before
    (log,) = run_dir.glob("wandb/offline-run-*/*.wandb")  # one for both attempts
    history = history_of(read_log(log))
    if "W&B does not mirror this run" not in (run_dir / "log.txt").read_text():  # after a stop it has only seconds
        assert len(history) == len(rows)
    assert [row["_step"] for row in history] == [row["step"] for row in rows[: len(history)]]
    assert [row["train_loss"] for row in history] == [row["train_loss"] for row in rows[: len(history)]]
