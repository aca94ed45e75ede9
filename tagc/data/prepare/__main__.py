"""``python -m tagc.data.prepare NAME``: make the token files of a known corpus once."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from tagc.data.cache import find_cache_root
from tagc.data.corpora import CORPORA
from tagc.data.write_bins import write_corpus
from tagc.errors import UserError
from tagc.host.pipe import closed_pipe_ends_quietly

DEFAULT_VAL_FRAC = 0.005


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse exits with 2 and a usage line if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tagc.data.prepare", description=__doc__)
    parser.add_argument("name", choices=list(CORPORA), help="; ".join(f"{n}: {c.origin}" for n, c in CORPORA.items()))
    parser.add_argument("--path", type=Path, help="folder for train.bin and val.bin (default: the user's cache)")
    parser.add_argument(
        "--source", type=Path, nargs="+", default=[], help="local text or JSON-lines files, not the hub"
    )
    parser.add_argument("--max-tokens", type=int, help="stop at the first document that reaches this many tokens")
    parser.add_argument(
        "--val-frac", type=float, default=DEFAULT_VAL_FRAC, help="share of documents for validation (GPT-2 corpora)"
    )
    options = parser.parse_args(arguments)
    if options.max_tokens is not None and options.max_tokens < 1:
        parser.error(f"--max-tokens {options.max_tokens} is out of range; legal: an integer >= 1")
    if not 0 < options.val_frac < 1:
        parser.error(f"--val-frac {options.val_frac} is out of range; legal: a share in (0, 1)")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 after a message on stderr, or 130 if interrupted."""
    console = Console(stderr=True, soft_wrap=True)
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])
    options = parse_arguments(arguments)
    out = (options.path or find_cache_root() / options.name).expanduser().absolute()
    try:
        facts = write_corpus(options.name, out, options.source, options.max_tokens, options.val_frac)
    except UserError as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing was kept")
        return 130
    path = f" data.path={out}" if options.path else ""
    tokens = facts["tokens"]
    console.print(f"{tokens['train']:,} training and {tokens['val']:,} validation tokens in {out}", highlight=False)
    console.print(f"train with: python run.py data={options.name}{path}", markup=False, highlight=False)
    if options.name == "shakespeare_char":
        console.print(f"its vocabulary: data.vocab_size={facts['vocab_size']}", highlight=False)
    return 0


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
