"""The harness on a tiny model: real ranks, arms that take turns, rows on disk."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console

from analysis.records.cells import load_cells
from experiments.iteration_time.__main__ import find_open_cells, measure_plan
from experiments.iteration_time.arms import build_trainer, count_state_bytes
from experiments.iteration_time.closed_form import sent_bytes
from experiments.iteration_time.link import Calibration, resolve_rate
from experiments.iteration_time.plan import (
    LinkSpec,
    compose_config,
    describe_cell,
    load_plan,
    parse_link,
    select_cells,
    shorten,
)
from experiments.iteration_time.table import report
from tagc.config import Config
from tagc.data import prepare
from tagc.errors import UserError
from tagc.kernels import resolve_backend
from tagc.network.link import WIRE_BYTES_PER_BYTE
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed

ARMS = ["fsdp", "tagc", "packed"]
TINY = "model.layers=1 model.width=48 model.heads=3 model.context=16 compressor.min_numel=512 trainer.global_batch=4"


def make_plan(folder: Path, arms: list[str]) -> Path:
    """A plan of one cell on random tokens."""
    tokens = np.random.default_rng(0).integers(200, size=4000).astype(np.uint16)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    overrides = [*TINY.split(), "data=bin", f"data.path={folder}", "data.vocab_size=200", "kernels=reference"]
    settings = {"ranks": 2, "param_dtype": "float32", "reshard": True, "blocks": 2, "block_steps": 2}
    plan = {
        "defaults": {**settings, "warmup_steps": 2, "uncapped_steps": 1, "arms": arms},
        "models": {"tiny": {"overrides": overrides}},
        "groups": [{"model": "tiny", "links": ["1x"]}],
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def train_alone(rank: int, cell, arm: str) -> list[float]:
    """The arm's losses in a process group of its own, step by step as a run of run.py makes them."""
    config = compose_config(cell, arm)
    trainer = build_trainer(arm, config, prepare(config.data), torch.device("cpu"), resolve_backend(config.kernels)[1])
    return [trainer.train_step(step)["train_loss"] for step in range(config.trainer.max_steps)]


def test_arms_take_turns_do_not_influence_each_other_and_are_recorded(tmp_path):
    (cell,) = load_plan("paced", make_plan(tmp_path, ARMS))
    rows_dir, console = tmp_path / "rows", Console(file=io.StringIO())
    assert find_open_cells([cell], rows_dir) == [cell]
    assert measure_plan([cell], rows_dir, tmp_path / "work", console) == 0, console.file.getvalue()
    assert find_open_cells([cell], rows_dir) == []
    assert find_open_cells([replace(cell, blocks=3)], rows_dir) != []  # other settings are another measurement

    ((shared, rows),) = load_cells(rows_dir, ["paced"])
    assert shared["settings"] == describe_cell(cell) and shared["git_commit"]
    turns = rows[rows["phase"] == "blocks"].groupby(["block", "arm"]).size()
    assert turns.to_dict() == {(block, arm): 2 for block in (0, 1) for arm in ARMS}
    orders = [tuple(part["arm"].unique()) for _, part in rows[rows["phase"] == "blocks"].groupby("block")]
    assert orders[0] != orders[1]
    for arm in ARMS:
        mine = rows[rows["arm"] == arm]
        assert mine["step"].tolist() == list(range(1, cell.steps + 1))
        counted = (mine["grad_wire_bytes"] + mine["param_wire_bytes"]).iloc[-1]
        assert counted == sent_bytes(cell, arm)
    measured, rate_mbps = shared["link"]["measured"], shared["link"]["rate_mbps"]
    wire_s = measured["baseline_bytes"] * WIRE_BYTES_PER_BYTE / (rate_mbps / 8 * 1e6)
    assert wire_s == pytest.approx(measured["compute_s"])

    run_rows = pd.read_json(tmp_path / "work" / "paced" / cell.key / "metrics.jsonl", lines=True, precise_float=True)
    alone = run_ranks(train_alone, 2, cell, "tagc")[0]
    assert run_rows[run_rows["arm"] == "tagc"]["train_loss"].tolist() == alone

    report(rows_dir, tmp_path / "out", console)
    assert pd.read_csv(tmp_path / "out" / "table.csv")["arm"].tolist() == ARMS
    (rows_dir / "paced" / f"{cell.key}.json").unlink()  # as a cell that was interrupted
    assert find_open_cells([cell], rows_dir) == [cell]


def step_all(rank: int, cell, arms: list[str]) -> dict:
    """Losses and state bytes of several arms in one process."""
    results = {}
    for arm in arms:
        config = compose_config(cell, arm)
        kernels = resolve_backend(config.kernels)[1]
        trainer = build_trainer(arm, config, prepare(config.data), torch.device("cpu"), kernels)
        rows = [trainer.train_step(step) for step in range(4)]
        results[arm] = [row["train_loss"] for row in rows], count_state_bytes(trainer), rows[-1]
    return results


def test_recipes_send_the_bytes_of_the_closed_form(tmp_path):
    arms = ["fsdp", "int4_delta4", "zeropp", "zeropp_hpz", "sdp4bit"]
    (cell,) = load_plan("namespaces", make_plan(tmp_path, arms))
    cell = replace(cell, network="paced")
    results = run_ranks(step_all, 2, cell, arms)[0]
    sent = {arm: sent_bytes(cell, arm) for arm in arms}
    for arm in arms:
        losses, state, row = results[arm]
        assert row["grad_wire_bytes"] + row["param_wire_bytes"] == sent[arm], arm
        assert losses == pytest.approx(results["fsdp"][0], rel=0.02), arm
        assert (state["replica_bytes"] > 0) == (arm in ("int4_delta4", "sdp4bit")), arm
    assert max(sent["sdp4bit"], sent["int4_delta4"]) < sent["zeropp_hpz"] < sent["zeropp"] < sent["fsdp"] / 2
    assert results["int4_delta4"][1]["residual_bytes"] > 0
    assert compose_config(cell, "zeropp_hpz").trainer.reshard_after_forward is False


def test_torchs_own_methods_train_the_same_model_on_the_same_batches(tmp_path):
    arms = ["fsdp", "fsdp_gloo", "ddp", "powersgd1"]
    (cell,) = load_plan("namespaces", make_plan(tmp_path, arms))
    assert cell.arms == tuple(arms)
    results = run_ranks(step_all, 2, replace(cell, network="paced"), arms)[0]
    losses = {arm: result[0] for arm, result in results.items()}
    assert losses["fsdp_gloo"] == losses["fsdp"]
    assert losses["ddp"] == pytest.approx(losses["fsdp"], rel=1e-5)
    assert losses["powersgd1"][:3] == pytest.approx(losses["fsdp"][:3], rel=1e-5)  # torch wants two dense steps
    assert losses["powersgd1"][3] != pytest.approx(losses["fsdp"][3], rel=1e-6)
    state = {arm: result[1] for arm, result in results.items()}
    assert state["ddp"]["parameter_bytes"] == pytest.approx(2 * state["fsdp"]["parameter_bytes"], rel=0.01)
    assert state["ddp"]["optimizer_bytes"] == pytest.approx(2 * state["ddp"]["parameter_bytes"], rel=0.01)
    assert state["ddp"]["residual_bytes"] == 0 < state["powersgd1"]["residual_bytes"]
    assert not {"wire_bytes", "exposed_comm_ms"} & set(results["ddp"][2])  # nobody measured them


def test_links_are_read_and_resolved():
    assert parse_link("5x") == LinkSpec(comm_over_compute=5)
    assert parse_link("2.5gbps@a100") == LinkSpec(2500, gpu="a100")
    assert parse_link("uncapped") == LinkSpec()
    with pytest.raises(UserError, match="5 gbit"):
        parse_link("5 gbit")
    measured = Calibration(compute_s=0.5, baseline_bytes=10_000_000, flops_per_step=1e12)
    config = Config()
    assert resolve_rate(parse_link("4x"), measured, config).bytes_per_s == pytest.approx(5e6 * 1514 / 1448)
    assert resolve_rate(parse_link("uncapped"), measured, config).bytes_per_s is None
    dilated = resolve_rate(parse_link("8gbps@rtx3080"), measured, config)
    assert dilated.time_dilation > 1
    assert dilated.bytes_per_s == pytest.approx(1e9 / dilated.time_dilation)


def test_the_plan_is_whole(tmp_path):
    paced, capped = load_plan("paced"), load_plan("namespaces")
    assert [cell.key for cell in paced] == [cell.key for cell in capped]
    assert not {"ddp", "fsdp_gloo"} & {arm for cell in paced for arm in cell.arms}
    assert {"ddp", "powersgd1", "powersgd4", "fsdp_gloo"} <= {arm for cell in capped for arm in cell.arms}
    assert all("fsdp" in cell.arms for cell in paced)
    timed = {cell.blocks * (cell.block_steps - 1) for cell in paced if cell.model != "paper"}
    assert min(timed) >= 30
    for name in ("nano-r2-fp32-reshard-5x", "paper-*-10gbps*"):
        for cell in select_cells(paced, [name]):
            assert compose_config(shorten(cell), "tagc2").trainer.max_steps == 10
    for arms, message in ((["tagc"], "lack fsdp"), (["fsdp", "zip"], "zip is unknown")):
        with pytest.raises(UserError, match=message):
            load_plan("paced", make_plan(tmp_path, arms))
    with pytest.raises(UserError, match="there are"):
        select_cells(paced, ["nothing*"])
