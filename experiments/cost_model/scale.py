"""What the cost model says beyond this machine: 2 to 1,024 ranks, 100 Mbit/s to 400 Gbit/s, on a reference GPU.

    python -m experiments.cost_model.scale [--message-us 10] [--gpu rtx3080]

All times are modelled. Computation: FLOPs over the GPU's peak at the utilisation of tagc/network/calibration.py.
Encoding and decoding: nanoseconds per element as measured on the CPU, divided by the time dilation of those
measurements, as a run with ``network.time_dilation=auto`` scales them. A rank's batch stays the same. Writes
modelled.csv (milliseconds per iteration, a column per arm) and crossover.csv (the bandwidth up to which an arm beats a
baseline by at least 0.1 %).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.cost_model.measure import load_measured
from experiments.cost_model.validate import measured_codec, measured_compute_ms, nano
from experiments.rows import make_parser, write_rows
from tagc.cli.entry import compose_config
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.network.calibration import reference_compute_s, resolve_dilation
from tagc.predict.answer import find_last
from tagc.predict.cost_model import LinkCost, UnitCost, predict_iteration_ms
from tagc.predict.inputs import CodecTimes, build_workload, make_units

FOLDER = Path(__file__).parent
ARMS = ("noop", "fsdp", "bf16", "tagc", "tagc2", "packed", "int8")
BASELINES = ("fsdp", "bf16")
RANKS = (2, 4, 8, 16, 64, 256, 1024)
RATES_GBPS = (0.1, 0.4, 1, 4, 10, 25, 40, 100, 200, 400)
GPT2 = ("model=gpt2", "model.context=512", "model.bias=false", "trainer.micro_batch=6")
WORKLOADS = {  # the papers' model; their batch of 20 micro-steps gathered once per step, and a single micro-step
    "20_micro_steps": (20, "trainer.reshard_after_forward=false"),
    "1_micro_step": (1, "trainer.reshard_after_forward=true"),
}
VOCAB = 50304
SMALLEST_GAIN = 1e-3


class Scenario:
    """One workload at one number of ranks and one dtype of the parameters: iteration time by arm and bandwidth."""

    def __init__(self, workload: str, ranks: int, param_dtype: str, gpu: str, message_ms: float) -> None:
        self.micro_steps, self._reshard = WORKLOADS[workload]
        self._ranks, self._param_dtype, self._gpu, self._message_ms = ranks, param_dtype, gpu, message_ms
        self.units = cache(self._make_units)
        self.iteration_ms = cache(self._predict)

    def _make_units(self, arm: str) -> list[UnitCost]:
        batch = 6 * self._ranks * self.micro_steps
        config = compose_config(
            [
                *GPT2,
                f"compressor={arm}",
                f"cluster.ranks={self._ranks}",
                f"trainer.global_batch={batch}",
                f"trainer.param_dtype={self._param_dtype}",
                f"network.reference_gpu={self._gpu}",
                self._reshard,
            ]
        )
        workload = build_workload(config, VOCAB)
        codec, dilation = load_codec(arm, self._gpu)
        compute_ms = reference_compute_s(workload.flops_per_step, config) * 1e3
        return make_units(workload, compute_ms, codec, 1 / dilation)

    def _predict(self, arm: str, rate_gbps: float) -> float:
        link = LinkCost(self._ranks, rate_gbps * 1e9 / 8, message_ms=self._message_ms)
        keeps_gathered = self._reshard.endswith("false")
        return predict_iteration_ms(
            self.units(arm), link, micro_steps=self.micro_steps, keeps_gathered=keeps_gathered, prefetch=True
        )

    def crossover_gbps(self, arm: str, baseline: str) -> float | None:
        """The largest bandwidth at which the arm still wins: None if at none, infinite if it wins at the highest."""
        return find_last(
            lambda rate: self.iteration_ms(arm, rate) < (1 - SMALLEST_GAIN) * self.iteration_ms(baseline, rate)
        )


@cache
def load_codec(arm: str, gpu: str) -> tuple[CodecTimes, float]:
    """An arm's measured codec times, and the time dilation of the machine that they were measured on."""
    rows = load_measured()
    workload = nano(arm, 2, "float32")
    network = replace(workload.config.network, reference_gpu=gpu)
    config = replace(workload.config, network=network)
    return measured_codec(rows, arm), resolve_dilation(measured_compute_ms(rows) / 1e3, workload.flops_per_step, config)


def rows_of(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For every scenario its rows of modelled.csv and its row of crossover.csv."""
    for workload in WORKLOADS:
        for param_dtype in ("float32", "bfloat16"):
            for ranks in RANKS:
                scenario = Scenario(workload, ranks, param_dtype, arguments.gpu, arguments.message_us / 1e3)
                settings = {"kind": "modelled", "workload": workload, "param_dtype": param_dtype, "ranks": ranks}
                crossover = {
                    f"{arm}_over_{baseline}_gbps": scenario.crossover_gbps(arm, baseline)
                    for baseline in BASELINES
                    for arm in ARMS
                    if arm != baseline
                }
                times = [
                    settings | {"rate_gbps": rate} | {arm: f"{scenario.iteration_ms(arm, rate):.5g}" for arm in ARMS}
                    for rate in RATES_GBPS
                ]
                yield settings | crossover, times


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--message-us", type=float, default=10.0, help="cost of a message, assumed (default 10)")
    parser.add_argument("--gpu", default="rtx3080", help="reference GPU (default rtx3080)")
    results = list(rows_of(parser.parse_args()))
    tables = {
        "modelled.csv": [row for _, times in results for row in times],
        "crossover.csv": [crossover for crossover, _ in results],
    }
    for name, rows in tables.items():
        write_rows(FOLDER / name, rows)


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
