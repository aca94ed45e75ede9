"""What can only be known on a GPU, in one command of under 6 minutes. See README.md beside this file.

    python -m experiments.gpu_check [--device cuda|cpu] [--out folder] [--parts contract,speed] [--commit hash]

Every part is a process of its own with a time budget, and writes its rows to rows.csv in the folder at once: one that
fails or hangs does not stop the next. Ends with one line per part; the exit status is 1 if any failed. ``--device cpu``
runs the same code on tiny sizes in Triton's interpreter, to prove the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments.gpu_check.rows import ROOT
from tagc.host.pipe import closed_pipe_ends_quietly

BUDGETS_S = {"contract": 120, "syncs": 45, "speed": 65, "steps": 110}  # by part; together under 6 minutes
GRACE_S = 15  # a part keeps its own deadline this long before its end


def run_part(name: str, options: argparse.Namespace) -> str:
    """Run one part; returns ``ok``, or how it failed. Its output goes to the terminal and to <part>.log."""
    command = [sys.executable, "-m", f"experiments.gpu_check.{name}", "--device", options.device]
    command += ["--out", str(options.out), "--budget-s", str(BUDGETS_S[name] - GRACE_S)]
    command += ["--commit", options.commit] if options.commit else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with (options.out / f"{name}.log").open("w") as log:
        # In a session of its own, so that at the end of its time its children end too.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(BUDGETS_S[name])
            result = "ok" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result = f"stopped after its {BUDGETS_S[name]} s"
    sys.stdout.write((options.out / f"{name}.log").read_text()[-3000:])
    sys.stdout.flush()
    return result


def main() -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), default=Path("outputs/gpu_check").resolve())
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(BUDGETS_S))
    parser.add_argument("--commit", help="recorded in the rows where the checkout has no git history")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(BUDGETS_S):
        parser.error(f"--parts={','.join(sorted(unknown))} is unknown; choose from {','.join(BUDGETS_S)}")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU; --device cpu runs the same code on tiny sizes")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.csv").unlink(missing_ok=True)
    results = {}
    for name in options.parts:
        begin_s = time.monotonic()
        sys.stdout.write(f"== {name}\n")
        result = run_part(name, options)
        results[name] = f"{result} ({time.monotonic() - begin_s:.0f} s)"
    sys.stdout.write("".join(f"{name:<9} {result}\n" for name, result in results.items()))
    sys.stdout.write(f"rows in {options.out / 'rows.csv'}\n")
    return 0 if all(result.startswith("ok") for result in results.values()) else 1


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
