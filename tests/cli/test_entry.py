"""The command line: what a user can get wrong is one message, and a sweep ends in one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tagc.cli import entry as cli
from tagc.config import KEYS, Config
from tagc.host.pipe import CLOSED_PIPE
from tests.cli.conftest import RUN_PY, Command

BAD_INPUT = [
    ("compressor.sparsty=0.5", ["unknown key compressor.sparsty", "did you mean compressor.sparsity?"]),
    ("+compressor.sparsty=0.5", ["unknown key compressor.sparsty", "did you mean compressor.sparsity?"]),
    ("++trainer.steps=5", ["unknown key trainer.steps", "did you mean trainer.max_steps?"]),
    ("+bandwidth.zzz=1", ["unknown key bandwidth.zzz", "name, rate_mbps"]),
    ("+foo=1", ["unknown key foo", "tagc/config/schema.py"]),
    ("sparsity=0.5", ["unknown key sparsity", "did you mean compressor.sparsity?"]),
    ("compresor=tagc", ["unknown key compresor", "did you mean compressor?"]),
    ("compressor=tagc3", ["compressor=tagc3", "Did you mean compressor=tagc", "bf16, fsdp, int4"]),
    ("experiment=nothing", ["experiment=nothing", "Choices: ", "main"]),
    ("+experiment=main", ["experiment=OPTION without a '+'"]),
    ("bandwidth=10", ["bandwidth=10", "10gbps", "bandwidth.KEY=VALUE"]),
    ("compressor=null", ["compressor=null", "tagc2"]),
    ("compressor=fsdp,tagc2", ["compressor=fsdp,tagc2", "add -m"]),
    ("trainer.max_steps=abc", ["trainer.max_steps=abc", "Integer"]),
    ("trainer.max_steps=1.5", ["trainer.max_steps=1.5", "Integer"]),
    ("trainer.max_steps=[1,2", ["trainer.max_steps=[1,2"]),
    ("compressor.sparsity=1.0", ["compressor.sparsity=1.0", "[0, 1)"]),
    ("compressor.sparsity=???", ["compressor.sparsity", "missing"]),
    ("compressor.ratio=0", ["compressor.ratio=0", "[0.05, 64]"]),
    ("cluster.ranks=0", ["cluster.ranks=0", ">= 1"]),
    ("cluster.ranks=${nowhere}", ["cluster.ranks", "nowhere"]),
    ("model.heads=5", ["model.heads=5", "model.width=192"]),
    ("seed=13", ["seed=13 is unlucky"]),
    ("~compressor", ["compressor=None", "exactly one"]),
    ("compressor=[fsdp,tagc]", ["compressor=", "exactly one"]),
    ("trainer.global_batch=13", ["cluster.ranks=2; try trainer.global_batch=12 or 14"]),
    ("trainer.micro_batch=100", ["trainer.micro_batch=100", "or a smaller trainer.micro_batch"]),
    ("hydra.run.dir=/tmp/a b=c", ["hydra.run.dir=/tmp/a b=c", "quotes"]),
    ("cluster.timeout_s=1e300", ["cluster.timeout_s=1e+300", "[1, 10^6]"]),
    ("bandwidth.rate_mbps=1e-300", ["bandwidth.rate_mbps=1e-300", "[0.001, 10^7]"]),
    ("seed=99999999999999", ["seed=99999999999999", "2^32"]),
]


@pytest.mark.parametrize(("argument", "parts"), BAD_INPUT)
def test_bad_input_is_one_message_and_a_non_zero_exit(command: Command, argument: str, parts: list[str]) -> None:
    code, out, err = command(argument)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert [part for part in parts if part.lower() not in err.lower()] == [], err


TOGETHER = [
    ("compressor=int8 compressor.sparsity=0.9", ["compressor=int8 does not use compressor.sparsity", "block", "tagc2"]),
    ("compressor=fsdp ++compressor.sparsity=0.9", ["compressor=fsdp does not use", "it uses no key of compressor"]),
    ("-m compressor=fsdp,tagc2 hydra.sweep.dir=/x/a,b", ["hydra.sweep.dir=/x/a,b", "hydra.sweep.dir='/x/a\\,b'"]),
    ("-m compressor=fsdp,tagc3", ["point 1 (compressor=tagc3)", "there is no such option"]),
    ("network=real network.latency_ms=0", ["network=real does not use network.latency_ms"]),
    ("cluster.max_requeues=3", ["cluster=local does not use cluster.max_requeues"]),
]


@pytest.mark.parametrize(("arguments", "parts"), TOGETHER)
def test_arguments_that_do_not_go_together_are_refused_by_name(
    command: Command, arguments: str, parts: list[str]
) -> None:
    code, out, err = command(*arguments.split())
    assert (code, out) == (1, "") and err.startswith("error: "), err
    assert [part for part in parts if part not in err] == [], err
    assert "compressor takes the name of an option" not in err


def test_a_key_in_a_group_file_is_refused_with_the_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "extra" / "compressor").mkdir(parents=True)
    (tmp_path / "extra" / "compressor" / "mine.yaml").write_text("name: tagc\nsparsty: 0.5\n")
    code, _, err = command("--config-dir", "extra", "compressor=mine")
    assert code == 1
    expected = "compressor/mine.yaml: unknown key compressor.sparsty; did you mean compressor.sparsity?\n"
    assert err == f"error: {expected}"


def test_a_file_in_the_way_of_the_run_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, err = command("hydra.run.dir=file/run")
    assert code == 1 and "file/run cannot be created" in err and "hydra.run.dir" in err and err.count("\n") == 1


def test_one_run_ends_in_its_table_and_its_folder_has_a_readable_name(command: Command, tmp_path: Path) -> None:
    code, out, err = command("compressor=bf16", "bandwidth=1gbps")
    assert (code, err) == (0, "")
    assert "gradient bytes per step" in out and "2.5 MB" in out and "12.5" in out
    assert out.count("said by the launcher") == 1
    (summary,) = tmp_path.glob("outputs/*/*-bf16-1gbps/summary.json")
    assert json.loads(summary.read_text())["compressor"] == "bf16"
    assert not list(tmp_path.rglob("*.log")), "Hydra wrote a log of its own"


def _table_rows(out: str) -> list[list[str]]:
    """The rows of the sweep's table, which start with a number; not the list of folders below it."""
    lines = [line.split() for line in out.splitlines() if "/" not in line]
    return [words for words in lines if words and words[0].isdigit()]


def test_a_sweep_ends_in_one_row_per_job(command: Command, tmp_path: Path) -> None:
    code, out, err = command("-m", "compressor=fsdp,tagc2", "bandwidth=1gbps,10gbps", "hydra.sweep.dir=sweep")
    assert (code, err) == (0, "")
    names = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json"))
    beginnings = ["fsdp-10gbps", "fsdp-1gbps", "tagc2-10gbps", "tagc2-1gbps"]
    assert [name.rpartition("-nano-seed0-")[0] for name in names] == beginnings
    rows = [words[:3] for words in _table_rows(out)]
    assert rows == [
        ["0", "fsdp", "1gbps"],
        ["1", "fsdp", "10gbps"],
        ["2", "tagc2", "1gbps"],
        ["3", "tagc2", "10gbps"],
    ]


def test_a_failed_job_fails_the_sweep_but_not_the_other_jobs(command: Command) -> None:
    code, out, err = command("-m", "seed=1,13,2", "hydra.sweep.dir=sweep")
    assert code == 1
    assert "error in job 1 (seed=13): seed=13 is unlucky" in err
    assert "error: 1 of 3 points are not done; the same command goes on:\n  point 1 failed: " in err
    assert "Traceback" not in err
    rows = [words[:2] for words in _table_rows(out)]
    assert rows == [["0", "done"], ["1", "failed"], ["2", "done"]]


def test_a_sweep_with_an_impossible_job_does_not_start(command: Command, tmp_path: Path) -> None:
    code, _, err = command("-m", "compressor=fsdp,nothing")
    assert code == 1 and err.startswith("error: 1 of 2 points cannot run, so none was started:")
    assert "point 1 (compressor=nothing): compressor=nothing: there is no such option" in err
    assert not list(tmp_path.rglob("summary.json"))


def test_a_fault_of_the_program_keeps_its_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Config, run_dir: Path) -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "launch", fail)
    with pytest.raises(ZeroDivisionError):
        command()


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--version"]])
def test_hydras_own_options_work(command: Command, arguments: list[str]) -> None:
    code, out, _ = command(*arguments)
    assert code == 0
    assert {"--help": "compressor: ", "--cfg": "sparsity: 0.8", "--version": "Hydra"}[arguments[0]] in out


def test_help_shows_each_key_with_default_meaning_and_range(command: Command) -> None:
    _, out, _ = command("--help")
    missing = [name for name in KEYS if f"\n  {name}=" not in out]
    assert missing == []
    words = " ".join(out.split())
    assert "compressor.block=256 Elements that share one scale. Legal: an integer >= 8. Used by int8, int4." in words


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["--version"]])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    """As ``python run.py --help | head -3``, with a reader that has gone before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(RUN_PY), *arguments], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode in (0, CLOSED_PIPE) and done.stderr == ""
