"""The start of the process group, on the network that the rank belongs to."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tagc.config import Config
from tagc.network import enter_network


def start_process_group(config: Config, device: torch.device) -> None:
    """Meet the other ranks and start the default group: NCCL on CUDA, else gloo. RANK and MASTER_* must be set.

    A socket stays on the network where it was made. So the ranks meet at the launcher's store on the machine's own
    network first; whatever they send each other from then on, in groups made later too, passes the rank's link.
    """
    timeout = timedelta(seconds=config.cluster.timeout_s)
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Elastic keeps one store for all attempts: without a prefix a restarted rank finds the addresses of dead ones.
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    enter_network(config.network, rank)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
