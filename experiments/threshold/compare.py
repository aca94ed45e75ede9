"""How close does each estimator of the threshold come to its target on real gradients, and what does it cost?

    python -m experiments.threshold.compare [--steps 24] [--out rows.csv]

Nano trains at 2 ranks with exact thresholds, once per sparsity, and rank 0 saves the gradients of its compressed
buckets: embedding (with the zero rows of absent tokens), head and MLPs. Then every estimator replays them, each with
the residual that its own choices leave. The error is the share of a shard that is sent, less the share wanted or, where
fewer values than that are not zero, their share. Rows are long format, one per sparsity, estimator and bucket. Times
are of one core, all estimators interleaved: what an estimator needs before encode, for the whole bucket.

``Independent``, ``Last*`` and ``Calibrated`` are not part of the package, for what came out.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tagc.codec.sparsify import draw_positions, select_values
from tagc.config import Config
from tagc.kernels import cpu
from tagc.launch import launch
from tagc.record.manifest import describe_git, describe_hardware, describe_versions

SPARSITIES = (0.8, 0.95)
SETTLED = 2  # errors count from the third step on
CPU = torch.device("cpu")


class Exact:
    """Every value counts."""

    estimate = staticmethod(cpu.threshold_exact)

    def __init__(self, density: float, name: str) -> None:
        self.density, self.name = density, name

    def choose(self, gradient_WN: Tensor, residual_WN: Tensor, step: int) -> Tensor:
        """[W, 1]; may change nothing."""
        return self.estimate(gradient_WN + residual_WN, self.density)

    def learn(self, x_WN: Tensor, threshold_W1: Tensor, kept_W1: Tensor) -> None:
        """What encode knows afterwards. kept_W1: the share of each shard that was sent."""


class Lognormal(Exact):
    """TAGC's model of the gradient."""

    estimate = staticmethod(cpu.threshold_lognormal)


class Sampled(Exact):
    """One position in each of equal parts: ``compressor.threshold=sampled``."""

    def __init__(self, density: float, name: str, sample: int) -> None:
        super().__init__(density, name)
        self.sample = sample

    def positions(self, numel: int, step: int) -> Tensor:
        return draw_positions(numel, self.sample, crc32(f"{self.name}/{step}".encode()), CPU)

    def choose(self, gradient_WN: Tensor, residual_WN: Tensor, step: int) -> Tensor:
        position_K = self.positions(gradient_WN.shape[1], step)
        return cpu.threshold_exact(cpu.sample_values(gradient_WN, residual_WN, None, position_K, 1.0), self.density)


class Independent(Sampled):
    """Positions drawn independently."""

    def positions(self, numel: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(f"{self.name}/{step}".encode()))
        return torch.randint(numel, (self.sample,), generator=generator)


class Last(Sampled):
    """Last step's threshold, corrected by the share that it kept as if shares fell exponentially with the threshold."""

    threshold_W1: Tensor | None = None

    def choose(self, gradient_WN: Tensor, residual_WN: Tensor, step: int) -> Tensor:
        if self.threshold_W1 is None:
            return super().choose(gradient_WN, residual_WN, step)
        return self.threshold_W1

    def learn(self, x_WN: Tensor, threshold_W1: Tensor, kept_W1: Tensor) -> None:
        self.threshold_W1 = threshold_W1 * np.log(self.density) / kept_W1.clamp(1e-6, 0.999).log()


class LastExact(Last):
    """What last step's threshold should have been: the best that any correction by last step's counts can give."""

    def learn(self, x_WN: Tensor, threshold_W1: Tensor, kept_W1: Tensor) -> None:
        self.threshold_W1 = cpu.threshold_exact(x_WN, self.density)


class LastScaled(Last):
    """:class:`Last`, times the change of a small sample's quantile at the same positions."""

    quantile_W1: Tensor | None = None

    def positions(self, numel: int, step: int) -> Tensor:
        return super().positions(numel, 0)

    def choose(self, gradient_WN: Tensor, residual_WN: Tensor, step: int) -> Tensor:
        quantile_W1, before_W1 = Sampled.choose(self, gradient_WN, residual_WN, step), self.quantile_W1
        self.quantile_W1 = quantile_W1
        if before_W1 is None or self.threshold_W1 is None:
            return quantile_W1
        return torch.where(before_W1 > 0, self.threshold_W1 * quantile_W1 / before_W1, quantile_W1)


class Calibrated(Sampled):
    """A small sample at fixed positions whose target share is corrected by how much it was off in the step before."""

    off_W1: Tensor | float = 0.0

    def positions(self, numel: int, step: int) -> Tensor:
        return super().positions(numel, 0)

    def choose(self, gradient_WN: Tensor, residual_WN: Tensor, step: int) -> Tensor:
        position_K = self.positions(gradient_WN.shape[1], step)
        self.x_WK = cpu.sample_values(gradient_WN, residual_WN, None, position_K, 1.0)
        share_W1 = (self.density + torch.zeros(len(gradient_WN), 1) + self.off_W1).clamp(1e-4, 1.0)
        shards = zip(self.x_WK, share_W1, strict=True)
        return torch.stack([cpu.threshold_exact(x_K, share.item()) for x_K, share in shards])

    def learn(self, x_WN: Tensor, threshold_W1: Tensor, kept_W1: Tensor) -> None:
        self.off_W1 = select_values(self.x_WK, threshold_W1).float().mean(1, keepdim=True) - kept_W1


ESTIMATORS = {
    "exact": Exact,
    "lognormal": Lognormal,
    "independent_65536": partial(Independent, sample=65_536),
    "sampled_65536": partial(Sampled, sample=65_536),
    "sampled_32768": partial(Sampled, sample=32_768),
    "sampled_16384": partial(Sampled, sample=16_384),
    "sampled_4096": partial(Sampled, sample=4096),
    "last_corrected": partial(Last, sample=32_768),
    "last_exact": partial(LastExact, sample=32_768),
    "last_scaled_4096": partial(LastScaled, sample=4096),
    "calibrated_4096": partial(Calibrated, sample=4096),
}


def record_gradients(config: Config, data: object, run_dir: str) -> None:
    """A worker of :func:`tagc.launch.launch`: train, and save rank 0's gradients."""
    from tagc.compressors import COMPRESSORS
    from tagc.compressors.sketch import Sketch
    from tagc.train.worker import run_worker

    class Recording(Sketch):
        def encode(self, gradient_WN: Tensor, step: int):
            if self.spec.rank == 0:
                name = self.spec.name.split("/")[0]
                torch.save(gradient_WN, Path(run_dir) / f"{name}-{step:04d}.pt")
            return super().encode(gradient_WN, step)

    COMPRESSORS["tagc2"] = Recording
    run_worker(config, data, run_dir)


def train(folder: Path, sparsity: float, steps: int) -> None:
    """Leave the gradients of a training run in ``folder``."""
    config = Config()
    config.compressor.sparsity, config.compressor.threshold = sparsity, "exact"
    config.trainer.max_steps = config.trainer.eval_every = steps
    config.trainer.warmup_steps = min(config.trainer.warmup_steps, steps)
    config.logging.wandb = "disabled"
    launch(config, folder, record_gradients)


def replay(files: list[Path], bucket: str, sparsity: float) -> Iterator[dict[str, object]]:
    """One row per estimator."""
    density = 1 - sparsity
    estimators = {name: make(density, bucket) for name, make in ESTIMATORS.items()}
    gradients = [torch.load(file) for file in files]
    residual = {name: torch.zeros_like(gradients[0]) for name in estimators}
    errors, samples_ms = defaultdict(list), defaultdict(list)
    for step, gradient_WN in enumerate(gradients):
        for name, estimator in estimators.items():
            begin_s = time.perf_counter()
            threshold_W1 = estimator.choose(gradient_WN, residual[name], step)
            samples_ms[name].append((time.perf_counter() - begin_s) * 1e3)
            x_WN = gradient_WN + residual[name]
            sent = select_values(x_WN, threshold_W1)
            kept_W1 = sent.float().mean(1, keepdim=True)
            estimator.learn(x_WN, threshold_W1, kept_W1)
            wanted_W1 = (x_WN != 0).float().mean(1, keepdim=True).clamp(max=density)
            errors[name].append(100 * (kept_W1 - wanted_W1).abs().flatten())
            residual[name] = x_WN.masked_fill_(sent, 0.0)
    zeros = torch.stack([(g == 0).float().mean() for g in gradients]).mean().item()
    for name in estimators:
        error = torch.stack(errors[name])
        settled, late = error[SETTLED:], error[-len(error) // 3 :]
        p20, median, p80 = np.percentile(samples_ms[name][1:], (20, 50, 80))
        yield {
            "sparsity": sparsity,
            "bucket": bucket,
            "estimator": name,
            "shard_numel": gradients[0].shape[1],
            "zero_frac": round(zeros, 4),
            "n": settled.numel(),
            "max_error_points": round(settled.max().item(), 3),
            "rms_error_points": round(settled.square().mean().sqrt().item(), 4),
            "late_max_error_points": round(late.max().item(), 3),
            "median_ms": round(median, 4),
            "p20_ms": round(p20, 4),
            "p80_ms": round(p80, 4),
        }


def main() -> None:
    """Train, replay, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps per sparsity")
    parser.add_argument("--out", type=Path, default=Path("outputs/threshold.csv"), help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for sparsity in SPARSITIES:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder), sparsity, options.steps)
            files = sorted(Path(folder).glob("*-*.pt"))
            for bucket in sorted({file.name.split("-")[0] for file in files}):
                rows += replay([f for f in files if f.name.split("-")[0] == bucket], bucket, sparsity)
    about = {
        "commit": describe_git()["git_commit"],
        "torch": describe_versions()["torch"],
        "cpu": describe_hardware()["cpu_model"],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | about for row in rows)
    for name in ESTIMATORS:
        mine = [row for row in rows if row["estimator"] == name]
        worst, cost_ms = max(r["max_error_points"] for r in mine), sum(r["median_ms"] for r in mine) / len(SPARSITIES)
        sys.stdout.write(f"{name:<18} at most {worst:6.2f} points off, {cost_ms:7.2f} ms per step\n")
    sys.stdout.write(f"{len(rows)} rows in {options.out}\n")


if __name__ == "__main__":
    main()
