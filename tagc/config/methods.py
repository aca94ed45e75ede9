"""The schema's sections of what travels: gradients (``compressor``) and parameters (``weights``)."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.config.keys import Rule, at_least, key, one_of, within

COMPRESSORS = ("noop", "fsdp", "bf16", "lhc", "tagc", "tagc2", "packed", "int8", "int4")
WEIGHTS = ("full", "bf16", "int8", "delta8", "delta4", "delta3", "delta2")
THRESHOLDS = ("sampled", "exact", "lognormal")
DTYPES = ("float32", "bfloat16")

# Methods by what they share; the dense ones (noop, fsdp, bf16) use no key of their group.
SKETCHES = ("lhc", "tagc", "tagc2")
SPARSE = (*SKETCHES, "packed")
LOSSY = (*SPARSE, "int8", "int4")
DELTAS = ("delta8", "delta4", "delta3", "delta2")

_NAME = "the option's name"


@dataclass
class CompressorConfig:
    """What happens to a gradient bucket on its way to the shard's owner."""

    name: str = key("tagc2", _NAME, one_of(*COMPRESSORS))
    layers: str = key(
        "non_attention",
        "which parameters are compressed: all, non_attention, or name patterns such as '*.mlp.*|lm_head.*'",
        Rule(lambda value: bool(value.strip()), "all, non_attention, or name patterns separated by '|'"),
        used_by=LOSSY,
    )
    min_numel: int = key(16384, "parameters with fewer elements stay dense", at_least(1), used_by=LOSSY)
    sparsity: float = key(
        0.8,
        "share of each bucket that is not sent",
        within(0, 1, "a share in [0, 1): at 1 nothing would be sent", open_high=True),
        used_by=SPARSE,
    )
    ratio: float = key(
        2.0, "compressed elements per cell", within(0.05, 64, "a number in [0.05, 64]"), used_by=SKETCHES
    )
    adaptive_ratio: bool = key(
        True, "each bucket's ratio follows the measured union up to max_load, instead of ratio", used_by=SKETCHES
    )
    value_dtype: str = key(
        "bfloat16", "dtype of cells, packed values and dense steps on the wire", one_of(*DTYPES), used_by=LOSSY
    )
    capacity_slack: float = key(
        1.1,
        "room of a message over the target density; what does not fit waits a step",
        Rule(lambda value: value >= 1, "a factor >= 1"),
        used_by=("packed",),
    )
    block: int = key(256, "elements that share one scale", at_least(8), used_by=("int8", "int4"))
    threshold: str = key(
        "sampled", "how the threshold is estimated (lognormal: TAGC's model)", one_of(*THRESHOLDS), used_by=SPARSE
    )
    threshold_sample: int = key(
        32768, "elements drawn per shard by the sampled estimator", at_least(256), used_by=SPARSE
    )
    error_feedback: bool = key(True, "keep what is not sent and add it to the next gradient", used_by=LOSSY)
    residual_dtype: str = key(
        "float32",
        "dtype the residual is stored in (bfloat16: half the memory, rounds)",
        one_of(*DTYPES),
        used_by=LOSSY,
    )
    residual_decay: float = key(
        1.0, "the old residual is scaled by this each step", within(0, 1, "a factor in [0, 1]"), used_by=LOSSY
    )
    warmup_steps: int = key(0, "first steps, sent dense", at_least(0), used_by=LOSSY)
    estimate_unresolved: bool = key(
        False, "use the median of the three cells (LHC) instead of returning values to the sender", used_by=SKETCHES
    )
    dense_fallback: bool = key(
        True, "send a bucket dense when its sketch is overloaded or its message would be larger", used_by=LOSSY
    )
    max_load: float = key(
        0.65,
        "most elements per sketch cell; bf16 cells amplify rounding over 0.65",
        within(0, 0.8, "a load in (0, 0.8]: three hashes peel up to 0.818", open_low=True),
        used_by=SKETCHES,
    )
    retry_steps: int = key(
        50, "a bucket that went dense is tried again after this many steps", at_least(1), used_by=SKETCHES
    )


@dataclass
class WeightsConfig:
    """How parameters travel when FSDP gathers them. delta<b>: differences of b bits to a replica on every rank."""

    name: str = key("full", _NAME, one_of(*WEIGHTS))
    block: int = key(
        256,
        "elements that share one scale",
        Rule(lambda value: value >= 8 and value % 8 == 0, "a multiple of 8"),
        used_by=("int8", *DELTAS),
    )
    rotate: bool = key(
        False, "rotate every block (random-sign Hadamard) before rounding; block is then a power of two", used_by=DELTAS
    )
    replica_dtype: str = key(
        "auto", "dtype of the replica; auto: the one that is gathered", one_of("auto", *DTYPES), used_by=DELTAS
    )
    min_numel: int = key(
        4096,
        "units with fewer elements travel whole",
        at_least(0),
        used_by=tuple(name for name in WEIGHTS if name != "full"),
    )

    @property
    def bits(self) -> int | None:
        """Of an element on the wire, scales apart; None if weights are not quantised in blocks."""
        return int(self.name[-1]) if self.name in ("int8", *DELTAS) else None

    @property
    def keeps_replica(self) -> bool:
        """Whether every rank keeps all weights between the gathers."""
        return self.name in DELTAS

    @property
    def rotate_seed(self) -> int | None:
        """The seed of the rotation's signs, None without one. Any seed will do, as long as all ranks have the same."""
        return 0 if self.rotate else None
