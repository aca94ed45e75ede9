"""Make sure that the configured tokens exist and are sound, before the ranks start."""

from __future__ import annotations

import shlex
from pathlib import Path

from tagc.config import DataConfig
from tagc.data.bins import check_bins, find_token_files
from tagc.data.cache import find_cache_root
from tagc.data.corpora import CORPORA
from tagc.data.info import DataInfo
from tagc.data.pystdlib import prepare_pystdlib
from tagc.errors import UserError


def prepare(config: DataConfig) -> DataInfo:
    """Build the cache (``pystdlib``) or check the files (the rest); called once, in one process.

    Errors: ``UserError`` naming the key or file and the remedy.
    """
    if config.name == "pystdlib":
        return prepare_pystdlib(config)
    if config.name != "bin" and config.name not in CORPORA:
        legal = ", ".join(["pystdlib", *CORPORA, "bin"])
        raise UserError(f"data.name={config.name} is unknown; legal: {legal}")
    if config.name == "bin" and not config.path:
        raise UserError(
            "data.path is not set; data=bin needs data.path=FOLDER with train.bin and val.bin, or token shards"
        )
    path = Path(config.path).expanduser().absolute() if config.path else find_cache_root() / config.name
    if config.name == "bin" and not path.is_dir() and not any(find_token_files(path)):
        raise UserError(f"data.path={config.path} is neither a folder nor the prefix of token files; correct data.path")
    if config.name in CORPORA and not any(find_token_files(path)):
        option = f" --path {shlex.quote(str(path))}" if config.path else ""
        raise UserError(
            f"data.name={config.name}: no token files in {path}; make them once with: "
            f"python -m tagc.data.prepare {config.name}{option}"
        )
    return check_bins(config.name, path, config.vocab_size)
