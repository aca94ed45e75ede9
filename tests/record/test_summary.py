from __future__ import annotations

import json
from pathlib import Path

import pytest

from tagc.errors import UserError
from tagc.record import load_summary, summarise


def test_times_are_medians_after_the_warm_up(config, make_row) -> None:
    times = [9000.0, 9000.0, 10.0, 20.0, 30.0]
    rows = [make_row(i + 1, iteration_ms=t, encode_ms=t / 10, tokens=60) for i, t in enumerate(times)]
    summary = summarise(rows, config)
    assert (summary["steps"], summary["timed_steps"]) == (5, 3)
    assert summary["iteration_ms_median"] == 20
    assert summary["iteration_ms_p20"] == pytest.approx(14)
    assert summary["iteration_ms_p80"] == pytest.approx(26)
    assert summary["encode_ms_median"] == 2
    assert summary["tokens_per_s"] == pytest.approx(60 / 0.020)


def test_steps_before_the_link_was_capped_are_not_timed(config, make_row) -> None:
    config.trainer.timing_warmup_steps = 0
    rows = [make_row(i, iteration_ms=1.0, time_dilation=None, scaled_iteration_ms=None) for i in (1, 2)]
    rows += [make_row(i, iteration_ms=80.0, time_dilation=40.0, scaled_iteration_ms=2.0) for i in (3, 4)]
    summary = summarise(rows, config)
    assert (summary["timed_steps"], summary["time_dilation"]) == (2, 40.0)
    assert (summary["iteration_ms_median"], summary["scaled_iteration_ms_median"]) == (80, 2)
    assert summarise(rows[:2], config)["time_dilation"] is None


@pytest.mark.parametrize("mark", [{"fidelity_cosine": 0.9}, {"profiled": True}, {"resumed": True}])
def test_steps_that_ran_otherwise_are_not_timed(config, make_row, mark) -> None:
    rows = [make_row(i, iteration_ms=10.0) for i in range(1, 6)] + [make_row(6, iteration_ms=99.0) | mark]
    summary = summarise(rows, config)
    assert (summary["timed_steps"], summary["iteration_ms_p80"]) == (3, 10)


def test_bytes_and_shares_are_means_over_timed_rows_that_have_them(config, make_row) -> None:
    rows = [
        make_row(1, wire_bytes=999, peeled_frac=0.0),
        make_row(2, wire_bytes=999),
        make_row(3, wire_bytes=10, index_wire_bytes=2, peeled_frac=0.5),
        make_row(4, wire_bytes=20, peeled_frac=None),
        make_row(5, wire_bytes=60, index_wire_bytes=4, peeled_frac=1.0),
    ]
    summary = summarise(rows, config)
    assert summary["wire_bytes_per_step"] == 30
    assert summary["index_wire_bytes_per_step"] == 3
    assert summary["grad_wire_bytes_per_step"] == 1_200_000
    assert summary["peeled_frac"] == 0.75
    assert summary["return_wire_bytes_per_step"] is None


def test_losses(config, make_row) -> None:
    rows = [make_row(i, train_loss=float(i)) for i in range(1, 13)]
    rows[3]["val_loss"], rows[7]["val_loss"], rows[11]["val_loss"] = 7.0, 6.0, None
    summary = summarise(rows, config)
    assert summary["train_loss"] == 12
    assert summary["train_loss_last10"] == pytest.approx(7.5)  # mean of 3..12
    assert summary["val_loss"] == 6


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_a_diverged_loss_is_not_averaged_away(config, make_row, bad) -> None:
    rows = [make_row(i) for i in range(1, 6)]
    rows[-1]["train_loss"] = bad
    summary = summarise(rows, config)
    assert summary["train_loss"] is None
    assert summary["train_loss_last10"] is None


def test_missing_keys_are_none(config) -> None:
    settings = {"experiment", "compressor", "bandwidth", "rate_mbps", "time_dilation", "ranks", "model", "seed"}
    settings |= {"network", "steps", "timed_steps", "missing_rows", "reference_gpu"}
    summary = summarise([{"step": i} for i in range(1, 6)], config)
    measured = {key: value for key, value in summary.items() if key not in settings}
    assert len(measured) > 15
    assert set(measured.values()) == {None}
    assert summary["timed_steps"] == 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_shorter_than_the_warm_up_has_no_times(config, make_row, count) -> None:
    summary = summarise([make_row(i + 1) for i in range(count)], config)
    assert summary["timed_steps"] == 0
    assert summary["iteration_ms_median"] is None
    assert summary["tokens_per_s"] is None
    assert (summary["train_loss"] is None) == (count == 0)


def test_the_settings_come_from_the_configuration(config, make_row) -> None:
    config.compressor.name, config.bandwidth.name, config.model.name = "lhc", "10gbps", "gpt2"
    config.cluster.ranks, config.seed = 4, 3
    summary = summarise([make_row(1)], config)
    wanted = {"compressor": "lhc", "bandwidth": "10gbps", "model": "gpt2", "ranks": 4, "seed": 3}
    assert {key: summary[key] for key in wanted} == wanted
    config.bandwidth.name, config.bandwidth.rate_mbps = "unlimited", 2.5  # set without an option of the group
    assert summarise([], config)["bandwidth"] == "2.5mbps"
    assert "status" not in summary
    json.dumps(summary, allow_nan=False)


def test_load_summary_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary\.json cannot be read"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json is not JSON"):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    assert load_summary(tmp_path) == {"status": "done", "run_dir": str(tmp_path)}
