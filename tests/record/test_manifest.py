from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path

import torch
from omegaconf import OmegaConf

from tagc.config import Config, from_omegaconf
from tagc.record import build_manifest, manifest, write_config, write_manifest


def test_the_manifest_says_what_ran_where(config) -> None:
    built = build_manifest(config, kernels="reference", device="cpu", extra={"argv": ["run.py", "seed=0"]})
    assert built["kernels"] == "reference"
    assert built["device"] == "cpu"
    assert built["argv"] == ["run.py", "seed=0"]
    assert built["seed"] == config.seed
    assert built["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(built["versions"]) == {"python", "torch", "triton", "numba", "numpy", "hydra-core", "tagc"}
    assert built["hardware"]["cpu_cores"] >= built["hardware"]["cpu_cores_usable"] >= 1
    assert built["hardware"]["memory_bytes"] > 2**28
    assert built["hardware"]["cpu_model"]
    assert (built["hardware"]["nccl_version"] is None) == (not torch.cuda.is_available())
    assert datetime.fromisoformat(built["started_at"]).tzinfo is not None
    json.dumps(built)


def _make_repository(folder: Path) -> Path:
    source = folder / "tagc"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    return source


def test_git_commit_and_dirty_flag(tmp_path: Path, monkeypatch) -> None:
    for key in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(key, raising=False)
    source = _make_repository(tmp_path / "repository")
    monkeypatch.setattr(manifest, "SOURCE_DIR", source)
    clean = manifest.describe_git()
    assert len(clean["git_commit"]) == 40
    assert clean["git_dirty"] is False
    (source / "new.py").write_text("")
    assert manifest.describe_git() == {**clean, "git_dirty": True}
    assert manifest.describe_git(ignored=["tagc/new.py"]) == clean


def test_without_git_or_repository_the_commit_is_null_and_the_reason_is_told(tmp_path: Path, monkeypatch) -> None:
    def reason() -> str:
        described = manifest.describe_git()
        assert described["git_commit"] is described["git_dirty"] is None
        return described["git_commit_missing"]

    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(manifest, "SOURCE_DIR", tmp_path)
    assert "not a git repository" in reason()
    monkeypatch.setattr(manifest, "SOURCE_DIR", _make_repository(tmp_path / "repository"))
    assert "git_commit_missing" not in manifest.describe_git()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch, as if another user had cloned
    assert "safe.directory" in reason() and str(tmp_path / "repository") in reason()
    monkeypatch.setenv("PATH", "")
    assert "git does not run" in reason()


def test_an_installed_copy_does_not_claim_a_foreign_commit(tmp_path: Path, monkeypatch) -> None:
    _make_repository(tmp_path / "repository")
    site_packages = tmp_path / "repository" / "venv" / "tagc"
    site_packages.mkdir(parents=True)
    (site_packages / "__init__.py").write_text("")
    monkeypatch.setattr(manifest, "SOURCE_DIR", site_packages)
    assert manifest.describe_git()["git_commit"] is None


def test_a_resumed_run_keeps_its_wandb_id(config, tmp_path: Path) -> None:
    config.logging.wandb = "offline"
    first = write_manifest(tmp_path, build_manifest(config, kernels="reference", device="cpu"))
    again = build_manifest(config, kernels="reference", device="cpu")
    assert first["wandb_run_id"] and first["wandb_run_id"] != again["wandb_run_id"]
    second = write_manifest(tmp_path, again)
    assert second["wandb_run_id"] == first["wandb_run_id"]
    keys = ("started_at", "hostname", "git_commit", "git_dirty")
    assert second["earlier_starts"] == [{key: first[key] for key in keys}]
    assert json.loads((tmp_path / "manifest.json").read_text()) == second
    assert write_manifest(tmp_path, second) == second  # writing twice is no restart


def test_no_wandb_id_when_it_is_disabled(config) -> None:
    built = build_manifest(config, kernels="reference", device="cpu")
    assert (built["wandb_mode"], built["wandb_run_id"]) == ("disabled", None)


def test_the_configuration_comes_back_from_its_file(config, tmp_path: Path) -> None:
    config.compressor.sparsity, config.data.path = 0.9, None
    write_config(tmp_path, config)
    loaded = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(tmp_path / "config.yaml"))
    assert from_omegaconf(loaded) == config
