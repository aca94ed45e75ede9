"""Commands whose stdout is a pipe that nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tagc.host.pipe import CLOSED_PIPE
from tests.policy.sources import ROOT

COMMANDS = [
    "analysis.keep",
    "analysis.report",
    "analysis.results",
    "experiments.faults.inject",
    "experiments.faults.prove",
    "experiments.gpu_check",
    "experiments.iteration_time",
    "experiments.iteration_time.table",
    "experiments.transport.measure",
    "tagc.data.prepare",
    "tagc.record.columns",
    "tagc.record.wandb.dashboard",
    "tagc.record.wandb.sync",
]
WITHOUT_HELP = {"tagc.record.columns"}  # prints its page whatever the arguments


def run_into_closed_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``python ARGUMENTS | head -1`` with a reader that has gone before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environ, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_says_nothing_of_a_closed_pipe(module: str) -> None:
    # runpy warns of tagc.record.columns, which its package imports, too
    done = run_into_closed_pipe(
        "-W", "ignore::RuntimeWarning:runpy", "-m", module, *([] if module in WITHOUT_HELP else ["--help"])
    )
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, "")


def test_every_command_is_wrapped() -> None:
    """The slow ones, too, which the test above leaves out."""
    own = {"tagc/cli/__main__.py", "tagc/record/wandb/process.py"}  # no main of a user, or wrapped in tagc/cli/entry.py
    folders = (ROOT / name for name in ("analysis", "experiments", "tagc"))
    sources = {str(path.relative_to(ROOT)): path.read_text() for folder in folders for path in folder.rglob("*.py")}
    mains = {path: text.partition('if __name__ == "__main__":\n')[2] for path, text in sources.items()}
    bare = {path for path, text in mains.items() if text and "    with closed_pipe_ends_quietly():\n" not in text}
    assert bare == own


HEAD = "import sys; from tagc.host.pipe import closed_pipe_ends_quietly\nwith closed_pipe_ends_quietly(): "


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("print('x' * 10**6)", CLOSED_PIPE, ""),  # more than the buffer: fails in print
        ("print('x')", CLOSED_PIPE, ""),
        ("print('x'); sys.exit(3)", 3, ""),
        ("print('x'); sys.exit('error: of the user')", 1, "error: of the user"),
        ("from tagc.errors import UserError; raise UserError('rows: none')", 1, "error: rows: none\n"),
        ("print('x'); raise ValueError('a fault')", 1, "ValueError: a fault"),
    ],
)
def test_errors_keep_their_exit_code(body: str, code: int, said: str) -> None:
    done = run_into_closed_pipe("-c", HEAD + body)
    assert done.returncode == code and said in done.stderr and "BrokenPipe" not in done.stderr
    assert said or not done.stderr
    assert ("Traceback" in done.stderr) == ("ValueError" in said)
