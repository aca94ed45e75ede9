"""Configuration: every key is declared once, in :mod:`tagc.config.schema`.

``conf/`` holds differences only. Hydra composes, :func:`from_omegaconf` turns the result into the schema's dataclasses
and validates them; code below ``tagc/cli`` never sees a ``DictConfig``.
"""

from tagc.config.check import flatten, from_omegaconf, to_dict, validate
from tagc.config.keys import Affects, Declaration, Resume, Rule
from tagc.config.lookup import (
    CONF_DIR,
    KEYS,
    Key,
    affects,
    drop_unused,
    find_unused,
    is_operational,
    key_of,
    keys_used_by,
    load_option,
    refuse_unused,
    resumes,
    uses,
)
from tagc.config.methods import COMPRESSORS, DTYPES, THRESHOLDS, WEIGHTS, CompressorConfig, WeightsConfig
from tagc.config.schema import (
    CLUSTERS,
    KERNELS,
    NETWORKS,
    REFERENCE_GPUS,
    RESUME,
    BandwidthConfig,
    ClusterConfig,
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
    "CONF_DIR",
    "DTYPES",
    "KERNELS",
    "KEYS",
    "NETWORKS",
    "REFERENCE_GPUS",
    "RESUME",
    "THRESHOLDS",
    "WEIGHTS",
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
    "WeightsConfig",
    "affects",
    "drop_unused",
    "find_unused",
    "flatten",
    "from_omegaconf",
    "is_operational",
    "key_of",
    "keys_used_by",
    "load_option",
    "refuse_unused",
    "resumes",
    "to_dict",
    "uses",
    "validate",
]
