"""The helper itself: results in order, and failures that are heard at once."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, offset: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("the planted fault")
    dist.barrier()


def _die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _sleep(rank: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_come_in_rank_order(ranks: int) -> None:
    results = run_ranks(_sum_of_ranks, ranks, 10)
    assert [rank for rank, _ in results] == list(range(ranks))
    assert all(total.item() == sum(range(ranks)) + 10 * ranks for _, total in results)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d failed") as error:
        run_ranks(_fail_on_rank_1, 2)
    assert "the planted fault" in str(error.value) and "_fail_on_rank_1" in str(error.value)


def test_a_dead_rank_is_reported_without_waiting_for_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 died with exit code 7|rank 0 failed"):
        run_ranks(_die_on_rank_1, 2)
    assert time.monotonic() - start_s < 30


def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_ranks(_sleep, 2, timeout_s=1.5)
