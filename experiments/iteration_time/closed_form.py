"""What the arithmetic says before anything runs: bytes per rank and step of every arm, and about how long a step takes.

    python -m experiments.iteration_time.closed_form [--cells PATTERN ...]

prints the bytes that every arm sends and what they allow it to save at most.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from functools import cache

import torch

from experiments.iteration_time.arms import OWN_TRANSPORT, POWERSGD_RANKS
from experiments.iteration_time.plan import Cell, compose_config, load_plan, parse_link, select_cells
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.model.gpt import GPT, flops_per_token, parameter_count
from tagc.network import Link
from tagc.predict.traffic import UnitTraffic, plan_traffic
from tagc.train.parallel import plan_units

ASSUMED_FLOPS_PER_S = 1e11  # of the whole machine: only for the estimate of how long the plan takes
ASSUMED_REFERENCE_FLOPS_PER_S = 1e13  # likewise, of a reference GPU
START_S = 20.0  # likewise, until the ranks of a cell step


def _meta_model(cell: Cell) -> GPT:
    config = compose_config(cell, "fsdp")
    with torch.device("meta"):
        return GPT(config.model, cell.vocab_size or config.data.vocab_size)


def _plan_traffic(cell: Cell, arm: str) -> list[UnitTraffic]:
    return _plan_setting(replace(cell, key=cell.setting, link="uncapped"), arm)


@cache
def _plan_setting(cell: Cell, arm: str) -> list[UnitTraffic]:
    model = _meta_model(cell)
    return plan_traffic(compose_config(cell, arm), plan_units(model), cell.ranks)


def gather_bytes(cell: Cell, arm: str) -> int:
    """Parameter bytes that a rank sends per step in FSDP's all-gathers; of replicas without the first, dense round.

    Forward gathers every unit, backward again the blocks: the head is still gathered, the embedding's gradient needs no
    table, and the root (positions) never leaves memory in between.
    """
    twice = "blocks" if compose_config(cell, arm).trainer.reshard_after_forward else ()
    return sum(
        unit.gather_bytes * (2 if unit.name.startswith(twice) and not unit.is_gathered_once else 1)
        for unit in _plan_traffic(cell, arm)
    )


def sent_bytes(cell: Cell, arm: str) -> int:
    """Bytes that a rank sends per step. Of DDP: a ring all-reduce of all gradients (a bandwidth-optimal one)."""
    if arm in OWN_TRANSPORT:
        return gather_bytes(cell, arm) + sum(unit.gradient_bytes for unit in _plan_traffic(cell, arm))
    if arm == "fsdp_gloo":
        return sent_bytes(cell, "fsdp")
    model = _meta_model(cell)
    numel = parameter_count(model)
    if arm in POWERSGD_RANKS:
        numel = sum(_powersgd_numel(parameter.shape, POWERSGD_RANKS[arm]) for parameter in model.parameters())
    return 2 * 4 * numel * (cell.ranks - 1) // cell.ranks


def _powersgd_numel(shape: torch.Size, rank: int) -> int:
    """Elements that PowerSGD all-reduces for one parameter: P and Q of a matrix, anything else whole."""
    return rank * (shape[0] + math.prod(shape[1:])) if len(shape) > 1 else shape.numel()


def estimate_compute_s(cell: Cell) -> float:
    """A guess at the computation of one step, from its operations."""
    config = compose_config(cell, "fsdp")
    tokens = config.trainer.global_batch * config.model.context
    return tokens * flops_per_token(_meta_model(cell)) / ASSUMED_FLOPS_PER_S


def estimate_step_s(cell: Cell, arm: str) -> float:
    """A guess at one capped step, for the progress bar."""
    compute_s, link = estimate_compute_s(cell), parse_link(cell.link)
    baseline_bytes, nbytes = sent_bytes(cell, "fsdp"), sent_bytes(cell, arm)
    if link.comm_over_compute:
        return compute_s * (1 + link.comm_over_compute * nbytes / baseline_bytes)
    if link.rate_mbps is None:
        return compute_s
    rate = link.rate_mbps * 1e6 / 8
    if link.gpu:
        config = compose_config(cell, "fsdp")
        tokens = cell.reference_tokens or config.trainer.global_batch * config.model.context
        flops = tokens / cell.ranks * flops_per_token(_meta_model(cell))
        rate *= flops / ASSUMED_REFERENCE_FLOPS_PER_S / compute_s
    return compute_s + Link(rate).seconds_for(nbytes)


def estimate_cell_s(cell: Cell) -> float:
    """A guess at the time of a cell."""
    free_steps = cell.warmup_steps + cell.uncapped_steps
    free_s = free_steps * len(cell.arms) * estimate_compute_s(cell)
    capped_s = cell.blocks * cell.block_steps * sum(estimate_step_s(cell, arm) for arm in cell.arms)
    return START_S + free_s + capped_s


def main() -> None:
    """Print bytes and what they allow, one line per cell and arm; cells that differ in their link only come once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=[], help="cell names, * stands for anything")
    options = parser.parse_args()
    seen = set()
    for cell in select_cells(load_plan("namespaces"), options.cells):
        if cell.setting in seen:
            continue
        seen.add(cell.setting)
        gathered, baseline = gather_bytes(cell, "fsdp"), sent_bytes(cell, "fsdp")
        sys.stdout.write(
            f"{cell.setting}: parameters {gathered / 1e6:.2f} MB of {baseline / 1e6:.2f} MB per rank and step\n"
        )
        for arm in cell.arms:
            nbytes = sent_bytes(cell, arm)
            sys.stdout.write(f"  {arm:<11} {nbytes / 1e6:>9.2f} MB  saves {1 - nbytes / baseline:>6.1%} of the bytes\n")


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
