"""The folders of checkpoints: what each holds, when it is complete, which are kept, and what a run may continue.

checkpoints/step_00000500/            complete: it got this name by a rename, after everything in it was on the disk
    checkpoint.json                   step, ranks, torch version, configuration, and the size and CRC of every file
    .metadata  __<rank>_0.distcp      torch.distributed.checkpoint's own
checkpoints/.step_00001000.partial/   being written, or left behind by a crash
checkpoints/damaged_step_00000500/    was complete once and is no longer readable
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tagc.config import Config, drop_unused, flatten, resumes, to_dict
from tagc.errors import UserError

FORMAT = 1
METADATA_NAME = "checkpoint.json"
_CRC_PIECE_BYTES = 1 << 24


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read; the message says which file and how."""


@dataclass
class CheckpointInfo:
    """``checkpoint.json``."""

    step: int  # finished optimizer steps
    ranks: int
    torch: str
    config: dict[str, Any]
    parameters: dict[str, list[int]]  # name -> full shape
    data: dict[str, Any]  # the loader's state
    time_dilation: float | None = None  # what `auto` has measured; None: nothing yet, or it had no need to
    files: dict[str, list[int]] = field(default_factory=dict)  # name -> bytes, CRC-32
    format: int = FORMAT


def checkpoints_dir(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def step_dir(run_dir: Path, step: int) -> Path:
    """The folder of the complete checkpoint after ``step`` steps."""
    return checkpoints_dir(run_dir) / f"step_{step:08d}"


def partial_dir(folder: Path) -> Path:
    """Where the checkpoint that will be ``folder`` is written."""
    return folder.with_name(f".{folder.name}.partial")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    return sorted(checkpoints_dir(run_dir).glob("step_[0-9]*"), reverse=True)


def measure_file(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_CRC_PIECE_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def read_info(folder: Path) -> CheckpointInfo:
    """Read ``checkpoint.json``. Errors: :class:`DamagedCheckpoint`."""
    path = folder / METADATA_NAME
    try:
        info = CheckpointInfo(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged, or was written by another version ({error})") from error
    if info.format != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {info.format}; this version reads format {FORMAT}")
    return info


def check_files(folder: Path, info: CheckpointInfo, names: Iterable[str]) -> None:
    """Compare files with their recorded size and CRC. Errors: :class:`DamagedCheckpoint` naming the first that differs.

    Cost: reads the files once.
    """
    for name in names:
        try:
            found = measure_file(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read ({error.strerror})") from error
        if found[0] != info.files[name][0]:
            raise DamagedCheckpoint(f"{folder / name} holds {found[0]:,} bytes instead of {info.files[name][0]:,}")
        if found != info.files[name]:
            raise DamagedCheckpoint(f"{folder / name} has changed since it was written (CRC-32)")


def start_partial(folder: Path) -> None:
    """Make an empty folder to write the checkpoint ``folder`` in; what crashes left behind goes away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    partial_dir(folder).mkdir()


def explain_failure(reason: str, partial: Path, needed_bytes: int) -> str:
    """Why a checkpoint could not be written into ``partial``: torch's reason may be an archive library's assertion.

    ``needed_bytes``: of all ranks' tensors together. What was written of it already counts as free.
    """
    try:
        free_bytes = shutil.disk_usage(partial).free + sum(path.stat().st_size for path in partial.iterdir())
    except OSError:  # the folder is gone, or its disk
        return reason
    room = f"{needed_bytes:,} bytes are needed and {free_bytes:,} are free on the disk of {partial.parent}"
    return f"the disk is full: {room}" if free_bytes < needed_bytes else f"{reason}; {room}"


def commit(folder: Path, info: CheckpointInfo) -> None:
    """Turn the partial folder, whose other files are on the disk already, into the complete checkpoint ``folder``."""
    partial = partial_dir(folder)
    with (partial / METADATA_NAME).open("w", encoding="utf-8") as file:
        json.dump(asdict(info), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(folder)
    _sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint; interrupted half way it is one without ``checkpoint.json``, which nobody takes for good."""
    (folder / METADATA_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def keep_newest(run_dir: Path, count: int) -> None:
    """Delete all complete checkpoints but the ``count`` newest."""
    for folder in list_checkpoints(run_dir)[count:]:
        remove(folder)


def mark_damaged(folder: Path) -> Path:
    """Take a damaged checkpoint out of the sequence; returns where it is now."""
    target = folder.with_name(f"damaged_{folder.name}")
    if target.exists():
        shutil.rmtree(target)
    return folder.rename(target)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dilation_to_keep(info: CheckpointInfo, config: Config) -> float | None:
    """The time dilation that was measured once for all rows of the run; None if ``config`` must measure anew."""
    is_same = info.config["network"]["reference_gpu"] == config.network.reference_gpu
    return info.time_dilation if is_same and info.ranks == config.cluster.ranks else None


def check_config(folder: Path, info: CheckpointInfo, config: Config) -> list[str]:
    """Whether a run of ``config`` may continue this checkpoint; returns what is different and allowed, for the log.

    Errors: ``UserError`` listing the keys that differ and must not, with the ways out.
    """
    saved, current = drop_unused(flatten(info.config)), drop_unused(flatten(to_dict(config)))
    differing = [key for key in saved if key in current and resumes(key) != "free" and saved[key] != current[key]]
    told = {key: f"{key}={current[key]}, {saved[key]} in the checkpoint" for key in differing}
    fixed = [text for key, text in told.items() if resumes(key) == "fixed"]
    if fixed:
        raise UserError(
            f"the checkpoint {folder} is of another run: {'; '.join(fixed)}. Set these keys back to continue it, "
            "trainer.resume=never to start over (its record moves to earlier/), or hydra.run.dir to another folder"
        )
    return list(told.values())
