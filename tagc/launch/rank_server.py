"""Ranks on a CPU are forked from a process that has imported what they need, which takes seconds.

The process is multiprocessing's fork server. It is started by the first run of a launcher and serves the later ones: a
sweep imports torch once. It ends with the launcher, however that ends. CUDA does not outlive a fork, so ranks on GPUs
are spawned; they call the same functions.
"""

from __future__ import annotations

import os
import signal
import site
from multiprocessing import forkserver
from pathlib import Path

from tagc.host.signals import SIGNALS, block_signals

_PRELOADED = ["tagc.train.worker", "torch._dynamo"]  # the optimizers import the latter at their first step
_PROJECT = Path(__file__).parents[2]
_server = forkserver._forkserver  # type: ignore[attr-defined]  # the module's functions are its methods
_inherited: dict[str, str] = {}  # the environment that the server was started with


def start_server() -> None:
    """Start it, if none runs. Where the preloading fails, the ranks import by themselves, and say why."""
    earlier, before = _server._forkserver_pid, dict(os.environ)
    # It imports before it learns the launcher's sys.path, and its working directory is no place to import from.
    os.environ["PYTHONSAFEPATH"] = "1"
    if str(_PROJECT) not in site.getsitepackages():
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_PROJECT), *filter(None, [before.get("PYTHONPATH")])])
    given = dict(os.environ)
    _server.set_forkserver_preload(_PRELOADED)
    try:
        # A signal that ends or warns the launcher is none of the server's business: it ends when the launcher has.
        with block_signals(signal.SIGINT, signal.SIGHUP, *SIGNALS):
            _server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    if _server._forkserver_pid != earlier:
        _inherited.clear()
        _inherited.update(given)


def stop_server() -> None:
    """End it if it runs, for a caller that takes back the standard streams that it inherited."""
    _server._stop()


def find_ranks(thread_id: int | None) -> list[int]:
    """The living ranks: children of the launcher's thread that spawned them, or of the server.

    Errors: ``OSError`` if one of them ends meanwhile, or without /proc.
    """
    server = _server._forkserver_pid
    parents = [f"/proc/self/task/{thread_id}/children", *([f"/proc/{server}/task/{server}/children"] if server else [])]
    children = [int(pid) for path in parents for pid in Path(path).read_text().split()]
    return [pid for pid in children if pid != server and _state(pid) != "Z"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def changed_environment() -> dict[str, str | None]:
    """What the launcher's environment has, and no longer has (None), since the server was started."""
    if _server._forkserver_pid is None:
        return {}
    now = dict(os.environ)
    changed: dict[str, str | None] = {name: value for name, value in now.items() if _inherited.get(name) != value}
    return changed | {name: None for name in _inherited if name not in now}


def enter_rank(environment: dict[str, str | None]) -> None:
    """First call in a rank: what it has from the server is replaced by what a child of the launcher would have.

    SIGINT stays blocked: a terminal sends it to every process, and the launcher answers it.
    """
    if _server._inherited_fds is None:  # spawned by the launcher itself
        return
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.close(_server._forkserver_alive_fd)  # the server ends when no process holds this: with the launcher
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP, *SIGNALS])
