"""Validation: every key against its declared rule, and the keys that must agree with each other."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tagc.config.lookup import KEYS
from tagc.config.schema import ClusterConfig, Config, NetworkConfig
from tagc.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _check_nodes(cluster: ClusterConfig, network: NetworkConfig) -> None:
    ranks, nodes, gpus = cluster.ranks, cluster.nodes, cluster.gpus_per_node
    if ranks % nodes:
        below, above = ranks // nodes * nodes, -(-ranks // nodes) * nodes
        choices = " or ".join(str(count) for count in (below, above) if count)
        raise UserError(
            f"cluster.ranks={ranks} is not a multiple of cluster.nodes={nodes}; try cluster.ranks={choices}"
        )
    if gpus is not None and gpus * nodes != ranks:
        raise UserError(
            f"cluster.gpus_per_node={gpus} on cluster.nodes={nodes} are {gpus * nodes} GPUs for cluster.ranks={ranks}; "
            f"every rank takes one: set cluster.ranks={gpus * nodes}"
        )
    if nodes > 1 and network.name == "namespaces":
        raise UserError(
            f"network=namespaces joins ranks of one machine, so it cannot have cluster.nodes={nodes}; set "
            "network=paced, or network=real with a capped interface (slurm/README.md)"
        )


def _check_network(network: NetworkConfig) -> None:
    if network.name in ("namespaces", "real") and network.latency_ms:
        raise UserError(
            f"network.latency_ms={network.latency_ms:g} is a key of the paced link; network={network.name} adds no "
            "delay: set it to 0, or network=paced"
        )
    if network.name == "real" and network.time_dilation != 1:
        raise UserError(
            f"network.time_dilation={network.time_dilation} cannot slow a real interface down; set it to 1 and cap "
            "the interface itself (slurm/README.md), or set network=paced"
        )


def validate(config: Config) -> Config:
    """Check every key and every pair of keys that must agree; returns the configuration unchanged.

    Errors: ``UserError`` naming the key, the value and the legal range.
    """
    for name, value in flatten(to_dict(config)).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} is not a finite number")
        rule = KEYS[name].declaration.rule
        if rule is not None and not rule.holds(value):
            raise UserError(f"{name}={value} is out of range; legal: {rule.text}")
    block = config.weights.block
    if config.weights.rotate and block & (block - 1):
        raise UserError(f"weights.block={block} cannot be rotated; set a power of two, or weights.rotate=false")
    _check_network(config.network)
    _check_nodes(config.cluster, config.network)
    model, trainer, ranks = config.model, config.trainer, config.cluster.ranks
    if model.width % model.heads:
        raise UserError(
            f"model.heads={model.heads} does not divide model.width={model.width}; choose a divisor of the width"
        )
    unit = ranks * (trainer.micro_batch or 1)
    if trainer.global_batch % unit:
        below, above = trainer.global_batch // unit * unit, -(-trainer.global_batch // unit) * unit
        choices = " or ".join(str(size) for size in (below, above) if size)
        micro = f" x trainer.micro_batch={trainer.micro_batch}" if trainer.micro_batch else ""
        raise UserError(
            f"trainer.global_batch={trainer.global_batch} is not a multiple of cluster.ranks={ranks}{micro}; "
            f"try trainer.global_batch={choices}" + (", or a smaller trainer.micro_batch" if micro else "")
        )
    if trainer.profile and trainer.max_steps <= trainer.timing_warmup_steps:
        raise UserError(
            f"trainer.profile=true traces steps after the first trainer.timing_warmup_steps="
            f"{trainer.timing_warmup_steps}, but trainer.max_steps={trainer.max_steps} leaves none; "
            f"set trainer.max_steps={trainer.timing_warmup_steps + 3} or more, or fewer trainer.timing_warmup_steps"
        )
    return config


def from_omegaconf(config: DictConfig) -> Config:
    """Turn a composed Hydra config into a validated :class:`Config`.

    Errors: ``UserError`` naming the key, the value and the legal range.
    """
    from omegaconf import OmegaConf  # here: the schema itself must load where Hydra is not installed

    result = OmegaConf.to_object(config)
    if not isinstance(result, Config):
        raise UserError("the configuration was composed without the schema; conf/config.yaml must list `base_config`")
    return validate(result)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts."""
    return asdict(config)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """What :func:`to_dict` gives, with keys as on the command line: ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for section, value in config.items():
        flat |= (
            {f"{section}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {section: value}
        )
    return flat
