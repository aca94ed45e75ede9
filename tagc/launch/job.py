"""What one run needs, in one object that the launcher's functions and the ranks take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tagc.config import Config
from tagc.launch.nodes import Nodes
from tagc.launch.rank_server import changed_environment

Worker = Callable[[Config, Any, str], None]  # (config, data, run folder), runs in every rank


@dataclass(frozen=True)
class Job:
    """One run on one machine; what is found out on the way is added with :meth:`with_`.

    config: as validated; ``network.name`` is resolved before the ranks start.
    run_dir: absolute.
    worker: a module-level function; None: :func:`tagc.train.worker.run_worker`.
    nodes: this launcher among those of the run.
    report_dir: where ranks write their errors; empty until the folder exists.
    data: what :func:`tagc.data.prepare` returned.
    network: environment variables that the ranks need to enter their network.
    device: ``cpu`` or ``cuda``, once it is found out.
    environment: what ranks set, or remove (None), when the process that forked them has another environment.
    """

    config: Config
    run_dir: Path
    worker: Worker | None = None
    nodes: Nodes = field(default_factory=Nodes)
    report_dir: str = ""
    data: Any = None
    network: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    environment: dict[str, str | None] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Job:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def for_ranks(self) -> Job:
        """The copy that is pickled for the ranks: without the connection to the other nodes' launchers."""
        return replace(self, nodes=replace(self.nodes, store=None), environment=changed_environment())
