"""Start a run or a sweep: compose the configuration, validate it, start the ranks, print the final table.

    python run.py compressor=tagc2 bandwidth=10gbps
    python run.py -m compressor=fsdp,tagc2 bandwidth=1gbps,10gbps

Every key, its default and its legal range: tagc/config.py. Every option of a group: conf/<group>/.
"""

import sys

import hydra
from omegaconf import DictConfig

from tagc.cli import entry as cli
from tagc.cli.sweeper import register_sweeper


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    """One run; Hydra calls this once per job."""
    cli.launch_job(cli.to_config(composed))


if __name__ == "__main__":
    cli.register_schema()
    register_sweeper()
    sys.exit(cli.run(main))
