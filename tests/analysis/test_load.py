"""Run folders and kept rows become runs; damage is an error that says where."""

from __future__ import annotations

import json
import shutil

import pytest

from analysis.keep import keep_run
from analysis.records.load import load_folder, load_kept, load_recorded, thin_rows
from tagc.errors import UserError


@pytest.fixture
def folder(study, tmp_path):
    """One run that may be broken."""
    return shutil.copytree(study / "tagc2-0", tmp_path / "run")


def test_a_study_becomes_one_tidy_frame(study):
    recorded = load_recorded([study])
    frame = recorded.to_frame()
    assert len(recorded.runs) == 9 and all(run.is_done for run in recorded.runs)
    assert frame.groupby(["compressor", "seed"])["steps"].sum().eq(20).all()
    assert {"run", "model", "ranks", "step", "val_loss", "iteration_ms", "index_wire_bytes"} <= set(frame)


def test_a_torn_last_line_is_left_out_and_told(folder):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = load_folder(folder)
    assert run.steps == 19 and run.problems and not run.is_done


@pytest.mark.parametrize(
    ("line", "message"),
    [("{broken", r"metrics\.jsonl, line 3: not JSON"), ('{"step": 1}', r"metrics\.jsonl, line 3: step 1 after 2")],
)
def test_a_bad_line_in_the_middle_names_file_and_line(folder, line, message):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[2] = line
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        load_recorded([folder.parent])


def test_a_run_without_an_end_is_unfinished_and_one_without_a_manifest_refused(folder):
    (folder / "summary.json").unlink()
    assert load_folder(folder).summary == {"status": "unfinished"}
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.yaml", "max_steps: 20", "max_steps: many", "trainer.max_steps='many' is no whole number"),
        ("metrics.jsonl", '"train_loss": ', '"train_loss": "x", "was": ', "text in place of a number"),
    ],
)
def test_text_where_a_number_belongs_is_refused(folder, name, old, new, message):
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        load_folder(folder)


def test_a_run_that_never_stepped_is_named_and_a_configuration_without_its_keys_refused(folder):
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").unlink()
    assert load_recorded([folder.parent]).left_out == [("run", "it ended before its first step")]
    (folder / "metrics.jsonl").write_text(rows)
    (folder / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match=r"config\.yaml: lacks compressor\.name, cluster\.ranks"):
        load_folder(folder)


def test_an_unknown_layout_is_left_out_by_name(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema_version"] == 1
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 2}))
    recorded = load_recorded([folder.parent])
    assert not recorded.runs and recorded.left_out == [("run", "schema version 2; this version reads 1")]


def test_what_holds_nothing_is_refused(tmp_path):
    for path, message in ((tmp_path, "no recorded run"), (tmp_path / "absent", "is no folder")):
        with pytest.raises(UserError, match=message):
            load_recorded([path])


def test_a_kept_run_is_the_run_without_paths_and_always_the_same_bytes(study, tmp_path):
    run = load_folder(study / "tagc2-1")
    paths = [keep_run(run, tmp_path / name) for name in ("a", "b") if not (tmp_path / name).mkdir()]
    first, second = (path.read_bytes() + path.with_suffix(".csv").read_bytes() for path in paths)
    assert first == second and b"/somewhere" not in first
    kept = load_kept(paths[0])
    assert kept.is_done and kept.rows["val_loss"].tolist() == pytest.approx(run.rows["val_loss"].tolist(), nan_ok=True)
    assert [other.config for other in load_recorded([tmp_path / "a"]).runs] == [kept.config]
    paths[0].with_suffix(".csv").write_text("step\n3\n2\n")
    with pytest.raises(UserError, match="line 2: step 2 after 3"):
        load_kept(paths[0])


def test_thinning_ends_a_bin_at_every_validation_and_keeps_means():
    rows = [{"step": step, "train_loss": float(step), "iteration_ms": 1.0} for step in range(1, 301)]
    rows[9]["val_loss"] = 5.0
    rows[4]["iteration_ms"] = 900.0
    thin = thin_rows(rows, 300)
    assert thin["step"].tolist()[:3] == [6, 10, 12] and thin["steps"].sum() == 300
    assert thin["val_loss"].tolist()[:2] == pytest.approx([float("nan"), 5.0], nan_ok=True)
    assert thin["train_loss"][1] == pytest.approx(8.5) and thin["iteration_ms"][0] == 1.0
