"""What of the machine and its environment would break a run, found before data and ranks."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from tagc.config import Config
from tagc.errors import UserError

BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 2**20  # torch elastic's queues and events take a few pages


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse a launcher that torchrun started: each of its copies would train a whole run.

    The ranks that a launcher starts have these variables, too, but never call this.
    """
    if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= environment.keys():
        ranks = environment["WORLD_SIZE"]
        raise UserError(
            f"TORCHELASTIC_RUN_ID={environment['TORCHELASTIC_RUN_ID']}: torchrun started this launcher, and each of "
            f"its {ranks} copies would be a whole run; run.py starts its own ranks: "
            f"python run.py cluster.ranks={ranks} ..."
        )


def drop_thread_binding(environment: MutableMapping[str, str]) -> str | None:
    """Remove the variables that bind OpenMP's threads to cores; returns what to tell the user, if there were any.

    To be called before torch is imported: with them the import binds the launcher to one core, and every rank inherits
    that.
    """
    dropped = [f"{name}={environment.pop(name)}" for name in BINDING_VARIABLES if name in environment]
    if not dropped:
        return None
    return f"ignored: {', '.join(dropped)}; it would bind the launcher, and with it every rank, to the same core"


def check_machine(config: Config, device: str, environment: Mapping[str, str]) -> None:
    """Check what the ranks will need. device: "cpu" or "cuda". Errors: ``UserError`` with the remedy."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if config.network.name != "namespaces":  # there every rank has an interface of its own, which we name
        check_gloo_interfaces(environment, interfaces)
    if device == "cuda":
        check_nccl_interfaces(environment, interfaces)
    if config.trainer.compile and device == "cpu":
        check_compiler(environment)
    if sys.platform == "linux":
        check_shared_memory()


def check_gloo_interfaces(environment: Mapping[str, str], interfaces: Iterable[str]) -> None:
    """GLOO_SOCKET_IFNAME: names of interfaces, separated by commas."""
    value = environment.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in value.split(",") if name and name not in interfaces]
    if missing:
        raise _no_interface("GLOO_SOCKET_IFNAME", value, missing[0], interfaces)


def check_nccl_interfaces(environment: Mapping[str, str], interfaces: Iterable[str]) -> None:
    """NCCL_SOCKET_IFNAME: prefixes separated by commas; with a leading ``=`` names; with ``^`` what not to use."""
    value = environment.get("NCCL_SOCKET_IFNAME", "")
    if not value or value.startswith("^"):
        return
    wanted = [name for name in value.removeprefix("=").split(",") if name]
    is_exact = value.startswith("=")
    found = any(name == want if is_exact else name.startswith(want) for name in interfaces for want in wanted)
    if not found:
        raise _no_interface("NCCL_SOCKET_IFNAME", value, value, interfaces)


def _no_interface(variable: str, value: str, missing: str, interfaces: Iterable[str]) -> UserError:
    return UserError(
        f"{variable}={value}: this machine has no network interface {missing}; it has {', '.join(interfaces)}. "
        f"Set {variable} to one of them, or unset it"
    )


def check_compiler(environment: Mapping[str, str]) -> None:
    """``trainer.compile`` on a CPU: torch compiles C++, with $CXX or else g++."""
    compiler = (environment.get("CXX") or "g++").split()[0]
    if "TORCH_INDUCTOR_INSTALL_GXX" not in environment and not shutil.which(compiler, path=environment.get("PATH")):
        raise UserError(
            f"trainer.compile=true needs a C++ compiler, and there is no {compiler}; install g++, set CXX to another "
            "compiler, or set trainer.compile=false"
        )


def check_shared_memory(folder: Path = SHARED_MEMORY) -> None:
    """The processes of a run share semaphores through this folder (Linux)."""
    why = None
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
            if free < _LEAST_SHARED_BYTES:
                why = f"only {free:,} bytes are free"
    except OSError as error:
        why = error.strerror
    if why:
        raise UserError(
            f"{folder} cannot be used ({why}), and the processes of a run share semaphores there; free or mount it, in "
            "a container for example with --shm-size=64m"
        )
