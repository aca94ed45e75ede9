"""The SLURM that this folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.daemons import Slurm, find_obstacle


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Its own daemons, or the reason why there are none."""
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with Slurm() as started:
        yield started
