"""The check for a GPU, proven without one: its parts on tiny sizes, and what the script does when a part fails."""

from __future__ import annotations

import csv
import subprocess
import sys
import time

import pytest
import torch

from experiments.gpu_check import __main__ as script
from experiments.gpu_check import contract, speed, steps, syncs
from experiments.gpu_check.rows import Part
from tagc.kernels import reference
from tests.kernels.triton_backend import backend
from tests.policy.sources import ROOT

CPU = torch.device("cpu")
ABSENT = ("omegaconf", "hydra", "antlr4", "wandb", "datasets", "numba")  # what a machine with torch may lack


@pytest.fixture
def part(tmp_path):
    return Part("tested", CPU, tmp_path, time.monotonic() + 60, commit="c0ffee")


def read_rows(part: Part) -> list[dict[str, str]]:
    with (part.out / "rows.csv").open() as file:
        return list(csv.DictReader(file))


def test_training_steps_of_every_arm_on_pretended_ranks(part, monkeypatch):
    monkeypatch.setattr(steps, "load_kernels", lambda: reference)
    assert steps.measure(part)
    rows = {(row["name"], row["setting"], row["metric"]): row for row in read_rows(part)}
    for arm in steps.ARMS:
        for rate in ("unlimited", 100):
            assert float(rows[arm, f"gbps={rate}", "iteration"]["value"]) > 0
    sent = {arm: int(rows[arm, "gbps=100", "grad_wire"]["value"]) for arm in steps.ARMS}
    assert 0 == sent["noop"] < sent["packed"] < sent["tagc2"] < sent["bf16"] < sent["fsdp"]
    assert float(rows["noop", "gbps=unlimited", "exposed"]["value"]) == 0
    assert {row["commit"] for row in rows.values()} == {"c0ffee"}


def test_the_full_size_is_the_paper_s_model():
    config = steps.make_config("tagc2", tiny=False)
    assert (config.model.name, config.model.layers, config.model.context) == ("gpt2", 12, 512)
    assert not config.model.tie_weights
    assert config.compressor.name == "tagc2"


def test_every_arm_of_the_bench_has_its_floor(part, monkeypatch):
    monkeypatch.setattr(speed, "load_kernels", lambda: reference)
    assert speed.measure(part)
    floors = {row["name"]: row for row in read_rows(part) if row["metric"] == "times_floor"}
    assert set(floors) == {"copy"} | {
        f"{op}{way}code" for op in ("", "packed_", "int8_", "int4_", "delta4_") for way in ("en", "de")
    }
    # 3,000 values: gradient, old and new residual in fp32; per shard 1,500 codes and six scales.
    assert f"floor_bytes={3 * 12_000 + 2 * (1500 + 6 * 4)}" in floors["int8_encode"]["setting"]


@pytest.mark.parametrize("name", ["fsdp", "packed", "int8"])
def test_a_compressor_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(syncs, "load_kernels", lambda: backend)
    syncs.check_compressor(name, 500, CPU, warm_up=1, steps=1)


def test_a_wait_is_found(monkeypatch):
    """The reference backend's peeling asks for a value at every round."""
    monkeypatch.setattr(syncs, "load_kernels", lambda: reference)
    with pytest.raises(RuntimeError, match="would wait"):
        syncs.check_compressor("tagc", 500, CPU, warm_up=1, steps=1)


def test_the_kernels_own_tests_are_run_and_counted(part, monkeypatch):
    monkeypatch.setattr(contract, "TINY", "damaged")
    assert contract.measure(part)
    counts = {row["metric"]: row["value"] for row in read_rows(part)}
    assert (counts["passed"], counts["failed"], counts["skipped"]) == ("1", "0", "0")


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "BUDGETS_S", {"absent": 30, "contract": 0.2})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(script, "GRACE_S", 0)
    assert script.main() == 1
    printed = capsys.readouterr().out
    assert "absent    failed with status 1" in printed
    assert "contract  stopped after its 0.2 s" in printed


def test_the_parts_load_without_the_packages_of_the_command_line():
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n" + "".join(
        f"import experiments.gpu_check.{part}\n" for part in script.BUDGETS_S
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_parts_end_in_time():
    assert sum(script.BUDGETS_S.values()) < 360
