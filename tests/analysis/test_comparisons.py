"""What is compared with what: never other data, never another model; and what a reader is told."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest

from analysis.keep import keep_run
from analysis.numbers.losses import compare_losses
from analysis.numbers.run_times import (
    SERIES,
    compare_at_equal_time,
    compare_pair,
    compare_run_times,
    fits_cell,
    time_to_loss,
)
from analysis.numbers.schedules import compare_whole_schedules, steps_to_loss
from analysis.numbers.stats import UNKNOWN, Estimate
from analysis.page.claims import Evidence, judge, load_targets
from analysis.page.loss_tables import make_equal_loss_sheet
from analysis.page.run_tables import make_setting_sheet
from analysis.records.identity import find_notices, loss_setting
from analysis.records.load import load_folder, load_kept, load_recorded
from tests.analysis.conftest import loss_at


def notice_texts(folder) -> str:
    return "\n".join(f"{notice.where}: {notice.text}" for notice in find_notices(load_recorded([folder])))


def test_degradation_is_paired_by_seed(study):
    table = compare_losses(load_recorded([study]).runs).set_index("arm")
    assert table.index.tolist() == ["fsdp", "bf16", "tagc2"]
    assert table["degradation_frac"].tolist() == pytest.approx([0, 0, 0.005])
    assert table["degradation_frac_high"]["tagc2"] == pytest.approx(0.005)  # seeds differ, their ratios do not
    assert table["pairs"].tolist() == [3, 3, 3] and table["val_loss_sd"]["fsdp"] == pytest.approx(0.01)
    assert "one seed" not in notice_texts(study)


def test_equal_time_gives_the_faster_arm_its_advantage(study):
    runs = load_recorded([study]).runs
    table = compare_at_equal_time(runs, []).set_index(["arm", "baseline"])
    tagc2 = table.loc["tagc2", "fsdp"]
    # 20 steps of 800 ms are 16 of the baseline's 1,000: its loss lies between those of steps 15 and 20.
    base = np.interp(16, [15, 20], [loss_at(15, 0, 1), loss_at(20, 0, 1)])
    assert tagc2["degradation_frac"] == pytest.approx(loss_at(20, 0, 1.005) / base - 1, abs=1e-4)
    assert tagc2["saved_time_frac"] > 0 and tagc2["pairs"] == 3
    times = compare_run_times(runs).set_index("arm")
    assert times["saved_vs_fsdp_frac"]["tagc2"] == pytest.approx(0.2, abs=1e-3)
    same = compare_pair(runs[0], runs[0], 5.0, 5.0)
    assert same == {"degradation_frac": 0, "saved_time_frac": 0}
    assert math.isnan(time_to_loss(np.array([1.0]), np.array([2.0]), 1.0, 1.0))


def test_a_seed_that_diverged_is_not_averaged_away(study, tmp_path):
    shutil.copytree(study, tmp_path / "study")
    path = tmp_path / "study" / "tagc2-1" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | ({"val_loss": None} if row["step"] == 20 else {})) + "\n" for row in rows))
    table = compare_losses(load_recorded([tmp_path]).runs).set_index("arm")
    assert math.isnan(table["degradation_frac"]["tagc2"]) and math.isnan(table["val_loss"]["tagc2"])
    assert table["degradation_frac"]["bf16"] == 0
    timed = compare_at_equal_time(load_recorded([tmp_path]).runs, []).set_index(["arm", "baseline"])["saved_time_frac"]
    assert math.isnan(timed["tagc2", "fsdp"]) and timed["bf16", "fsdp"] > 0
    assert "last loss is no number: it diverged or was never validated: tagc2" in notice_texts(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"manifest": {"data": {"fingerprint": "e" * 64}}},
        {"model__layers": 5},
        {"trainer__learning_rate": 1e-4},
        {"cluster__ranks": 4},
    ],
)
def test_other_data_model_training_or_ranks_are_never_averaged(write_run, tmp_path, other):
    write_run(tmp_path / "a", "fsdp", 0)
    write_run(tmp_path / "b", "fsdp", 1, **other)
    write_run(tmp_path / "c", "tagc2", 1)
    table = compare_losses(load_recorded([tmp_path]).runs)
    assert table["seeds"].tolist() == [1, 1, 1] and table["setting"].nunique() == 2
    assert table[table["arm"] == "tagc2"]["pairs"].tolist() == [0]  # its seed's baseline is of the other setting
    assert all("=" in line[-1] for line in make_setting_sheet(load_recorded([tmp_path]).runs).lines)
    told = notice_texts(tmp_path)
    assert "2 settings of model, data or training" in told and "no seed in common with fsdp: tagc2" in told


def test_another_machine_or_link_is_another_time_but_the_same_loss(write_run, tmp_path):
    write_run(tmp_path / "a", "fsdp")
    write_run(tmp_path / "b", "tagc2", manifest={"hardware": {"cpu_model": "other", "cpu_cores_usable": 64}})
    write_run(tmp_path / "c", "bf16", bandwidth__rate_mbps=10.0)
    runs = load_recorded([tmp_path]).runs
    assert compare_run_times(runs)["pairs_fsdp"].tolist() == [1, 0, 0]
    assert compare_losses(runs)["pairs"].tolist() == [1, 1, 1]
    assert "recorded on 2 machines" in notice_texts(tmp_path)


def test_a_reader_is_told(write_run, tmp_path):
    write_run(tmp_path / "a", "tagc2", manifest={"git_dirty": True})
    write_run(tmp_path / "b", "bf16", steps=7, manifest={"git_commit": "f" * 16})
    write_run(tmp_path / "c", "tagc2", manifest={"started_at": "2026-12-02"})
    told = notice_texts(tmp_path)
    for expected in (
        "run a: recorded with local changes",
        "b: interrupted after 7 of 20 steps: in no comparison",
        "no run of fsdp",
        "one seed only, so no interval: tagc2",
        "1 repetitions of an arm and seed",
        "2 commits: 0123456, fffffff",
    ):
        assert expected in told
    assert compare_losses(load_recorded([tmp_path]).runs)["seeds"].tolist() == [1]


def test_measured_dilations_that_differ_are_told(write_run, tmp_path):
    for name, dilation in (("a", 170.0), ("b", 180.0)):
        folder = write_run(tmp_path / name, "fsdp", seed=ord(name), network__time_dilation="auto")
        summary = folder / "summary.json"
        summary.write_text(summary.read_text().replace('"time_dilation": 1.0', f'"time_dilation": {dilation}'))
    assert "time dilation from 170 to 180" in notice_texts(tmp_path)


def test_an_arm_is_named_by_what_differs_from_its_option(write_run, tmp_path):
    names = []
    for i, keys in enumerate([{}, {"compressor__sparsity": 0.9, "compressor__layers": "all"}]):
        names.append(load_folder(write_run(tmp_path / str(i), "tagc2", **keys)).arm)
    assert names == ["tagc2", "tagc2 layers=all sparsity=0.9"]
    assert load_folder(write_run(tmp_path / "f", "fsdp", compressor__sparsity=0.9)).arm == "fsdp"


def test_a_cell_gives_its_times_to_runs_of_its_own_step_only(write_run, tmp_path):
    cells = load_recorded(["experiments/iteration_time/rows"]).cells
    cell = next(c for c in cells if c.shared["cell"]["ranks"] == 2 and "tagc2" in c.shared["cell"]["arms"])
    settings = cell.shared["settings"]
    keys = {"trainer__param_dtype": settings["fsdp.trainer.param_dtype"], "bandwidth__rate_mbps": None}
    run = load_folder(write_run(tmp_path / "a", "fsdp", **keys))
    other = load_folder(write_run(tmp_path / "b", "fsdp", **keys, trainer__global_batch=48))
    assert fits_cell(run, cell) and not fits_cell(other, cell)
    assert loss_setting(run) != loss_setting(other)
    write_run(tmp_path / "c", "tagc2", **keys)
    runs = [
        r
        for r in load_recorded([tmp_path]).runs
        if r.config["trainer.global_batch"] == run.config["trainer.global_batch"]
    ]
    table = compare_at_equal_time(runs, [cell])
    assert table["times"].str.startswith("cells nano").all() and table["arm"].tolist() == ["tagc2"]


TARGET = {"kind": "at_least", "target_frac": 0.1, "link": "10gbps", "if_not_measured": None}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([], "not measured"),
        ([(math.nan, math.nan, math.nan, True)], "not measured"),
        ([(0.12, 0.09, 0.15, True)], "reproduced"),
        ([(0.05, 0.02, 0.08, True)], "partly"),
        ([(0.05, -0.02, 0.12, True)], "not"),
        ([(0.05, -0.02, 0.12, True), (0.2, 0.1, 0.3, False)], "not"),
        ([(0.2, 0.1, 0.3, False)], "partly"),
        ([(-0.2, -0.3, -0.1, False)], "not measured"),
        ([(0.2, math.nan, math.nan, True)], "partly"),  # one value proves nothing
    ],
)
def test_verdicts_follow_the_rule(values, verdict):
    evidence = [Evidence("cell", Estimate(8, *numbers), here) for *numbers, here in values]
    assert judge(TARGET, evidence)[0] == verdict
    opposite = TARGET | {"kind": "at_most", "link": None}
    assert judge(opposite, [Evidence("runs", Estimate(3, 0.2, 0.15, 0.25), True)])[0] == "not"
    assert judge(opposite, [Evidence("runs", Estimate(3, 0.05, 0.02, 0.08), True)])[0] == "reproduced"


def test_a_loss_must_stay_below_in_every_setting_of_enough_seeds():
    target = TARGET | {"kind": "at_most", "link": None}
    low, high, single = (
        Estimate(3, 0.05, 0.02, 0.08),
        Estimate(3, 0.15, 0.12, 0.2),
        Estimate(1, 0.5, math.nan, math.nan),
    )
    for estimates, verdict in (([low, single], "reproduced"), ([low, high], "partly"), ([high, high], "not")):
        found = judge(target, [Evidence("runs", estimate, True) for estimate in estimates])
        assert found[0] == verdict
    assert "+15.0%" in judge(target, [Evidence("a", low, True), Evidence("b", high, True)])[1]
    verdict, why = judge(target, [Evidence("a", low, True), Evidence("b", UNKNOWN._replace(n=3), True)])
    assert verdict == "partly" and "no number in 1 more" in why


def test_the_link_below_which_equal_loss_comes_sooner():
    place = dict.fromkeys(SERIES, "same") | {"arm": "tagc2", "baseline": "fsdp", "pairs": 3}
    shares = ((10, 0.1), (1000, -0.1), (100, 0.05))
    lines = [
        place | {"rate_mbps": rate} | {f"saved_time_frac{end}": saved for end in ("", "_low", "_high")}
        for rate, saved in shares
    ]
    sheet = make_equal_loss_sheet(pd.DataFrame(lines))
    assert [[cell.split(" ")[0] for cell in line[-4:]] for line in sheet.lines] == [
        ["+10.0%", "+5.0%", "-10.0%", "215"]
    ]
    assert sheet.numbers["crossover_mbps"].tolist() == pytest.approx([100 * 10 ** (1 / 3)] * 3)
    one = make_equal_loss_sheet(pd.DataFrame(lines[:1]))
    assert one.lines[0][-1] == "-"  # no crossover of one link


def test_whole_runs_of_several_lengths_tell_the_time_to_equal_loss(study, write_run, tmp_path):
    for seed in range(3):
        write_run(tmp_path / str(seed), "tagc2", seed, steps=40, trainer__max_steps=40)
    runs = load_recorded([study, tmp_path]).runs
    table = compare_whole_schedules(runs, [])
    assert table[["arm", "baseline", "pairs"]].values.tolist() == [["tagc2", "fsdp", 3], ["tagc2", "bf16", 3]]
    # Seed 0: 1.005 x 4.2 after 20 steps, 1.005 x 4.1 after 40; the dense runs end at 4.2.
    steps = 20 * 2 ** ((1.005 * 4.2 - 4.2) / (1.005 * 0.1))
    expected = [1 - steps * 800 / (20 * ms) for ms in (1000, 900)]
    assert table["saved_time_frac"].tolist() == pytest.approx(expected, abs=2e-3)
    assert not len(compare_whole_schedules([run for run in runs if run.steps == 20], []))
    # One seed of another length changes nothing: a mean is of lengths that all seeds have.
    more = load_recorded([write_run(tmp_path / "more", "tagc2", 0, steps=80, trainer__max_steps=80)]).runs
    assert compare_whole_schedules([*runs, *more], []).equals(table)
    assert math.isnan(steps_to_loss({20: 4.2, 40: 4.1}, 4.0)), "a loss that no length came near"


def test_every_claim_is_whole():
    targets = load_targets()
    assert {target["paper"] for target in targets} >= {"TAGC", "TAGC-2", "LHC"}
    assert all(target["kind"] in ("at_least", "at_most") and target["target_frac"] > 0 for target in targets)


def test_a_changed_default_renames_no_recorded_run(tmp_path, monkeypatch, write_run):
    folder = write_run(tmp_path / "run", "tagc2", compressor__sparsity=0.9)
    kept = keep_run(load_folder(folder), tmp_path)
    assert [load_folder(folder).arm, load_kept(kept).arm] == ["tagc2 sparsity=0.9"] * 2
    monkeypatch.setattr("tagc.record.arm._option_defaults", lambda name: {"sparsity": 0.9, "name": name})
    assert [load_folder(folder).arm, load_kept(kept).arm] == ["tagc2 sparsity=0.9"] * 2
