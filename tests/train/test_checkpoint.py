"""A run that continues a checkpoint is the run that was never interrupted."""

from __future__ import annotations

import logging
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tagc.comm.gradient_sync import GradientSync
from tagc.data import DataInfo
from tagc.errors import UserError
from tagc.train.checkpoint import Checkpoints
from tagc.train.checkpoint_files import checkpoints_dir, list_checkpoints, step_dir
from tests.distributed import run_ranks
from tests.train.harness import CASES, build_trainer, fingerprint, make_config, train_until, write_tokens

pytestmark = pytest.mark.distributed


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: value for k, value in row.items() if not k.endswith("_ms") and k != "resumed"} for row in rows]


def continue_every_case(rank: int, data: DataInfo, folder: str) -> list[str]:
    """5 steps, with a checkpoint after 3 that is written meanwhile, against 2 by a fresh trainer; what differs."""
    differences = []
    for case in CASES:
        config = make_config(case)
        whole = build_trainer(config, data)
        with Checkpoints(Path(folder, case), config) as checkpoints:
            train_until(whole, 3, checkpoints)
            expected = train_until(whole, 5)
            checkpoints.wait()
            fresh = build_trainer(config, data)
            assert checkpoints.restore_newest(fresh) == 3
            rows = train_until(fresh, 5)
            assert all(row["resumed"] for row in rows)
        if without_times(rows) != without_times(expected):
            differences.append(f"{case}: rows")
        left, right = fingerprint(fresh), fingerprint(whole)
        assert left.keys() == right.keys()
        differences += [f"{case}: {name}" for name in left if not torch.equal(left[name], right[name])]
    return differences


def test_every_compressor_continues_bitwise(tmp_path: Path) -> None:
    assert run_ranks(continue_every_case, 2, write_tokens(tmp_path), str(tmp_path)) == [[], []]


def owed_to_the_update(sync: GradientSync, ranks: int, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Each parameter's mean residual over the ranks, without padding: what a reduction would still add."""
    owed = {}
    for name, residual in sync.residuals().items():
        flat = residual.flatten().contiguous()
        dist.all_reduce(flat)
        owed[name] = flat[: shapes[name].numel()] / ranks
    return owed


def continue_with_other_ranks(
    rank: int, data: DataInfo, folder: str, ranks: int, until: int, names: list[str]
) -> dict[str, Any]:
    """Restore what is there and train on; what each compressor owed before and after, its losses and parameters."""
    results = {}
    for name in names:
        config = make_config(name, ranks, max_steps=12)
        config.model.dropout, config.compressor.sparsity = 0.0, 0.9  # other ranks drop others; a sketch for 4 ranks
        trainer = build_trainer(config, data)
        shapes = {key: parameter.shape for key, parameter in trainer.model.named_parameters()}
        with Checkpoints(Path(folder, name), config) as checkpoints:
            checkpoints.restore_newest(trainer)
            start = owed_to_the_update(trainer.sync, ranks, shapes)
            parameters = {key: p.full_tensor().detach() for key, p in trainer.model.named_parameters()}  # type: ignore
            losses = [row["train_loss"] for row in train_until(trainer, until, checkpoints)]
        end = owed_to_the_update(trainer.sync, ranks, shapes)
        after = {key: p.full_tensor().detach() for key, p in trainer.model.named_parameters()}  # type: ignore
        results[name] = {"owed": (start, end), "parameters": (parameters, after), "losses": losses}
    if ranks == 2:
        dense = make_config("fsdp", max_steps=12)
        dense.model.dropout = 0.0
        results["straight"] = {"losses": [row["train_loss"] for row in train_until(build_trainer(dense, data), 7)]}
    return results


def test_the_ranks_may_change_and_what_is_owed_stays(tmp_path: Path) -> None:
    """2 ranks, then 4, then 3."""
    data, names = write_tokens(tmp_path), ["fsdp", "tagc", "packed"]
    parts = [
        run_ranks(continue_with_other_ranks, ranks, data, str(tmp_path), ranks, until, names)[0]
        for ranks, until in ((2, 3), (4, 5), (3, 7))
    ]
    for name in names:
        for before, after in pairwise(part[name] for part in parts):
            tolerance = 1e-2 if name == "packed" else 1e-5  # its residual is kept in bf16
            for key, end in before["owed"][1].items():
                assert end.abs().sum() > 0
                torch.testing.assert_close(after["owed"][0][key], end, rtol=tolerance, atol=1e-7)
            for key, end in before["parameters"][1].items():
                assert torch.equal(after["parameters"][0][key], end)
    losses = [loss for part in parts for loss in part["fsdp"]["losses"]]
    assert losses == pytest.approx(parts[0]["straight"]["losses"], rel=1e-5)  # so the batches were the same


def meet_bad_folders(rank: int, data: DataInfo, folder: str) -> dict[str, Any]:
    """A place that cannot be written, a damaged newest checkpoint, another model's, and nothing but damage."""
    config, found = make_config("tagc", checkpoint_every=1, keep_checkpoints=2), {}
    run_dir = Path(folder)
    checkpoints_dir(run_dir).touch()  # a file in the way: every rank fails to write
    trainer = build_trainer(config, data)
    with Checkpoints(run_dir, config) as checkpoints:
        train_until(trainer, 2, checkpoints)
        found["saved"] = checkpoints.wait()
        if rank == 0:
            checkpoints_dir(run_dir).unlink()
        dist.barrier()
        train_until(trainer, 6, checkpoints)
        assert checkpoints.wait()
        dist.barrier()  # rank 0 deletes old ones
        found["kept"] = [path.name for path in list_checkpoints(run_dir)]
        newest = step_dir(run_dir, 6)
        if rank == 0:
            data_file = newest / "__1_0.distcp"
            data_file.write_bytes(data_file.read_bytes()[:-1])
        dist.barrier()
        found["restored"] = checkpoints.restore_newest(build_trainer(config, data))
        other = build_trainer(make_config("tied"), data)
        with pytest.raises(UserError) as refused:
            checkpoints.restore_newest(other)
        found["refused"] = str(refused.value)
        dist.barrier()
        if rank == 0:
            (step_dir(run_dir, 5) / "checkpoint.json").write_text('{"step": 5')
        dist.barrier()
        with pytest.raises(UserError) as hopeless:
            checkpoints.restore_newest(build_trainer(config, data))
        found["hopeless"] = str(hopeless.value)
    found["left"] = sorted(path.name for path in checkpoints_dir(run_dir).iterdir())
    return found


def test_bad_folders(tmp_path: Path) -> None:
    for found in run_ranks(meet_bad_folders, 2, write_tokens(tmp_path), str(tmp_path)):
        assert found["saved"] is False
        assert found["kept"] == ["step_00000006", "step_00000005"]
        assert found["restored"] == 5
        assert "another model: lm_head.weight is [211, 48] there and None here; set trainer.resume" in found["refused"]
        assert "no checkpoint of" in found["hopeless"] and "checkpoint.json is damaged" in found["hopeless"]
        assert found["left"] == ["damaged_step_00000005", "damaged_step_00000006"]


def save_on_a_small_disk(rank: int, data: DataInfo, folder: str) -> list[str]:
    """What rank 0 logs of a checkpoint that does not fit, and whether training went on."""
    config = make_config("fsdp")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tagc").addHandler(handler)
    trainer = build_trainer(config, data)
    with Checkpoints(Path(folder), config) as checkpoints:
        train_until(trainer, 1, checkpoints)
        assert not checkpoints.wait()
        train_until(trainer, 2)
    assert trainer.step == 2 and not list_checkpoints(Path(folder))
    return [line for line in lines if "no checkpoint was saved" in line]


def test_a_full_disk_is_named_with_the_bytes_needed_and_free(tmp_path: Path) -> None:
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        (line,), _ = run_ranks(save_on_a_small_disk, 2, write_tokens(tmp_path), str(tmp_path / "run"))
    finally:
        subprocess.run(["umount", disk], check=True)
    found = re.search(
        r"the disk is full: ([0-9,]+) bytes are needed and ([0-9,]+) are free on the disk of (\S+)\)", line
    )
    assert found is not None, line
    needed, free = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert needed > 65536 >= free > 0 and found[3] == str(disk)
