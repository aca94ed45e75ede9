"""What of the machine and its environment would break a run, found before data and ranks."""

from __future__ import annotations

from collections.abc import Mapping

from tagc.errors import UserError


def refuse_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse a launcher that torchrun started: each of its copies would train a whole run.

    The ranks that a launcher starts have these variables, too, but never call this.
    """
    if {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= environment.keys():
        ranks = environment["WORLD_SIZE"]
        raise UserError(
            f"TORCHELASTIC_RUN_ID={environment['TORCHELASTIC_RUN_ID']}: torchrun started this launcher, and each of "
            f"its {ranks} copies would be a whole run; run.py starts its own ranks: "
            f"python run.py cluster.ranks={ranks} ..."
        )
