"""What runs in every rank: set up the process group, the record and the trainer, then train."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tagc.config import Config
from tagc.data import DataInfo
from tagc.host.device import resolve_device
from tagc.host.signals import RESTART_VARIABLE, listen_in_rank
from tagc.kernels import resolve_backend
from tagc.network import leave_network
from tagc.record import NullRecorder, Recorder, build_manifest, close_logging, setup_logging
from tagc.train.checkpoint import Checkpoints
from tagc.train.process_group import start_process_group
from tagc.train.profile import StepProfiler
from tagc.train.trainer import Trainer

logger = logging.getLogger("tagc")


def run_worker(config: Config, data: DataInfo, run_dir: str) -> None:
    """Train in this rank; rank 0 records into ``run_dir``. RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* must be set.

    Errors: ``UserError`` for bad input, on all ranks alike.
    """
    with rank_process(config, run_dir) as device, listen_in_rank() as stop_requested:
        _train(config, data, run_dir, device, stop_requested)


@contextmanager
def rank_process(config: Config, run_dir: str) -> Iterator[torch.device]:
    """Logging, device and process group of this rank, given back at the end; yields the device."""
    rank = int(os.environ["RANK"])
    setup_logging(Path(run_dir), rank)
    device = torch.device(resolve_device(config.cluster.device, config.cluster.ranks_per_node))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, as the papers' runs
    start_process_group(config, device)
    yield device
    dist.destroy_process_group()  # not after an error: peers may be waiting inside a collective
    close_logging()


def _train(
    config: Config, data: DataInfo, run_dir: str, device: torch.device, stop_requested: Callable[[], bool]
) -> None:
    if dist.get_rank() == 0 and RESTART_VARIABLE in os.environ:
        logger.warning("%s", os.environ[RESTART_VARIABLE])
    kernels_name, kernels = resolve_backend(config.kernels, device.type)
    extra = {"data": asdict(data), "backend": dist.get_backend(), "threads_per_rank": torch.get_num_threads()}
    manifest = build_manifest(config, kernels=kernels_name, device=str(device), extra=extra)
    trainer = Trainer(config, data, device, kernels)
    trainer.stop_requested = stop_requested
    rank = dist.get_rank()
    with Checkpoints(Path(run_dir), config) as checkpoints:
        step = checkpoints.restore_newest(trainer) or 0  # the launcher has set aside what is not to be continued
        with leave_network(config.network, rank):  # W&B's thread and process talk to its server, not to other ranks
            recorder = Recorder(Path(run_dir), config, manifest, step) if rank == 0 else NullRecorder()
        with recorder:
            trainer.log_start(kernels_name)
            trainer.train(recorder, StepProfiler(config.trainer, Path(run_dir), device), checkpoints)
            checkpoints.wait()
            recorder.finish("done" if trainer.step >= config.trainer.max_steps else "interrupted")
        if rank == 0:
            logger.info("run folder: %s", run_dir)
