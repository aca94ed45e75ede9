"""Part 3: every operation against its byte floor, the bytes that must move over the measured copy bandwidth."""

from __future__ import annotations

import sys

from experiments.gpu_check.rows import Part, load_kernels, run_part
from experiments.kernels.arms import FULL_SIZE, make_arms, measure_rounds, summarise_arms
from tagc.host.pipe import closed_pipe_ends_quietly

EMBEDDING = 50304 * 768  # values: GPT-2's largest bucket
DENSITIES, RATIOS = (0.2,), (2.0, 3.0)
TARGETS = {"encode": 2.0, "decode": 6.0}  # times the floor
METRICS = {"launch_ms": "ms", "gb_per_s": "GB/s", "times_floor": "x"}


def measure(part: Part) -> bool:
    """Rows: time, launch time, GB/s of values and multiple of the floor for every arm."""
    sizes, ratios, rounds = ((3000,), (2.0,), 1) if part.is_cpu else ((FULL_SIZE, EMBEDDING), RATIOS, 101)
    arms = list(make_arms([("triton", load_kernels())], part.device, sizes, DENSITIES, ratios))
    measure_rounds(arms, range(rounds), part.deadline_s)
    for row in summarise_arms(arms):
        setting = {key: row[key] for key in ("numel", "density", "ratio", "ranks", "floor_bytes")}
        spread = row["p20_ms"], row["p80_ms"], row["n"]
        part.add_row(row["op"], setting, "time", "ms", row["median_ms"], spread)
        for metric, unit in METRICS.items():
            if row[metric] is not None:
                part.add_row(row["op"], setting, metric, unit, row[metric], (None, None, row["n"]))
        if row["op"] in TARGETS and not part.is_cpu:
            met = "within" if row["times_floor"] <= TARGETS[row["op"]] else "OVER"
            sys.stdout.write(
                f"{row['op']} {row['numel']:,} ratio {row['ratio']:g}: {row['times_floor']:.2f} times its floor, "
                f"{met} the target of {TARGETS[row['op']]:g}\n"
            )
    return True


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        run_part("speed", measure)
