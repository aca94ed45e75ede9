"""Run a test function on several real gloo ranks, and hear about the first rank that fails.

    results = run_ranks(my_module_level_function, 3, "extra argument")

Every call gets fresh processes and a fresh process group. They are forked from a server process that has imported
torch once, so a rank starts in milliseconds instead of the seconds that the import takes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# What every rank needs anyway; the optimizer imports torch._dynamo at its first step.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "tests.comm.harness"]


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``ranks`` processes that share a gloo process group.

    Args: ``fn`` is a module-level function; it, ``args`` and the results are pickled. torch runs one thread per rank.
    Returns: the results in rank order. Errors: ``RuntimeError`` with the traceback of the first rank that raised or
    the exit code of the first that died, ``TimeoutError`` after ``timeout_s``; the other ranks are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "store")
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                target_args = (sender, store_path, rank, ranks, timeout_s, fn, args)
                process = context.Process(target=_run_rank, args=target_args, daemon=True)
                process.start()
                sender.close()  # the child holds the only writing end, so its death ends the stream
                processes.append(process)
                receivers.append(receiver)
            return _collect_results(processes, receivers, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()


def _collect_results(
    processes: list[BaseProcess], receivers: list[Connection], deadline_s: float, timeout_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish within {timeout_s} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                succeeded, payload = receiver.recv()
            except EOFError:
                processes[rank].join(timeout=5)
                raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{payload}")
            results[rank] = pickle.loads(payload)
    for process in processes:  # let the ranks leave the process group in order before anything is killed
        process.join(timeout=max(0.0, deadline_s - time.monotonic()))
    return [results[rank] for rank in range(len(processes))]


def _run_rank(
    sender: Connection, store_path: str, rank: int, ranks: int, timeout_s: float, fn: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # do not depend on how the host's name resolves
    try:
        store = dist.FileStore(store_path, ranks)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        # Plain pickle copies tensors; the queue of torch.multiprocessing would share memory with a process that exits.
        payload = pickle.dumps(fn(rank, *args))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        os._exit(1)  # leaving the process group in order could wait for ranks that hang
    sender.send((True, payload))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
