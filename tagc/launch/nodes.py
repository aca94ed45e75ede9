"""One run on several machines: one launcher a node, started by ``srun``, which meet at a store on the first node.

The first node's launcher claims the run folder, prepares the data and records how the run ended; the others learn from
the store where that folder is, and that it is ready. The folder must be on a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tagc.config import ClusterConfig
from tagc.errors import UserError

_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
_MEETING_S = 600.0  # the first node may have to make the data
_LEAVING_S = 10.0


@dataclass(frozen=True)
class Nodes:
    """This launcher among those of its run."""

    count: int = 1
    index: int = 0
    endpoint: str = "127.0.0.1:0"  # of the store; port 0: a free one, so that runs at the same time never meet
    store: Any = None  # torch.distributed.TCPStore; None on a single node

    def announce(self, **facts: str) -> None:
        """On the first node: tell the others ``run_dir`` and ``report_dir``, or the ``error`` that stops the run."""
        if self.store is not None:
            self.store.set("start", json.dumps(facts))

    def wait_for_start(self) -> dict[str, str]:
        """On the other nodes: what the first one announced. Errors: ``UserError`` if it could not start."""
        try:
            facts: dict[str, str] = json.loads(self.store.get("start"))
        except RuntimeError as lost:  # torch's timeouts and lost connections
            raise UserError(f"the first node's launcher ({self.endpoint}) does not answer; see its log") from lost
        if "error" in facts:
            raise UserError(f"the first node could not start the run: {facts['error']}")
        if not Path(facts["report_dir"]).is_dir():
            raise UserError(
                f"node {self.index} does not see the run folder {facts['run_dir']}; with cluster.nodes={self.count} "
                "it must be on a file system that all nodes share: set hydra.run.dir or hydra.sweep.dir"
            )
        return facts

    @contextlib.contextmanager
    def open_report_folder(self, run_dir: Path) -> Iterator[str]:
        """A folder for what ranks report, which all nodes see. Called on the first node."""
        with tempfile.TemporaryDirectory(
            prefix=".ranks_" if self.count > 1 else "tagc_", dir=run_dir if self.count > 1 else None
        ) as folder:
            yield folder


def first_host(node_list: str) -> str:
    """The first host of what SLURM calls a hostlist.

    >>> first_host("gpu[007-009,12],login1"), first_host("rack[0-1]node[3,5]"), first_host("alone")
    ('gpu007', 'rack0node3', 'alone')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", node_list).split(",")[0]


def derive_port(job_id: str) -> int:
    """The store's port for a job: jobs whose numbers are less than 12,000 apart never share one.

    >>> derive_port("41"), derive_port("12041")
    (20041, 20041)
    """
    return _PORTS[int(job_id) % len(_PORTS)]


@contextlib.contextmanager
def meet_nodes(cluster: ClusterConfig, environment: Mapping[str, str] = os.environ) -> Iterator[Nodes]:
    """Connect the launchers of a run; on a single node there is nothing to do.

    Errors: ``UserError`` when several nodes are asked for and ``srun`` did not start one task for each, or when the
    first node cannot be reached.
    """
    if cluster.nodes == 1:
        yield Nodes()
        return
    nodes = _connect(cluster.nodes, environment)
    try:
        yield nodes
    finally:
        _leave(nodes)


def _connect(count: int, environment: Mapping[str, str]) -> Nodes:
    from torch.distributed import TCPStore

    tasks = environment.get("SLURM_NTASKS", "0") if "SLURM_PROCID" in environment else "0"
    if int(tasks) != count:
        raise UserError(
            f"cluster.nodes={count} needs one launcher on each node, and srun started {tasks}: submit with "
            f"`python run.py -m cluster=slurm cluster.nodes={count} ...` or `sbatch --nodes={count} slurm/train.sbatch`"
        )
    index = int(environment["SLURM_PROCID"])
    host = first_host(environment["SLURM_JOB_NODELIST"])
    port = int(environment.get("MASTER_PORT") or derive_port(environment["SLURM_JOB_ID"]))
    try:
        store = TCPStore(
            host, port, is_master=index == 0, wait_for_workers=False, timeout=timedelta(seconds=_MEETING_S)
        )
    except RuntimeError as error:
        raise UserError(
            f"node {index} cannot {'serve' if index == 0 else 'reach'} the launchers' store at {host}:{port}; set "
            f"MASTER_PORT to a free port that the nodes may use ({str(error).splitlines()[0]})"
        ) from error
    return Nodes(count, index, f"{host}:{port}", store)


def _leave(nodes: Nodes) -> None:
    """The store lives in the first node's launcher, so that one leaves last."""
    with contextlib.suppress(RuntimeError):
        if nodes.index:
            nodes.store.set(f"left_{nodes.index}", "")
        else:
            nodes.store.wait([f"left_{index}" for index in range(1, nodes.count)], timedelta(seconds=_LEAVING_S))
