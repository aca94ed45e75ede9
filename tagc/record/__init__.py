"""The record of a run: its folder, its console, its mirror in W&B. Only rank 0 writes."""

from tagc.host.files import prepare_run_dir
from tagc.record.console import close_logging, get_console, setup_logging
from tagc.record.manifest import build_manifest, write_config, write_manifest
from tagc.record.recorder import NullRecorder, Recorder
from tagc.record.rows import load_rows
from tagc.record.summary import load_summary, summarise
from tagc.record.table import final_table, print_table, sweep_table

__all__ = [
    "NullRecorder",
    "Recorder",
    "build_manifest",
    "close_logging",
    "final_table",
    "get_console",
    "load_rows",
    "load_summary",
    "prepare_run_dir",
    "print_table",
    "setup_logging",
    "summarise",
    "sweep_table",
    "write_config",
    "write_manifest",
]
