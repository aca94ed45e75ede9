"""A SLURM of one node for tests: munged, slurmctld and slurmd from the system's packages, in a folder of their own.

Its ports, sockets, keys, state and configuration are its own, so a SLURM that the machine belongs to is neither asked
nor touched; only the three processes that :class:`Slurm` started are ended.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
CONF = """
ClusterName=tagc_test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as its credential lives: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,sched_min_interval=10000,batch_sched_delay=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
MaxArraySize=9
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=12 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=30 State=UP
PartitionName=closed Nodes={host} MaxTime=30 State=DOWN
"""


def find_obstacle() -> str | None:
    """Why a SLURM cannot be started here; None if it can."""
    if os.geteuid() != 0:
        return "a SLURM of its own needs root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        packages = "apt-get install munge slurmctld slurmd slurm-client"
        return f"no {', '.join(missing)} here; on Debian: {packages}"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _pick_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = 300, interval_s: float = 0.1) -> None:
    """Errors: ``TimeoutError`` naming ``what``."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not come about in {timeout_s:g} s")
        time.sleep(interval_s)


class Slurm:
    """A running SLURM; a context manager. ``environment`` is for the commands that shall talk to it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tagc_slurm_"))  # short: a socket's path has 107 characters
        self.folder.chmod(0o755)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # slurm/*.sbatch take the `python` that is active
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ctld_port, slurmd_port = _pick_ports(2)
        host = socket.gethostname().split(".")[0]
        text = CONF.format(folder=self.folder, host=host, ctld_port=ctld_port, slurmd_port=slurmd_port)
        (self.folder / "slurm.conf").write_text(text)
        version = subprocess.run([str(_find("slurmd")), "-V"], capture_output=True, text=True).stdout
        if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (23, 11):  # before, it does without by itself
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        files = {name: str(self.folder / f"munge.{name}") for name in ("socket", "pid", "log", "seed")}
        self._spawn(
            *("munged", "--foreground", "--force", "--key-file", str(key), "--socket", files["socket"]),
            *("--pid-file", files["pid"], "--log-file", files["log"], "--seed-file", files["seed"]),
        )
        wait_until(Path(files["socket"]).exists, "munged's socket")
        self._spawn("slurmctld", "-D", "-i")
        self._spawn("slurmd", "-D", "-N", host)
        try:
            wait_until(lambda: self.ask("sinfo", "-h", "-p", "main", "-o", "%T").strip() == "idle", "an idle node", 30)
        except TimeoutError:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out"))
            raise RuntimeError(f"SLURM did not start:\n{logs}") from None

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.out").open("wb") as log:
            command = [str(_find(program)), *arguments]
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def __exit__(self, *failure: object) -> None:
        if len(self._daemons) == 3:
            self.ask("scancel", "--user=root")
            try:
                wait_until(lambda: not self.ask("squeue", "-h"), "an empty queue", 40)
            except TimeoutError:
                self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *command: str) -> str:
        """The output of a SLURM command; empty when it fails, as when SLURM has forgotten a job."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300).stdout

    def submit(self, *arguments: str) -> str:
        """Call ``sbatch --parsable`` from the repository; returns the job's number."""
        root = Path(__file__).parents[2]
        done = subprocess.run(["sbatch", *arguments], cwd=root, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def describe_job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says; ``job`` may be ``<array>_<index>``."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)
