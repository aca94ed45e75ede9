"""What a checkpoint holds of a trainer, and how a trainer takes it back, also at another number of ranks.

    model, optimizer          sharded tensors by parameter name; torch.distributed.checkpoint reshards them
    rank_<r>/<slot>/<name>    a compressor's state: each rank has its own, so each has keys of its own
    replica                   slices of the replica of the weights, sharded like the parameters (weights=delta*)
    rank_<r>/rng/<device>     the state of torch's random number generators

Everything else that decides a step (learning rate, hash seeds, sampled positions, batches) follows from its number.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tagc.compressors import COMPRESSORS
from tagc.train.checkpoint_files import CheckpointInfo

if TYPE_CHECKING:
    from tagc.train.trainer import Trainer

logger = logging.getLogger("tagc")


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """This rank's part of the checkpoint. Nothing is copied: the next step overwrites it."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer, **_collect_rank_state(trainer)}
    if trainer.sync.weights.kept:
        state |= {"replica": trainer.sync.weights.state_dict(), "replica_steps": trainer.sync.weights.sent_steps()}
    return state


def _collect_rank_state(trainer: Trainer) -> dict[str, Tensor]:
    state = {"rng/cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(trainer.device)
    state |= trainer.sync.compressor_state()
    return {f"rank_{trainer.rank}/{key}": tensor for key, tensor in state.items()}


def restore_state(trainer: Trainer, folder: Path, info: CheckpointInfo, group: dist.ProcessGroup) -> None:
    """Bring a freshly built trainer to the state saved in ``folder``. To be called on all ranks at once."""
    reader = dcp.FileSystemReader(folder)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dcp.load(state, storage_reader=reader, process_group=group)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    _restore_replica(trainer, reader, group)
    if info.ranks != trainer.ranks:
        _spread_residuals(trainer, reader, info.ranks)
    own = _load_rank_state(reader, f"rank_{trainer.rank}/")
    if info.ranks == trainer.ranks:
        trainer.sync.load_compressor_state(own)
    if "rng/cpu" in own:  # a rank that is new goes on with the generator it was built with
        torch.set_rng_state(own["rng/cpu"])
    if "rng/cuda" in own and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(own["rng/cuda"], trainer.device)


def _restore_replica(trainer: Trainer, reader: dcp.FileSystemReader, group: dist.ProcessGroup) -> None:
    weights = trainer.sync.weights
    if not weights.kept:
        return
    if "replica_steps" not in reader.read_metadata().state_dict_metadata:
        logger.warning("the checkpoint holds no replica of the weights: the next gathers send the weights themselves")
        return
    state: dict[str, Any] = {"replica": weights.state_dict(), "replica_steps": weights.sent_steps()}
    dcp.load(state, storage_reader=reader, process_group=group)
    weights.restore(state["replica"], state["replica_steps"])


def _take(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _load_rank_state(reader: dcp.FileSystemReader, prefix: str) -> dict[str, Tensor]:
    """The plain tensors whose keys start with ``prefix``, by the rest of the key; empty if there are none."""
    state = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # about the missing process group: plain tensors need no agreement
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return _take(state, prefix)


def _spread_residuals(trainer: Trainer, reader: dcp.FileSystemReader, old_ranks: int) -> None:
    """Give every rank the mean of the old ranks' residuals, parameter by parameter.

    A reduction divides the sum over ranks by their number, so what the update is still owed is the residuals' mean:
    that is what must not change. Were their plain sum kept, a run that goes from 2 to 4 ranks would apply half of what
    it holds back, and one from 4 to 2 twice as much. All ranks get the same share because all see batches of the same
    kind; with the whole debt on one rank, that rank would send little but old values. Thresholds, sketch sizes and
    decisions between compressed and dense depend on the ranks and start anew.
    """
    if trainer.ranks == 1 and COMPRESSORS[trainer.config.compressor.name].residual_type is not None:
        logger.warning("one rank has no compressor: the residuals in the checkpoint are dropped")
    for unit, bucket in zip(trainer.sync.units, trainer.sync.buckets, strict=True):
        for slot in bucket.slots if old_ranks > 1 else ():
            new = slot.compressor
            mean: dict[str, Tensor] = {}
            for old_rank in range(old_ranks):
                old_bucket = trainer.sync.build_bucket(unit, old_ranks, old_rank, torch.device("cpu"))
                old = next(s.compressor for s in old_bucket.slots if s.compressor.spec.name == new.spec.name)
                old.load_state_dict(_load_rank_state(reader, f"rank_{old_rank}/{new.spec.name}/"))
                for name, residual in old.residuals().items():
                    share = residual.flatten() / old_ranks
                    mean[name] = mean[name] + share if name in mean else share
            new.load_residuals({n: _reshard(mean[n], numel, trainer) for n, numel in new.spec.parameters if n in mean})


def _reshard(full: Tensor, shard_numel: int, trainer: Trainer) -> Tensor:
    """A padded parameter, flat, cut for the trainer's ranks: [W, shard_numel]. Padding is zero at both."""
    resized = full.new_zeros(trainer.ranks * shard_numel)
    common = min(len(full), len(resized))
    resized[:common] = full[:common]
    return resized.view(trainer.ranks, shard_numel).to(trainer.device)


def count_bytes(state: Any) -> int:
    """Bytes of this rank's tensors in a state of nested dicts and lists; of a sharded one its own part."""
    leaves = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(state))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
