"""The schema: every key with its default, meaning, legal values, what it affects and which methods use it.

The sections ``compressor`` and ``weights`` lie in :mod:`tagc.config.methods`. To add a key, add one line here or there.
Validation, a sweep point's identity, the resume check, the analysis and ``run.py --help`` read the line
(:mod:`tagc.config.lookup`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tagc.config.keys import Rule, at_least, key, one_of, or_null, within
from tagc.config.methods import DTYPES, CompressorConfig, WeightsConfig

KERNELS = ("auto", "reference", "cpu", "triton")
CLUSTERS = ("local", "slurm")
NETWORKS = ("paced", "namespaces", "auto", "real")
RESUME = ("auto", "must", "never")
REFERENCE_GPUS = ("rtx3080", "a100", "h100")

_NAME = "the option's name"
_EVERY = " (0: never)"


def _is_dilation(value: float | str) -> bool:
    return value == "auto" if isinstance(value, str) else 1 <= value <= 1e6


@dataclass
class ModelConfig:
    """A GPT-2 shaped decoder."""

    name: str = key("nano", _NAME)
    layers: int = key(4, "transformer blocks", at_least(1))
    width: int = key(192, "embedding width, a multiple of heads", at_least(1))
    heads: int = key(6, "attention heads", at_least(1))
    context: int = key(128, "tokens per sequence", at_least(1))
    bias: bool = key(True, "biases in linear and norm layers, as GPT-2 has them (the papers' runs do not)")
    tie_weights: bool = key(False, "share the token embedding with the LM head (the papers' runs do not)")
    dropout: float = key(0.0, "dropout", within(0, 1, "a probability in [0, 1)", open_high=True))


@dataclass
class DataConfig:
    """Where tokens come from."""

    name: str = key("pystdlib", _NAME, resume="free")
    path: str | None = key(
        None, "folder or file prefix of prepared .bin files; null: the user's cache directory", resume="free"
    )
    vocab_size: int = key(
        4096, "token ids lie in [0, vocab_size)", within(2, 65536, "an integer in [2, 65536] (tokens are uint16)")
    )
    val_sequences: int = key(64, "fixed validation sequences, the same for every run", at_least(64), resume="logged")


@dataclass
class BandwidthConfig:
    """The cap on every rank's link, per direction."""

    name: str = key("unlimited", _NAME, affects="time")
    rate_mbps: float | None = key(
        None,
        "Mbit/s (10^6 bit/s) in each direction",
        or_null(within(1e-3, 1e7, "a rate in [0.001, 10^7] Mbit/s"), " for no cap"),
        affects="time",
    )

    @property
    def label(self) -> str:
        """The name; the rate where one was set without an option of the group."""
        return self.name if self.rate_mbps is None or self.name != "unlimited" else f"{self.rate_mbps:g}mbps"


@dataclass
class NetworkConfig:
    """How the cap is enforced: paced in process; namespaces, a capped interface per rank; auto; real, not by us."""

    name: str = key("paced", _NAME, one_of(*NETWORKS), affects="time")
    latency_ms: float = key(
        0.0,
        "one-way delay added to every exchange",
        within(0, 60_000, "milliseconds in [0, 60000]"),
        affects="time",
        used_by=("paced", "auto"),
    )
    time_dilation: int | float | str = key(
        "auto",
        "the link rate is divided by this and the latency multiplied. auto: how much slower a step computes here than "
        "on reference_gpu, measured in the first steps; 1 on CUDA and where nothing is capped",
        Rule(_is_dilation, "auto, or a factor in [1, 10^6]"),
        affects="time",
    )
    reference_gpu: str = key(
        "rtx3080", "what time_dilation=auto compares with", one_of(*REFERENCE_GPUS), affects="time"
    )


@dataclass
class ClusterConfig:
    """Where the ranks run. `cluster=slurm` submits the points of a sweep as one array (slurm/README.md)."""

    name: str = key("local", _NAME, one_of(*CLUSTERS), affects="nothing")
    ranks: int = key(2, "FSDP ranks of a run on all its nodes, a multiple of nodes", at_least(1), resume="free")
    nodes: int = key(
        1,
        "machines of a run; more than one: started by srun, one launcher a node",
        at_least(1),
        affects="time",
        resume="free",
    )
    device: str = key("auto", "where the ranks compute", one_of("auto", "cpu", "cuda"), resume="free")
    threads_per_rank: int | None = key(
        None,
        "CPU threads of torch in each rank; null: cores / ranks, at least 1",
        or_null(within(1, 1024, "an integer in [1, 1024]")),
        affects="time",
        resume="free",
    )
    timeout_s: float = key(
        300.0,
        "a collective that takes longer than this fails the attempt",
        within(1, 1e6, "seconds in [1, 10^6]"),
        affects="nothing",
    )
    max_restarts: int = key(
        3,
        "failed ranks are all started again this often, from the newest checkpoint",
        at_least(0),
        affects="nothing",
    )
    grace_s: float = key(
        25.0,
        "after SIGTERM or SIGUSR1 the ranks have this long to save and end",
        within(0.1, 1e6, "seconds in [0.1, 10^6]"),
        affects="nothing",
    )
    partition: str | None = key(None, "sbatch --partition; null: the cluster's default", affects="nothing")
    account: str | None = key(None, "sbatch --account", affects="nothing")
    constraint: str | None = key(None, "sbatch --constraint: features that the nodes must have", affects="nothing")
    time: int = key(
        60,
        "sbatch --time in minutes; a run that is not finished by then goes back into the queue",
        at_least(2),
        affects="nothing",
        used_by=("slurm",),
    )
    gpus_per_node: int | None = key(
        None,
        "sbatch --gpus-per-node; null: ranks / nodes, or none where ranks use the CPU",
        or_null(at_least(1)),
        affects="nothing",
    )
    cpus_per_task: int | None = key(
        None,
        "sbatch --cpus-per-task, for all ranks of a node; null: threads_per_rank each",
        or_null(at_least(1)),
        affects="nothing",
    )
    array_parallelism: int = key(256, "points of a sweep that run at the same time", at_least(1), affects="nothing")
    setup: list[str] = key(  # noqa: RUF009
        [], "shell lines before the run: module load, source .venv/bin/activate", affects="nothing", used_by=("slurm",)
    )
    container: str | None = key(
        None, "a command in front of python: apptainer exec --nv tagc.sif", affects="nothing", used_by=("slurm",)
    )
    max_requeues: int = key(
        20,
        "a run that is preempted or out of time goes back into the queue this often",
        at_least(0),
        affects="nothing",
        used_by=("slurm",),
    )

    @property
    def ranks_per_node(self) -> int:
        """Ranks that run on one machine."""
        return self.ranks // self.nodes


@dataclass
class TrainerConfig:
    """Optimisation and the training loop."""

    max_steps: int = key(100, "optimizer steps", at_least(1), resume="logged")
    global_batch: int = key(
        24, "sequences per optimizer step over all ranks; a multiple of ranks * micro_batch", at_least(1)
    )
    micro_batch: int | None = key(
        None, "sequences per rank and forward pass; null: global_batch / ranks", or_null(at_least(1)), affects="time"
    )
    learning_rate: float = key(
        2e-3,
        "AdamW's peak; tuned on nano, large models need less (GPT-2 124M: 6e-4)",
        Rule(lambda value: value > 0, "a number > 0"),
    )
    min_learning_rate_frac: float = key(
        0.1, "the cosine ends at this share of the peak", within(0, 1, "a share in [0, 1]")
    )
    warmup_steps: int = key(20, "steps of linear learning-rate warm-up", at_least(0))
    weight_decay: float = key(0.1, "on matrices only", Rule(lambda value: value >= 0, "a number >= 0"))
    beta1: float = key(0.9, "AdamW's", within(0, 1, "a factor in [0, 1)", open_high=True))
    beta2: float = key(0.95, "AdamW's", within(0, 1, "a factor in [0, 1)", open_high=True))
    grad_clip: float = key(
        1.0, "largest global gradient norm", Rule(lambda value: value >= 0, "a norm > 0, or 0 for no clipping")
    )
    param_dtype: str = key("float32", "dtype of parameters in forward, backward and all-gather", one_of(*DTYPES))
    reshard_after_forward: bool = key(True, "free gathered parameters between forward and backward", affects="time")
    activation_checkpointing: bool = key(False, "recompute each block's activations in backward", affects="time")
    overlap: bool = key(
        True, "on the CPU, exchange gradients in a thread while backward goes on (CUDA always overlaps)", affects="time"
    )
    compile: bool = key(False, "torch.compile every block", affects="time")
    checkpoint_every: int = key(
        500,
        "steps between checkpoints; a longer run saves at its end, too",
        at_least(0, " (0: only when a signal ends the run)"),
        affects="nothing",
    )
    keep_checkpoints: int = key(2, "newest complete checkpoints that are kept", at_least(1), affects="nothing")
    resume: str = key(
        "auto",
        "auto: continue the folder's newest checkpoint, if its run is not finished; must: fail without one; never",
        one_of(*RESUME),
        affects="nothing",
    )
    eval_every: int = key(
        50, "steps between validations; there is always one at the end", at_least(1), affects="record", resume="logged"
    )
    timing_warmup_steps: int = key(
        5, "first steps, also after a restart, left out of iteration times", at_least(0), affects="record"
    )
    profile: bool = key(
        False,
        "trace the three steps after timing_warmup_steps on every rank, to profile/rank<r>.json.gz in the run folder",
        affects="record",
    )


@dataclass
class LoggingConfig:
    """What is recorded beside metrics.jsonl."""

    wandb: str = key(
        "auto",
        "W&B mode; auto: WANDB_MODE, else online if WANDB_API_KEY is set, else offline",
        one_of("auto", "online", "offline", "disabled"),
        affects="nothing",
    )
    wandb_project: str = key("tagc", "W&B project", affects="nothing")
    wandb_group: str | None = key(None, "W&B group; null: the experiment's name", affects="nothing")
    wandb_tags: list[str] = key([], "W&B tags", affects="nothing")  # noqa: RUF009
    fidelity_every: int = key(
        0,
        "steps between comparisons of the decoded gradient with the dense mean",
        at_least(0, _EVERY),
        affects="nothing",
    )
    histograms_every: int = key(
        50, "steps between every layer's numbers in layers.jsonl and W&B", at_least(0, _EVERY), affects="nothing"
    )
    console_every: int = key(
        10, "steps between lines when the output is not a terminal", at_least(1), affects="nothing"
    )


@dataclass
class SweepConfig:
    """How `run.py -m` runs its points."""

    retries: int = key(
        1, "failed points are tried again this often in one command; bad input is not", at_least(0), affects="nothing"
    )
    fail_fast: bool = key(
        False, "end at the first failed point; of a SLURM array, cancel the tasks that wait", affects="nothing"
    )
    only: int | None = key(
        None,
        "run this point alone, 0-based in the complete list, in the folder it has in the sweep",
        or_null(at_least(0), " for all points"),
        affects="nothing",
    )
    mixed_code: bool = key(
        False, "go on although points in the folder were computed with other code", affects="nothing"
    )


@dataclass
class Config:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    compressor: CompressorConfig = field(default_factory=CompressorConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    bandwidth: BandwidthConfig = field(default_factory=BandwidthConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    experiment: str = key(
        "default",
        "groups runs; on the command line experiment=NAME takes conf/experiment/NAME.yaml",
        affects="nothing",
    )
    kernels: str = key(
        "auto",
        "codec backend: auto (the fastest that runs here), reference, cpu (numba), triton (CUDA)",
        one_of(*KERNELS),
        affects="time",
    )
    seed: int = key(
        0, "initial weights, data order, hashes", Rule(lambda value: 0 <= value < 2**32, "an integer in [0, 2^32)")
    )

    @property
    def micro_batch(self) -> int:
        """Sequences per rank and forward pass."""
        return self.trainer.micro_batch or max(1, self.trainer.global_batch // self.cluster.ranks)

    @property
    def accumulation(self) -> int:
        """Forward passes per rank and optimizer step."""
        return self.trainer.global_batch // (self.cluster.ranks * self.micro_batch)
