"""Configuration: every key is declared once, in :mod:`tagc.config.schema`.

``conf/`` holds differences only. Hydra composes, :func:`from_omegaconf` turns the result into the schema's dataclasses
and validates them; code below ``tagc/cli`` never sees a ``DictConfig``.
"""

from tagc.config.check import flatten, from_omegaconf, to_dict, validate
from tagc.config.keys import Affects, Declaration, Resume, Rule
from tagc.config.lookup import KEYS, Key, affects, drop_unused, is_operational, keys_used_by, resumes, uses
from tagc.config.schema import (
    CLUSTERS,
    COMPRESSORS,
    DTYPES,
    KERNELS,
    NETWORKS,
    REFERENCE_GPUS,
    RESUME,
    THRESHOLDS,
    BandwidthConfig,
    ClusterConfig,
    CompressorConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    NetworkConfig,
    SweepConfig,
    TrainerConfig,
)

__all__ = [
    "CLUSTERS",
    "COMPRESSORS",
    "DTYPES",
    "KERNELS",
    "KEYS",
    "NETWORKS",
    "REFERENCE_GPUS",
    "RESUME",
    "THRESHOLDS",
    "Affects",
    "BandwidthConfig",
    "ClusterConfig",
    "CompressorConfig",
    "Config",
    "DataConfig",
    "Declaration",
    "Key",
    "LoggingConfig",
    "ModelConfig",
    "NetworkConfig",
    "Resume",
    "Rule",
    "SweepConfig",
    "TrainerConfig",
    "affects",
    "drop_unused",
    "flatten",
    "from_omegaconf",
    "is_operational",
    "keys_used_by",
    "resumes",
    "to_dict",
    "uses",
    "validate",
]
