"""How much of a capped link the transport uses, and what that alone buys: see README.md beside this file.

    python -m experiments.transport.measure --out experiments/transport/rates.csv

Two ranks in network namespaces (root needed), 50, 200 and 1,000 Mbit/s, all arms in turn within every round.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.rows import make_parser, write_rows
from experiments.transport.worker import run_rank
from tagc.config import BandwidthConfig, CompressorConfig, Config, ModelConfig, NetworkConfig, TrainerConfig
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.launch import launch
from tagc.record.manifest import describe_git

RATES_MBPS = (50.0, 200.0, 1000.0)
COLUMNS = (
    "rate_mbps",
    "what",
    "transport",
    "n",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "payload_mbps",
    "payload_frac",
    "wire_mb",
)


def configure(rate_mbps: float) -> Config:
    """Nano with little to compute, so that communication is nearly all of a step."""
    return Config(
        model=ModelConfig(context=32),
        compressor=CompressorConfig(name="fsdp"),
        bandwidth=BandwidthConfig(f"{rate_mbps:g}mbps", rate_mbps),
        network=NetworkConfig("namespaces", time_dilation=1),
        trainer=TrainerConfig(global_batch=4),
    )


def summarise(rate_mbps: float, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operation and transport; the payload rate is that of the median time."""
    arms = defaultdict(list)
    for row in rows:
        arms[row["what"], row["transport"]].append(row)
    result = []
    for (what, transport), timings in arms.items():
        ms = sorted(1e3 * row["seconds"] for row in timings)
        quantiles = statistics.quantiles(ms, n=5, method="inclusive")
        line: dict[str, Any] = {"rate_mbps": rate_mbps, "what": what, "transport": transport, "n": len(ms)}
        line |= {"median_ms": statistics.median(ms), "p20_ms": quantiles[0], "p80_ms": quantiles[-1]}
        if timings[0]["payload_bytes"]:
            line["payload_mbps"] = timings[0]["payload_bytes"] * 8e-3 / line["median_ms"]
            line["payload_frac"] = line["payload_mbps"] / rate_mbps
        line["wire_mb"] = statistics.median(row["wire_bytes"] for row in timings) / 1e6
        result.append({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in line.items()})
    return result


def measure_rates() -> Iterator[dict[str, Any]]:
    """The rows of each link rate in turn."""
    for rate_mbps in RATES_MBPS:
        with tempfile.TemporaryDirectory() as folder:
            yield from summarise(rate_mbps, launch(configure(rate_mbps), Path(folder), run_rank)["rows"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="CSV file; default: standard output")
    out = parser.parse_args().out
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_rows(out, measure_rates(), COLUMNS)
    logging.info("measured at commit %s", describe_git()["git_commit"])


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
