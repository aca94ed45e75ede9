"""What the ranks run in the launcher's tests, in place of training."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tagc.config import Config
from tagc.errors import UserError


def _rank() -> int:
    return int(os.environ["RANK"])


def _note_start(run_dir: str) -> None:
    """Tell the test that this rank runs, and its pid."""
    Path(run_dir, f"started_{_rank()}").write_text(str(os.getpid()))


def _wait_for_all_ranks() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


def sum_ranks(config: Config, data: Any, run_dir: str) -> None:
    """Succeed: one all-reduce, and a summary from rank 0."""
    dist.init_process_group("gloo")
    total = torch.tensor([float(_rank() + 1)])
    dist.all_reduce(total)
    if _rank() == 0:
        summary = {"status": "done", "total": total.item(), "data": data, "threads": torch.get_num_threads()}
        Path(run_dir, "summary.json").write_text(json.dumps(summary))
    dist.destroy_process_group()


def note_environment(config: Config, data: Any, run_dir: str) -> None:
    """Succeed with the rank's environment as the summary."""
    if _rank() == 0:
        Path(run_dir, "summary.json").write_text(json.dumps({"status": "done", "environment": dict(os.environ)}))


def write_nothing(config: Config, data: Any, run_dir: str) -> None:
    """Succeed without a summary."""


def raise_in_rank_1(config: Config, data: Any, run_dir: str) -> None:
    """Rank 1 raises; the others wait for it in a collective."""
    _wait_for_all_ranks()
    if _rank() == 1:
        raise ArithmeticError("the planted fault")
    dist.all_reduce(torch.ones(1))


def blame_user_in_rank_1(config: Config, data: Any, run_dir: str) -> None:
    """Rank 1 finds bad input."""
    _wait_for_all_ranks()
    if _rank() == 1:
        raise UserError("data.path=/nowhere is missing; prepare it")
    dist.all_reduce(torch.ones(1))


def kill_rank_1(config: Config, data: Any, run_dir: str) -> None:
    """Rank 1 is killed; the others wait for it in a collective."""
    _wait_for_all_ranks()
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def fail_while_the_launcher_is_stopped(config: Config, data: Any, run_dir: str) -> None:
    """SIGTERM reaches the launcher just before the only rank fails and leaves a summary that says so."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None and launcher.pid is not None
    os.kill(launcher.pid, signal.SIGTERM)
    Path(run_dir, "summary.json").write_text('{"status": "failed"}')
    os._exit(1)


def exit_rank_1(config: Config, data: Any, run_dir: str) -> None:
    """Rank 1 leaves without an exception."""
    if _rank() == 1:
        os._exit(7)
    time.sleep(600)


def hang(config: Config, data: Any, run_dir: str) -> None:
    """Wait in a collective that rank 0 never joins."""
    _wait_for_all_ranks()
    _note_start(run_dir)
    if _rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def train_in_namespaces(config: Config, data: Any, run_dir: str) -> None:
    """Three FSDP2 steps of a tiny model; the summary compares counted bytes with those of the interface."""
    from tagc.network import build_link, leave_network
    from tagc.train.process_group import start_process_group
    from tests.comm.harness import TinyRun, tiny_config

    start_process_group(config, torch.device("cpu"))
    link = build_link(config.bandwidth, config.network, _rank())
    tiny = tiny_config("tagc")
    tiny.logging.fidelity_every = 0  # a diagnostic's bytes are not counted
    run = TinyRun(tiny, link=link)
    rows = []
    for step in range(3):
        before = link.read_counters()
        run.backward(step)
        run.update()
        dist.barrier()  # nothing is under way any more
        after = link.read_counters()
        wire = [end - begin for begin, end in zip(before, after, strict=True)]
        rows.append([sum(run.exchange.take_sent_bytes().values()), *wire])
        link.set_rate(10e6)
    with leave_network(config.network, _rank()):
        outside = os.readlink("/proc/thread-self/ns/net")
    places = {"inside": os.readlink("/proc/thread-self/ns/net"), "outside": outside}
    if _rank() == 0:
        summary = {"status": "done", "rows": rows, **places, "network": config.network.name}
        Path(run_dir, "summary.json").write_text(json.dumps(summary))


def hang_in_namespace(config: Config, data: Any, run_dir: str) -> None:
    """As ``hang``, on a network of its own; leaves the namespace's name, too."""
    from tagc.train.process_group import start_process_group

    start_process_group(config, torch.device("cpu"))
    dist.all_reduce(torch.ones(1))
    Path(run_dir, f"namespace_{_rank()}").write_text(os.readlink("/proc/thread-self/ns/net"))
    _note_start(run_dir)
    if _rank() == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def record_two_steps_and_exit(config: Config, data: Any, run_dir: str) -> None:
    """Leave rows as a run that dies after its second step."""
    Path(run_dir, "metrics.jsonl").write_text('{"step": 1, "train_loss": 8.0}\n{"step": 2, "train_loss": 7.5}\n')
    os._exit(3)
