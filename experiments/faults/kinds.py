"""The faults, by name. Each breaks a run that is training; the caller waits until training continues.

kill, abort  a rank gets SIGKILL or SIGABRT
hang         a rank is stopped (SIGSTOP) until ``cluster.timeout_s`` ends it
memory       a rank gets no more memory than it has; its next allocation fails
link         a rank's interface is down until the ranks have ended (network=namespaces)
damage       the newest checkpoint loses its last byte, then a rank is killed
full         the run folder's file system is full until a checkpoint has failed; no rank ends
crash        the launcher is killed, and started again
requeue      the launcher gets SIGUSR1, ends with exit code 75 and is started again
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.faults.training import Run
from tagc.launch import REQUEUE_EXIT_CODE
from tagc.network.namespaces import INTERFACE
from tagc.network.netns import call_inside
from tagc.train.checkpoint_files import list_checkpoints

DISK_BYTES = 256 << 20  # holds a few checkpoints of a small model


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own in ``folder``, which ``full`` can fill. Needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _send(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: os.kill(run.find_ranks()[-1], number)


def _damage(run: Run) -> None:
    path = list_checkpoints(run.run_dir)[0] / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    os.kill(run.find_ranks()[-1], signal.SIGKILL)


def _take_memory(run: Run) -> None:
    rank = run.find_ranks()[-1]
    used_bytes = int(Path(f"/proc/{rank}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(rank, resource.RLIMIT_AS, (used_bytes, resource.RLIM_INFINITY))


def _cut_link(run: Run) -> None:
    rank = run.find_ranks()[-1]
    place = Path(f"/proc/{rank}/ns/net")
    if place.readlink() == Path("/proc/self/ns/net").readlink():
        raise RuntimeError("the fault `link` needs network=namespaces: this rank uses the machine's own interfaces")
    host = os.open(place, os.O_RDONLY)
    try:
        _set_interface(host, "down")
        run.wait_for(lambda: not Path(f"/proc/{rank}").exists(), "its ranks noticed the broken link")
        _set_interface(host, "up")
    finally:
        os.close(host)


def _set_interface(host: int, state: str) -> None:
    call_inside(host, lambda ip: ip.link("set", index=ip.link_lookup(ifname=INTERFACE)[0], state=state))


def _fill_disk(run: Run) -> None:
    def count_failures() -> int:
        return run.output.read_text().count("no checkpoint was saved")

    before, filler = count_failures(), run.run_dir.parent / "filler"
    if not run.run_dir.parent.is_mount():
        raise RuntimeError("the fault `full` fills a file system and therefore needs one of its own")
    with filler.open("wb") as file:
        disk = os.statvfs(filler)
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize)
    try:
        run.wait_for(lambda: count_failures() > before, "a checkpoint failed")
    finally:
        filler.unlink()


def _crash(run: Run) -> None:
    run.find_ranks()
    run.process.kill()
    run.process.wait()
    run.start()


def _requeue(run: Run) -> None:
    run.find_ranks()
    run.process.send_signal(signal.SIGUSR1)
    if (code := run.process.wait()) != REQUEUE_EXIT_CODE:
        raise RuntimeError(f"after SIGUSR1 the run ended with exit code {code}")
    run.start()


KINDS: dict[str, Callable[[Run], None]] = {
    "kill": _send(signal.SIGKILL),
    "abort": _send(signal.SIGABRT),
    "hang": _send(signal.SIGSTOP),
    "memory": _take_memory,
    "link": _cut_link,
    "damage": _damage,
    "full": _fill_disk,
    "crash": _crash,
    "requeue": _requeue,
}
RESTARTING = KINDS.keys() - {"full"}  # the others leave the ranks alone
