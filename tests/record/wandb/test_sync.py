"""Uploading recorded runs: the library's own client against a stand-in for the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tagc.record import Recorder, build_manifest
from tagc.record.wandb import run, sync
from tagc.record.wandb.process import lock_mirror
from tests.record.wandb.server import serve_wandb


@pytest.fixture
def record_run(config, make_row, tmp_path):
    """Records rows into a folder, or more rows into the same; the mirror stays out of it."""
    config.logging.wandb, config.experiment = "offline", "paper"

    def record(*steps: int, loss: float = 2.0, resume_step: int | None = None, name: str = "run") -> Path:
        manifest = build_manifest(config, kernels="reference", device="cpu") | {"wandb_mode": "disabled"}
        with Recorder(tmp_path / name, config, manifest, resume_step) as recorder:
            for step in steps:
                recorder.layers([{"step": step, "layer": "head", "threshold": 0.5}])
                recorder.step(make_row(step, train_loss=loss))
        return tmp_path / name

    return record


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")  # as on a cluster: who calls the command wants to upload
    with serve_wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


def test_every_step_is_uploaded_once_however_often(record_run, server, capsys, tmp_path):
    run_dir = record_run(1, 2, 3)
    run_id = json.loads((run_dir / "manifest.json").read_text())["wandb_run_id"]
    assert sync.main([str(tmp_path)]) == 0
    assert f"{run_dir}: 3 of 3 steps uploaded" in capsys.readouterr().out
    (stored,) = server.runs.values()
    assert list(server.runs) == [run_id] and stored.exit_code == 0
    assert [(row["_step"], row["step"], row["train_loss"]) for row in stored.history] == [
        (s, s, 2.0) for s in (1, 2, 3)
    ]
    assert stored.history[0]["layers/head/threshold"] == 0.5
    assert (stored.fields["groupName"], stored.config["compressor.sparsity"]) == ("paper", 0.8)
    assert stored.summary["iteration_ms_median"] == 1000

    requests = len(server.operations)
    assert sync.main([str(run_dir)]) == 0
    assert "nothing new" in capsys.readouterr().out and len(server.operations) == requests

    (run_dir / "wandb" / "uploaded.json").write_text("damaged")  # the server itself knows best
    record_run(2, 3, 4, loss=1.0, resume_step=1)
    assert sync.main([str(run_dir)]) == 0
    assert "1 of 4 steps uploaded" in capsys.readouterr().out
    assert [(row["_step"], row["train_loss"]) for row in stored.history] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0)]


def test_what_is_not_uploaded_is_told(config, record_run, server, capsys, tmp_path):
    config.logging.wandb = "disabled"
    record_run(1, name="disabled")
    record_run(1, name="disabled/earlier/1")
    config.logging.wandb = "offline"
    with lock_mirror(record_run(1, name="training"), 0):
        assert sync.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "disabled: not for W&B" in out and "training: left alone" in out and server.runs == {}
    assert out.count("\n") == 2


def test_a_dead_server_and_missing_runs_are_clear_errors(record_run, server, monkeypatch, capsys, tmp_path):
    assert sync.main([str(tmp_path / "nowhere")]) == 1
    assert "no recorded run" in capsys.readouterr().out
    run_dir = record_run(1)
    monkeypatch.setattr(run, "INIT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert sync.main([str(run_dir)]) == 1
    assert "FAILED, nothing is lost" in capsys.readouterr().out
    assert not (run_dir / "wandb" / "uploaded.json").exists()


def test_without_a_key_nothing_is_tried(record_run, monkeypatch, capsys, tmp_path):
    import wandb

    run_dir = record_run(1)
    monkeypatch.setattr(wandb, "login", lambda **options: options["prompt"])
    assert sync.main([str(run_dir)]) == 1
    assert "set WANDB_API_KEY" in capsys.readouterr().out
