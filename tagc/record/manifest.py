"""Where a run's numbers come from: code version, library versions, hardware, command line. ``manifest.json``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

import tagc
from tagc.config import Config, flatten, to_dict
from tagc.host.device import count_cores
from tagc.host.files import write_text_atomic
from tagc.record.arm import label_arm
from tagc.record.wandb.mirror import resolve_mode

PACKAGES = ("torch", "triton", "numba", "numpy", "hydra-core", "tagc")
START_KEYS = ("started_at", "hostname", "git_commit", "git_dirty")
SCHEMA_VERSION = 1  # of a run folder's files; raised when a reader of older ones would misread newer ones
NUMBER_KEYS = (  # of a manifest, what decides numbers; paths and host names are not among them
    *("schema_version", "started_at", "git_commit", "git_dirty"),
    *("kernels", "device", "threads_per_rank", "versions", "hardware"),
)
SOURCE_DIR = Path(tagc.__file__).resolve().parent


class _GitError(Exception):
    """Why git gave no answer, in one line."""


def _run_git(*arguments: str) -> str:
    """Output of a git command on the source folder. Errors: ``_GitError`` without git, or with what git says."""
    # Inside a git hook these point to another repository than the one that holds the source.
    environment = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    command = ["git", "-C", str(SOURCE_DIR), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, env=environment | {"LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitError(f"git does not run ({error})") from error
    if "dubious ownership" in done.stderr:
        raise _GitError(
            f"{SOURCE_DIR.parent} belongs to another user, so git does not read it; "
            f"allow it with: git config --global --add safe.directory {SOURCE_DIR.parent}"
        )
    if done.returncode:
        raise _GitError(f"git: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def describe_git(ignored: Sequence[str] = ()) -> dict[str, Any]:
    """``git_commit`` (40 hex digits) and ``git_dirty`` (changed or untracked files) of the source; None: unknown.

    Where they are unknown, ``git_commit_missing`` says why. ignored: paths from the repository's root, such as the rows
    that a measurement writes, that make nothing dirty.
    """
    pathspec = [":/", *(f":(top,exclude){path}" for path in ignored)]
    try:
        # Installed files inside somebody else's repository are not tracked there: that commit would say nothing.
        _run_git("ls-files", "--error-unmatch", "__init__.py")
        commit, status = _run_git("rev-parse", "HEAD"), _run_git("status", "--porcelain", "--", *pathspec)
    except _GitError as error:
        return {"git_commit": None, "git_dirty": None, "git_commit_missing": str(error)}
    return {"git_commit": commit, "git_dirty": bool(status)}


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that decide numbers; None for one that is not installed."""
    return {"python": platform.python_version()} | {name: _installed_version(name) for name in PACKAGES}


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system has these names
        return None


def describe_hardware() -> dict[str, Any]:
    """CPU model, cores (and those this process may use), memory in bytes, GPU names, NCCL version."""
    import torch  # imported here, so that reading records does not load torch

    has_cuda = torch.cuda.is_available()
    return {
        "cpu_model": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": count_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda else [],
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
    }


def build_manifest(config: Config, *, kernels: str, device: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything beside the configuration that a reader needs to judge or repeat a run.

    kernels: the backend in use after ``auto`` was resolved. device: ``cpu`` or ``cuda``, likewise. extra: more keys;
    they win over those set here (the launcher's ``argv`` is the user's, a rank's is not).
    """
    wandb_mode = resolve_mode(config.logging.wandb)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "started_at": datetime.now().astimezone().isoformat(),
        "hostname": socket.gethostname(),
        "argv": list(sys.argv),
        "seed": config.seed,
        "arm": label_arm(flatten(to_dict(config))),
        "kernels": kernels,
        "device": device,
        "network": config.network.name,
        **describe_git(),
        "versions": describe_versions(),
        "hardware": describe_hardware(),
        "wandb_mode": wandb_mode,
        "wandb_run_id": None if wandb_mode == "disabled" else secrets.token_hex(4),
    }
    return manifest | (extra or {})


def write_manifest(run_dir: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write ``manifest.json`` and return what was written.

    In a folder that holds a manifest already (a resumed run) the W&B run id stays the first one's, and when, where and
    by which code the run was started before moves to ``earlier_starts``.
    Errors: ``UserError`` when the folder cannot be written.
    """
    path = Path(run_dir) / "manifest.json"
    earlier = _load_manifest(path)
    if earlier is not None:
        starts = list(earlier.get("earlier_starts", []))
        if earlier.get("started_at") not in (None, manifest.get("started_at")):
            starts.append({key: earlier.get(key) for key in START_KEYS})
        kept_id = earlier.get("wandb_run_id") or manifest.get("wandb_run_id")
        manifest = manifest | {"wandb_run_id": kept_id, "earlier_starts": starts}
    write_text_atomic(path, json.dumps(manifest, indent=2, default=str) + "\n")
    return manifest


def _load_manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: there is no id to keep
        return None
    return manifest if isinstance(manifest, dict) else None


def write_config(run_dir: Path, config: Config) -> None:
    """Write the resolved configuration as ``config.yaml``. Errors: ``UserError`` when the folder cannot be written."""
    write_text_atomic(Path(run_dir) / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))
