"""Keep what the report needs of a run, in kilobytes: rows that can be committed in place of raw logs.

    python -m analysis.keep outputs/2026-12-01 --out experiments/loss/rows

writes ``<name>.csv`` (thinned rows) and ``<name>.json`` (configuration, commit, versions, machine, headline numbers)
for every run folder below. The same run kept twice gives the same bytes; a later run with equal settings replaces it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from analysis.records.identity import identify_run
from analysis.records.load import Run, load_recorded
from tagc.host.files import write_text_atomic
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.record.manifest import NUMBER_KEYS

MANIFEST_KEYS = (*NUMBER_KEYS, "network", "backend")
DATA_KEYS = ("fingerprint", "vocab_size", "train_tokens", "val_tokens")


def name_run(run: Run) -> str:
    """Arm, model, ranks, seed and eight digits of the whole configuration."""
    digest = hashlib.sha256(json.dumps(identify_run(run), sort_keys=True).encode()).hexdigest()[:8]
    arm = run.arm.replace(" ", "-").replace("=", "").replace("*", "").replace("|", "+").replace("/", "")
    config = run.config
    return f"{arm}-{config['model.name']}-r{config['cluster.ranks']}-seed{config['seed']}-{digest}"


def keep_run(run: Run, out_dir: Path) -> Path:
    """Write the run's two files; returns the ``.json``. Errors: ``UserError`` when the folder cannot be written."""
    manifest: dict[str, Any] = {key: run.manifest.get(key) for key in MANIFEST_KEYS if key in run.manifest}
    manifest["arm"] = run.arm
    data = run.manifest.get("data", {})
    manifest["data"] = {key: data[key] for key in DATA_KEYS if key in data}
    config = run.config | {"data.path": run.config.get("data.path") and Path(run.config["data.path"]).name}
    kept = {"kind": "run", "config": config, "manifest": manifest, "summary": run.summary}
    path = out_dir / f"{name_run(run)}.json"
    rows = run.rows.to_csv(index=False, float_format="%.7g", lineterminator="\n")
    write_text_atomic(path.with_suffix(".csv"), rows)
    write_text_atomic(path, json.dumps(kept, indent=1) + "\n")
    return path


def main() -> None:
    """Keep every finished run; say which were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders above them")
    parser.add_argument("--out", type=Path, required=True, help="where the rows go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for run in load_recorded(options.folders).runs:
        if run.is_done:
            sys.stdout.write(f"{keep_run(run, options.out)}\n")
        else:
            sys.stdout.write(f"not kept: {run.name} ({run.summary.get('status')} after step {run.steps})\n")


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
