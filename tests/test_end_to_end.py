"""run.py as a user runs it: real ranks, real text, real files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.record.wandb.dashboard import find_missing

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.end_to_end

TINY = [
    "model.layers=2",
    "model.width=48",
    "model.heads=3",
    "model.context=32",
    "compressor.min_numel=512",
    "trainer.global_batch=12",
    "trainer.timing_warmup_steps=1",
    "logging.wandb=disabled",
    "data=bin",
    "data.vocab_size=256",
]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Bytes of this project's own sources as tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    text = b"\n".join(path.read_bytes() for path in sorted((ROOT / "tagc").rglob("*.py")))
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    tokens[:-8000].tofile(folder / "train.bin")
    tokens[-8000:].tofile(folder / "val.bin")
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def load(folder: Path) -> tuple[list[dict], dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


def test_a_sweep_leaves_one_complete_folder_per_job(text_folder, tmp_path):
    done = run(
        "-m",
        "compressor=fsdp,tagc2",
        "bandwidth=100gbps",
        "trainer.max_steps=12",
        "trainer.eval_every=6",
        "logging.fidelity_every=5",
        *TINY,
        f"data.path={text_folder}",
        f"hydra.sweep.dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    folders = {path.name.split("-")[0]: path for path in tmp_path.iterdir() if path.is_dir()}
    assert set(folders) == {"fsdp", "tagc2"}
    for name, folder in folders.items():
        for file in ("config.yaml", "manifest.json", "log.txt"):
            assert (folder / file).stat().st_size > 0
        rows, summary = load(folder)
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert [row["step"] for row in rows if row.get("val_loss")] == [6, 12]
        assert rows[-1]["train_loss"] < rows[0]["train_loss"]
        assert [row["step"] for row in rows if "fidelity_cosine" in row] == [1, 6, 11]
        parts = ("compute_ms", "exposed_comm_ms")
        assert all(abs(sum(row[part] for part in parts) - row["iteration_ms"]) < 0.01 for row in rows)
        dilation = rows[-1]["time_dilation"]
        assert [row["time_dilation"] for row in rows] == [None] * 4 + [dilation] * 8
        assert (summary["time_dilation"], summary["timed_steps"]) == (dilation, 6) and dilation > 1
        assert summary["status"] == "done"
        assert (summary["compressor"], summary["bandwidth"], summary["ranks"]) == (name, "100gbps", 2)
        assert name in done.stdout
        assert "100gbps" in done.stdout
    assert not (folders["fsdp"] / "layers.jsonl").exists()  # nothing is compressed
    assert find_missing(folders["tagc2"]) == []
    (_, dense), (rows, sparse) = load(folders["fsdp"]), load(folders["tagc2"])
    assert sparse["grad_wire_bytes_per_step"] < 0.7 * dense["grad_wire_bytes_per_step"]
    assert sparse["param_wire_bytes_per_step"] == dense["param_wire_bytes_per_step"]
    assert abs(sparse["achieved_sparsity"] - 0.8) < 0.05
    assert rows[0]["index_wire_bytes"] > 0


def test_any_number_of_ranks_trains_on_the_same_batches(text_folder, tmp_path):
    results = {}
    for ranks in (1, 3):
        done = run(
            "compressor=fsdp",
            f"cluster.ranks={ranks}",
            "trainer.max_steps=4",
            *(word for word in TINY if not word.startswith("compressor.")),
            f"data.path={text_folder}",
            f"hydra.run.dir={tmp_path}/{ranks}",
        )
        assert done.returncode == 0, done.stderr
        results[ranks] = load(tmp_path / str(ranks))
    reference = [row["train_loss"] for row in results[1][0]]
    for rows, summary in results.values():
        assert [row["train_loss"] for row in rows] == pytest.approx(reference, rel=1e-5)
        assert summary["val_loss"] == pytest.approx(results[1][1]["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model.context=9000"], ["model.context=9000", "val.bin", "data.val_sequences=64"]),
        (["data.vocab_size=50"], ["train.bin", "data.vocab_size"]),
        (["data.path=/nowhere"], ["data.path", "/nowhere"]),
        (["compressor.layers=nothing.*"], ["compressor.layers=nothing.*", "non_attention"]),
        (["trainer.learning_rate=1e30", "trainer.warmup_steps=0", "trainer.grad_clip=0"], ["NaN or Inf", "step "]),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_message(text_folder, tmp_path, arguments, parts):
    done = run(*TINY, f"data.path={text_folder}", *arguments, f"hydra.run.dir={tmp_path}/run", "cluster.max_restarts=0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    message = done.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in message
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
