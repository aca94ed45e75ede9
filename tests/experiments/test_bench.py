"""The benchmark's rows, on sizes of a moment."""

from __future__ import annotations

import json
import sys

import pandas as pd

from experiments.kernels import bench


def test_every_operation_is_compared_with_a_copy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "SIZES", (3_001, 4_000))  # an odd one: a bucket holds whole shards
    monkeypatch.setattr(bench, "FULL_SIZE", 4_000)
    monkeypatch.setattr(bench, "DENSITIES", (0.2,))
    monkeypatch.setattr(bench, "RATIOS", (2.0,))
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "rows.csv")])
    bench.main()
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = pd.read_csv(tmp_path / "rows.csv")
    quantisers = {"int8_encode", "delta4_encode", "delta4_decode"}
    assert set(ratios) == {"encode", "decode", "packed_encode", "packed_decode", *quantisers}
    assert set(rows["numel"]) == {1_500, 3_000, 2_000, 4_000}
    assert (rows["copy_ratio"] > 0).all()
    encode = rows[(rows["op"] == "int8_encode") & (rows["numel"] == 4_000)]
    assert ratios["int8_encode"] == encode["copy_ratio"].max()
