"""The configuration schema: every key, its default, its unit and its legal range, in this one place.

``conf/`` holds differences only. Hydra composes, :func:`from_omegaconf` turns the result into these dataclasses and
validates them; nothing below ``run.py`` sees a ``DictConfig``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from tagc.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMPRESSORS = ("noop", "fsdp", "bf16", "lhc", "tagc", "tagc2", "packed", "int8", "int4")
THRESHOLDS = ("sampled", "exact", "lognormal")
KERNELS = ("auto", "reference", "cpu", "triton")
CLUSTERS = ("local", "slurm")
NETWORKS = ("paced", "namespaces", "auto", "real")
RESUME = ("auto", "must", "never")
DTYPES = ("float32", "bfloat16")
REFERENCE_GPUS = ("rtx3080", "a100", "h100")

# How a run is operated and told about: these keys decide no number of it. The one list of them: a point of a sweep
# keeps its folder, and a run its checkpoints, whatever they are.
OPERATIONAL_KEYS = (
    *("logging.*", "sweep.*", "cluster.*", "experiment"),
    *("trainer.resume", "trainer.checkpoint_every", "trainer.keep_checkpoints"),
)
_NOT_OPERATIONAL = ("cluster.ranks", "cluster.nodes", "cluster.device", "cluster.threads_per_rank")


def is_operational(key: str) -> bool:
    """Whether a dotted key decides no number of a run."""
    return key not in _NOT_OPERATIONAL and any(fnmatch(key, pattern) for pattern in OPERATIONAL_KEYS)


@dataclass
class ModelConfig:
    """A GPT-2 shaped decoder."""

    name: str = "nano"
    layers: int = 4  # transformer blocks, >= 1
    width: int = 192  # embedding width, a multiple of heads
    heads: int = 6  # attention heads, >= 1
    context: int = 128  # tokens per sequence, >= 1
    bias: bool = True  # biases in linear and norm layers, as GPT-2 has them (the papers' runs do not)
    tie_weights: bool = False  # share the token embedding with the LM head (the papers' runs do not)
    dropout: float = 0.0  # probability in [0, 1)


@dataclass
class DataConfig:
    """Where tokens come from."""

    name: str = "pystdlib"
    path: str | None = None  # folder or file prefix of prepared .bin files; None: the user's cache directory
    vocab_size: int = 4096  # ids must lie in [0, vocab_size); at most 65,536 (uint16 files)
    val_sequences: int = 64  # fixed validation sequences, >= 64, the same for every run


@dataclass
class CompressorConfig:
    """What happens to a gradient bucket on its way to the shard's owner. A method ignores keys it does not use."""

    name: str = "tagc2"
    layers: str = "non_attention"  # all | non_attention | name patterns separated by '|', such as '*.mlp.*|lm_head.*'
    min_numel: int = 16384  # parameters with fewer elements stay dense
    sparsity: float = 0.8  # share of each bucket that is not sent, in [0, 1)
    ratio: float = 2.0  # compressed elements per sketch cell, in [0.05, 64]
    adaptive_ratio: bool = True  # instead, let each bucket's ratio follow the measured union up to max_load
    value_dtype: str = "bfloat16"  # dtype of cells, packed values and dense steps on the wire: float32 | bfloat16
    capacity_slack: float = 1.1  # room of a packed message over the target density, >= 1; the rest waits a step
    block: int = 256  # elements that share one scale of int8 and int4, >= 8
    threshold: str = "sampled"  # sampled | exact | lognormal (TAGC's model of the gradient)
    threshold_sample: int = 32768  # elements drawn per shard by the sampled estimator, >= 256
    error_feedback: bool = True  # keep what is not sent and add it to the next gradient
    residual_dtype: str = "float32"  # dtype the residual is stored in: float32 | bfloat16 (half the memory, rounds)
    residual_decay: float = 1.0  # the old residual is scaled by this each step, in [0, 1]
    warmup_steps: int = 0  # first steps sent dense, >= 0
    estimate_unresolved: bool = False  # use the median of the three cells (LHC) instead of returning to the sender
    dense_fallback: bool = True  # send a bucket dense when its sketch is overloaded or its message would be larger
    max_load: float = 0.65  # most elements per sketch cell, in (0, 0.8]: bf16 cells amplify rounding over 0.65
    retry_steps: int = 50  # a bucket that went dense is tried again after this many steps, >= 1


@dataclass
class BandwidthConfig:
    """The cap on every rank's link, per direction."""

    name: str = "unlimited"
    rate_mbps: float | None = None  # Mbit/s (10^6 bit/s) in each direction, in [0.001, 10^7]; None: no cap

    @property
    def label(self) -> str:
        """The name; the rate where one was set without an option of the group."""
        return self.name if self.rate_mbps is None or self.name != "unlimited" else f"{self.rate_mbps:g}mbps"


@dataclass
class NetworkConfig:
    """How the cap is enforced: paced in process; namespaces, a capped interface per rank; auto; real, not by us."""

    name: str = "paced"
    latency_ms: float = 0.0  # one-way delay added to every exchange, in [0, 60000]; paced only
    # The link rate is divided by this and the latency multiplied, in [1, 10^6]. auto: how much slower a step computes
    # here than on reference_gpu, measured in the first steps; 1 on CUDA and where nothing is capped.
    time_dilation: int | float | str = "auto"
    reference_gpu: str = "rtx3080"  # what auto compares with: rtx3080 | a100 | h100 (tagc/network/calibration.py)


@dataclass
class ClusterConfig:
    """Where the ranks run."""

    name: str = "local"  # local: on this machine | slurm: submitted by `run.py -m` as one array (slurm/README.md)
    ranks: int = 2  # FSDP ranks of a run on all its nodes, >= 1, a multiple of nodes
    nodes: int = 1  # machines of a run, >= 1; more than one: started by srun, one launcher a node
    device: str = "auto"  # auto | cpu | cuda
    threads_per_rank: int | None = None  # CPU threads of torch in each rank; None: cores / ranks, at least 1
    timeout_s: float = 300.0  # a collective that takes longer than this fails the attempt, in [1, 10^6]
    max_restarts: int = 3  # failed ranks are all started again this often, from the newest checkpoint, >= 0
    grace_s: float = 25.0  # after SIGTERM or SIGUSR1 the ranks have this long to save and end, in [0.1, 10^6]
    # The rest is for cluster=slurm; hydra.launcher.X=VALUE sets what has no key here.
    partition: str | None = None  # sbatch --partition; None: the cluster's default
    account: str | None = None  # sbatch --account
    constraint: str | None = None  # sbatch --constraint: features that the nodes must have
    time: int = 60  # sbatch --time in minutes, >= 2; a run that is not finished by then goes back into the queue
    gpus_per_node: int | None = None  # sbatch --gpus-per-node; ranks / nodes, or None where ranks use the CPU
    cpus_per_task: int | None = None  # sbatch --cpus-per-task, for all ranks of a node; None: threads_per_rank each
    array_parallelism: int = 256  # points of a sweep that run at the same time, >= 1
    setup: list[str] = field(default_factory=list)  # shell lines before the run: module load, source .venv/bin/activate
    container: str | None = None  # a command in front of python: apptainer exec --nv tagc.sif
    max_requeues: int = 20  # a run that is preempted or out of time goes back into the queue this often, >= 0

    @property
    def ranks_per_node(self) -> int:
        """Ranks that run on one machine."""
        return self.ranks // self.nodes


@dataclass
class TrainerConfig:
    """Optimisation and the training loop."""

    max_steps: int = 100  # optimizer steps, >= 1
    global_batch: int = 24  # sequences per optimizer step over all ranks; a multiple of ranks * micro_batch
    micro_batch: int | None = None  # sequences per rank and forward pass; None: global_batch / ranks
    learning_rate: float = 2e-3  # AdamW peak, > 0; tuned on nano, large models need less (GPT-2 124M: 6e-4)
    min_learning_rate_frac: float = 0.1  # the cosine ends at this share of the peak, in [0, 1]
    warmup_steps: int = 20  # linear learning-rate warm-up, >= 0
    weight_decay: float = 0.1  # on matrices only, >= 0
    beta1: float = 0.9  # in [0, 1)
    beta2: float = 0.95  # in [0, 1)
    grad_clip: float = 1.0  # global gradient norm, > 0; 0 switches clipping off
    param_dtype: str = "float32"  # parameters in forward, backward and all-gather: float32 | bfloat16
    reshard_after_forward: bool = True  # free gathered parameters between forward and backward
    activation_checkpointing: bool = False  # recompute each block's activations in backward
    overlap: bool = True  # on the CPU, exchange gradients in a thread while backward goes on (CUDA always overlaps)
    compile: bool = False  # torch.compile every block
    checkpoint_every: int = 500  # save every so many steps, and at the end of a longer run; 0: on signals only
    keep_checkpoints: int = 2  # complete checkpoints kept, the newest, >= 1
    resume: str = "auto"  # auto: continue the folder's newest checkpoint, if its run is not finished | must | never
    eval_every: int = 50  # validate every so many steps (always at the end), >= 1
    timing_warmup_steps: int = 5  # first steps, also after a restart, left out of iteration times, >= 0
    profile: bool = False  # trace three steps after those on every rank, profile/rank<r>.json.gz in the run folder


@dataclass
class LoggingConfig:
    """What is recorded beside metrics.jsonl."""

    wandb: str = "auto"  # auto (WANDB_MODE, else online if WANDB_API_KEY is set) | online | offline | disabled
    wandb_project: str = "tagc"  # W&B project
    wandb_group: str | None = None  # None: the experiment's name
    wandb_tags: list[str] = field(default_factory=list)  # W&B tags
    fidelity_every: int = 0  # every so many steps compare the decoded gradient with the dense mean; 0: never
    histograms_every: int = 50  # every so many steps layers.jsonl and W&B get every layer's numbers; 0: never
    console_every: int = 10  # steps between lines when the output is not a terminal, >= 1


@dataclass
class SweepConfig:
    """How `run.py -m` goes about its points. No key of this belongs to a point's identity."""

    retries: int = 1  # failed points are tried again this often in one command, >= 0; bad input is not
    fail_fast: bool = False  # end at the first failed point; of a SLURM array, cancel the tasks that wait
    only: int | None = None  # run this point alone, 0-based in the complete list, in the folder it has in the sweep
    mixed_code: bool = False  # go on although points in the folder were computed with other code


@dataclass
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    compressor: CompressorConfig = field(default_factory=CompressorConfig)
    bandwidth: BandwidthConfig = field(default_factory=BandwidthConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    experiment: str = "default"  # groups runs; on the command line experiment=NAME takes conf/experiment/NAME.yaml
    kernels: str = "auto"  # codec backend: auto (the fastest that runs here) | reference | cpu (numba) | triton (CUDA)
    seed: int = 0  # in [0, 2^32); initial weights, data order, hashes

    @property
    def micro_batch(self) -> int:
        """Sequences per rank and forward pass."""
        return self.trainer.micro_batch or max(1, self.trainer.global_batch // self.cluster.ranks)

    @property
    def accumulation(self) -> int:
        """Forward passes per rank and optimizer step."""
        return self.trainer.global_batch // (self.cluster.ranks * self.micro_batch)


def _range_rules(c: Config) -> Iterable[tuple[str, bool, str]]:
    """Yield (key, holds, legal values) for every key that stands alone."""
    m, d, k, b, n = c.model, c.data, c.compressor, c.bandwidth, c.network
    for key in ("layers", "width", "heads", "context"):
        yield f"model.{key}", getattr(m, key) >= 1, "an integer >= 1"
    yield "model.dropout", 0 <= m.dropout < 1, "a probability in [0, 1)"
    yield "data.vocab_size", 1 < d.vocab_size <= 65536, "an integer in [2, 65536] (tokens are uint16)"
    yield "data.val_sequences", d.val_sequences >= 64, "an integer >= 64"
    yield "compressor.name", k.name in COMPRESSORS, "one of " + ", ".join(COMPRESSORS)
    yield "compressor.layers", bool(k.layers.strip()), "all, non_attention, or name patterns separated by '|'"
    yield "compressor.min_numel", k.min_numel >= 1, "an integer >= 1"
    yield "compressor.sparsity", 0 <= k.sparsity < 1, "a share in [0, 1): at 1 nothing would be sent"
    yield "compressor.ratio", 0.05 <= k.ratio <= 64, "a number in [0.05, 64]"
    yield "compressor.value_dtype", k.value_dtype in DTYPES, "one of " + ", ".join(DTYPES)
    yield "compressor.capacity_slack", k.capacity_slack >= 1, "a factor >= 1"
    yield "compressor.block", k.block >= 8, "an integer >= 8"
    yield "compressor.residual_dtype", k.residual_dtype in DTYPES, "one of " + ", ".join(DTYPES)
    yield "compressor.threshold", k.threshold in THRESHOLDS, "one of " + ", ".join(THRESHOLDS)
    yield "compressor.threshold_sample", k.threshold_sample >= 256, "an integer >= 256"
    yield "compressor.residual_decay", 0 <= k.residual_decay <= 1, "a factor in [0, 1]"
    yield "compressor.warmup_steps", k.warmup_steps >= 0, "an integer >= 0"
    yield "compressor.max_load", 0 < k.max_load <= 0.8, "a load in (0, 0.8]: three hashes peel up to 0.818"
    yield "compressor.retry_steps", k.retry_steps >= 1, "an integer >= 1"
    rate_is_legal = b.rate_mbps is None or 1e-3 <= b.rate_mbps <= 1e7
    yield "bandwidth.rate_mbps", rate_is_legal, "a rate in [0.001, 10^7] Mbit/s, or null for no cap"
    yield "network.name", n.name in NETWORKS, "one of " + ", ".join(NETWORKS)
    yield "network.latency_ms", 0 <= n.latency_ms <= 60_000, "milliseconds in [0, 60000]"
    dilation = n.time_dilation
    is_legal = dilation == "auto" if isinstance(dilation, str) else 1 <= dilation <= 1e6
    yield "network.time_dilation", is_legal, "auto, or a factor in [1, 10^6]"
    yield "network.reference_gpu", n.reference_gpu in REFERENCE_GPUS, "one of " + ", ".join(REFERENCE_GPUS)
    yield "cluster.name", c.cluster.name in CLUSTERS, "one of " + ", ".join(CLUSTERS)
    yield "cluster.ranks", c.cluster.ranks >= 1, "an integer >= 1"
    yield "cluster.device", c.cluster.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"
    threads = c.cluster.threads_per_rank
    yield "cluster.threads_per_rank", threads is None or 1 <= threads <= 1024, "an integer in [1, 1024], or null"
    yield "cluster.timeout_s", 1 <= c.cluster.timeout_s <= 1e6, "seconds in [1, 10^6]"
    yield "cluster.max_restarts", c.cluster.max_restarts >= 0, "an integer >= 0"
    for key, least in (("nodes", 1), ("time", 2), ("array_parallelism", 1), ("max_requeues", 0)):
        yield f"cluster.{key}", getattr(c.cluster, key) >= least, f"an integer >= {least}"
    for key in ("gpus_per_node", "cpus_per_task"):
        count = getattr(c.cluster, key)
        yield f"cluster.{key}", count is None or count >= 1, "an integer >= 1, or null"
    yield "cluster.grace_s", 0.1 <= c.cluster.grace_s <= 1e6, "seconds in [0.1, 10^6]"
    t, g = c.trainer, c.logging
    yield "trainer.max_steps", t.max_steps >= 1, "an integer >= 1"
    yield "trainer.global_batch", t.global_batch >= 1, "an integer >= 1"
    yield "trainer.micro_batch", t.micro_batch is None or t.micro_batch >= 1, "an integer >= 1, or null"
    yield "trainer.learning_rate", t.learning_rate > 0, "a number > 0"
    yield "trainer.min_learning_rate_frac", 0 <= t.min_learning_rate_frac <= 1, "a share in [0, 1]"
    yield "trainer.warmup_steps", t.warmup_steps >= 0, "an integer >= 0"
    yield "trainer.weight_decay", t.weight_decay >= 0, "a number >= 0"
    yield "trainer.beta1", 0 <= t.beta1 < 1, "a factor in [0, 1)"
    yield "trainer.beta2", 0 <= t.beta2 < 1, "a factor in [0, 1)"
    yield "trainer.grad_clip", t.grad_clip >= 0, "a norm > 0, or 0 for no clipping"
    yield "trainer.param_dtype", t.param_dtype in DTYPES, "one of " + ", ".join(DTYPES)
    yield "trainer.checkpoint_every", t.checkpoint_every >= 0, "an integer >= 0 (0: only when a signal ends the run)"
    yield "trainer.keep_checkpoints", t.keep_checkpoints >= 1, "an integer >= 1"
    yield "trainer.resume", t.resume in RESUME, "one of " + ", ".join(RESUME)
    yield "trainer.eval_every", t.eval_every >= 1, "an integer >= 1"
    yield "trainer.timing_warmup_steps", t.timing_warmup_steps >= 0, "an integer >= 0"
    yield "logging.wandb", g.wandb in ("auto", "online", "offline", "disabled"), "auto, online, offline or disabled"
    yield "logging.fidelity_every", g.fidelity_every >= 0, "an integer >= 0 (0: never)"
    yield "logging.histograms_every", g.histograms_every >= 0, "an integer >= 0 (0: never)"
    yield "logging.console_every", g.console_every >= 1, "an integer >= 1"
    yield "sweep.retries", c.sweep.retries >= 0, "an integer >= 0"
    yield "sweep.only", c.sweep.only is None or c.sweep.only >= 0, "an integer >= 0, or null for all points"
    yield "kernels", c.kernels in KERNELS, "one of " + ", ".join(KERNELS)
    yield "seed", 0 <= c.seed < 2**32, "an integer in [0, 2^32)"


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


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
    for section in fields(config):
        part = getattr(config, section.name)
        for name, value in vars(part).items() if is_dataclass(part) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{section.name}.{name}={value} is not a finite number")
    for key, holds, legal in _range_rules(config):
        if not holds:
            raise UserError(f"{key}={_lookup(config, key)} is out of range; legal: {legal}")
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
