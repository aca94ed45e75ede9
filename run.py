"""Start a run or a sweep: compose the configuration, validate it, start the ranks, print the final table.

    python run.py compressor=tagc2 bandwidth=10gbps
    python run.py -m compressor=fsdp,tagc2 bandwidth=1gbps,10gbps

Every key, its default, range and meaning: ``python run.py --help``. Every option of a group: conf/<group>/.
"""

import sys

from tagc.cli.__main__ import start

if __name__ == "__main__":
    sys.exit(start())
