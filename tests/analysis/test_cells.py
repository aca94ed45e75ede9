"""The table's numbers on rows whose answer is known."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from analysis.numbers.cells import find_crossovers, pair_blocks, select_timed, summarise_cell
from analysis.numbers.stats import paired_saving
from analysis.page.cell_tables import make_agreement_sheet, make_cell_sheet, make_memory_sheet, make_transport_sheet
from analysis.records.cells import Cell, load_cell
from tagc.errors import UserError

#: arm -> (ms per step beside a drift, gradient bytes)
ARMS = {
    "fsdp": (1000.0, 4_000_000),
    "bf16": (800.0, 2_000_000),
    "tagc2": (700.0, 1_000_000),
    "fsdp_gloo": (1250.0, None),
}
PARAM_BYTES = 6_000_000


def make_rows() -> pd.DataFrame:
    """Four blocks; the machine gets slower from block to block, and every turn begins with an outlier."""
    rows = [{"arm": arm, "phase": "warm-up", "block": 0, "turn_step": 1, "iteration_ms": 1e6} for arm in ARMS]
    for block in range(4):
        for arm, (ms, grad_bytes) in ARMS.items():
            times = [9e5, *(ms * (1 + block) * share for share in (0.9, 1.0, 1.3))]
            rows += [
                {"arm": arm, "phase": "blocks", "block": block, "turn_step": step, "iteration_ms": time}
                | {"grad_wire_bytes": grad_bytes, "param_wire_bytes": grad_bytes and PARAM_BYTES}
                | {"link_sent_bytes": 12_000_000 if arm == "fsdp_gloo" else 10_500_000}
                | {"dense_buckets": 1, "compressed_buckets": 3 if arm == "tagc2" else 0}
                | {"exchange_ms": (grad_bytes or 0) / 1e4 + 60, "gather_ms": 60.0}
                | {"compute_ms": 200.0, "exposed_comm_ms": ms - 200, "encode_ms": 1.0, "decode_ms": 2.0}
                for step, time in enumerate(times)
            ]
    return pd.DataFrame(rows)


def make_shared() -> dict:
    memory = {f"{part}_bytes": 10 for part in ("parameter", "gradient", "optimizer", "residual", "peak_rss")}
    return {
        "cell": {"key": "m-8mbps", "network": "namespaces", "model": "m", "ranks": 2, "param_dtype": "float32"}
        | {"reshard": True, "blocks": 4, "arms": list(ARMS)},
        "setting": "m",
        "link": {"rate_mbps": 80.0, "time_dilation": 4.0, "reference_gpu": "gpu", "nominal_mbps": 320.0}
        | {"measured": {"compute_s": 0.2}},
        "memory": dict.fromkeys(ARMS, memory),
        "expected_gradient_bytes": {"fsdp": 4_000_000, "bf16": 2_000_000, "tagc2": 500_000, "fsdp_gloo": None},
        "hardware": {"cpu_model": "cpu"},
        "versions": {"torch": "2"},
        "git_commit": "0123456789",
        "git_dirty": True,
    }


def test_warm_up_and_the_first_step_of_a_turn_do_not_count():
    assert select_timed(make_rows())["iteration_ms"].max() < 1e4
    assert pair_blocks(make_rows())["tagc2"].tolist() == [700.0, 1400.0, 2100.0, 2800.0]


def test_pairing_removes_a_drift_that_hits_all_arms():
    estimate = paired_saving(pair_blocks(make_rows()), "tagc2", "fsdp")
    assert estimate == pytest.approx((4, 0.3, 0.3, 0.3))
    absent = paired_saving(pair_blocks(make_rows()), "packed", "fsdp")
    assert absent.n == 0 and math.isnan(absent.middle) and not absent.is_known


def test_a_cell_in_numbers():
    table = summarise_cell(Cell(make_shared(), make_rows())).set_index("arm")
    tagc2, gloo = table.loc["tagc2"], table.loc["fsdp_gloo"]
    assert (tagc2["steps"], tagc2["sent_bytes"]) == (12, 7_000_000)
    assert tagc2["saved_bytes_frac"] == pytest.approx(0.3)
    assert tagc2["allowed_frac"] == pytest.approx(0.35)
    assert tagc2["saved_vs_bf16_frac"] == pytest.approx(0.125)
    # 3 MB less and their headers at 80 Mbit/s are 314 ms; the median of the four blocks' differences is 750 ms.
    assert tagc2["realised_frac"] == pytest.approx(2.5 * 1448 / 1514)
    assert tagc2["dense_frac"] == pytest.approx(0.25)
    assert tagc2["scaled_iteration_ms"] == pytest.approx(tagc2["iteration_ms"] / 4)
    # What torch sends is known from the interface alone, and is compared with the baseline's there.
    assert gloo["saved_bytes_frac"] == pytest.approx(1 - 12 / 10.5)
    assert math.isnan(gloo["realised_frac"]) and math.isnan(gloo["allowed_frac"])


def test_sheets_show_every_arm_and_the_transport_apart():
    cell = Cell(make_shared(), make_rows())
    sheet = make_cell_sheet(cell, summarise_cell(cell))
    assert [line[0] for line in sheet.lines] == list(ARMS)
    assert "with local changes" in sheet.note and "80 Mbit/s" in sheet.note
    assert "| 7.00 | 30.0% | +30.0% (+30.0% to +30.0%) |" in sheet.to_markdown()
    (transport,) = make_transport_sheet([cell]).lines
    assert transport[-1].startswith("+20.0%")
    table = summarise_cell(cell)
    paced = table.assign(network="paced", iteration_ms=table["iteration_ms"] * 1.05)
    assert {line[-1] for line in make_agreement_sheet(pd.concat([table, paced])).lines} == {"+5.0%"}
    assert make_agreement_sheet(table).lines == []
    assert len(make_memory_sheet([cell, cell]).lines) == len(ARMS)


@pytest.mark.parametrize(
    ("saved", "crossover", "bound"),
    [
        ([0.2, 0.1, -0.1], 10**2.5, "interpolated"),
        ([0.2, -0.1, 0.1], 10 ** (1 + 2 / 3), "interpolated"),  # the first loss counts
        ([0.2, 0.1, 0.05], 1000, "above"),
        ([-0.1, -0.2, -0.3], 10, "below"),
    ],
)
def test_crossovers_lie_where_the_saved_time_is_gone(saved, crossover, bound):
    lines = [
        {"network": "paced", "machine": "this", "setting": "m", "arm": arm, "rate_mbps": rate}
        | {"saved_vs_fsdp_frac": share, "bytes_counted_by": "interface" if arm == "ddp" else "exchange"}
        for rate, share in zip([10, 100, 1000], saved, strict=True)
        for arm in ("tagc2", "noop", "ddp")
    ]
    (found,) = find_crossovers(pd.DataFrame(lines), ("fsdp",)).to_dict("records")
    assert (found["arm"], found["bound"]) == ("tagc2", bound)
    assert found["crossover_mbps"] == pytest.approx(crossover)


def test_cells_of_two_machines_give_no_common_crossover():
    lines = [
        {"network": "paced", "machine": machine, "setting": "m", "arm": "tagc2", "rate_mbps": rate}
        | {"saved_vs_fsdp_frac": share, "bytes_counted_by": "exchange"}
        for machine, rate, share in [("one", 10, 0.2), ("other", 1000, -0.2)]
    ]
    assert find_crossovers(pd.DataFrame(lines), ("fsdp",)).empty


def test_gradient_communication_counts_codec_and_leaves_gathers_out():
    table = summarise_cell(Cell(make_shared(), make_rows())).set_index("arm")
    assert table["gradient_comm_ms"]["tagc2"] == pytest.approx(103)
    assert table["saved_gradient_comm_frac"]["tagc2"] == pytest.approx(1 - 103 / 403)


def test_a_damaged_cell_is_refused_by_name(tmp_path):
    path, rows, shared = tmp_path / "cell.json", make_rows(), make_shared()
    shared["cell"] |= {"block_steps": 4}
    path.write_text(json.dumps(shared))
    rows.to_csv(tmp_path / "cell.csv", index=False)
    assert load_cell(path).machine == "cpu, ? cores"
    for broken, message in (
        (rows.drop(columns="turn_step"), "lacks turn_step"),
        (rows[:-1], "not 16 rows of blocks for fsdp_gloo"),
        (None, "cannot be read"),
    ):
        (tmp_path / "cell.csv").unlink()
        if broken is not None:
            broken.to_csv(tmp_path / "cell.csv", index=False)
        with pytest.raises(UserError, match=message):
            load_cell(path)
        rows.to_csv(tmp_path / "cell.csv", index=False)
