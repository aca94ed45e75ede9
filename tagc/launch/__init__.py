"""Start the ranks of a run, wait for them, and end them: one call, :func:`launch`.

launcher    launch(): the order in which a run happens
job         what one run needs, in one object
nodes       the launchers of a run on several machines
folder      the run folder, claimed before and read after
agent       ranks started and awaited through torch elastic
interrupts  signals that reach the launcher
rank        the first code of a rank process
rank_server the process that ranks on a CPU are forked from
attempts    what a restarted rank knows of the attempts before
failures    which of several failures is the cause
"""

from tagc.launch.agent import shield_resource_tracker
from tagc.launch.failures import RankFailure
from tagc.launch.folder import FolderInUse
from tagc.launch.interrupts import REQUEUE_EXIT_CODE, RunInterrupted, handle_signals
from tagc.launch.job import Job, Worker
from tagc.launch.launcher import launch
from tagc.launch.rank_server import stop_server

__all__ = [
    "REQUEUE_EXIT_CODE",
    "FolderInUse",
    "Job",
    "RankFailure",
    "RunInterrupted",
    "Worker",
    "handle_signals",
    "launch",
    "shield_resource_tracker",
    "stop_server",
]
