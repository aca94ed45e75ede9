"""Part 1: the backend's own tests (tests/kernels/test_triton.py), compiled on the GPU, against reference and oracle."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from xml.etree import ElementTree

from experiments.gpu_check.rows import ROOT, Part, run_part
from tagc.host.pipe import closed_pipe_ends_quietly

TINY = "TestBadInput or test_thresholds or damaged"  # the rest takes minutes in the interpreter


def measure(part: Part) -> bool:
    """Run pytest; rows: tests passed, failed and skipped, and one for each that failed."""
    report = part.out / "contract.xml"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += [f"--junitxml={report}", "tests/kernels/test_triton.py"]
    if part.is_cpu:
        command += ["-k", TINY]
    elif importlib.util.find_spec("xdist"):
        # Most of the time goes into compiling a few hundred specialisations.
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"]
    begin_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT)
    if not report.exists():
        sys.stderr.write("pytest wrote no report: is it installed for this Python?\n")
        return False
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    part.add_row("pytest", {}, "passed", "tests", len(cases) - len(bad) - len(skipped))
    part.add_row("pytest", {}, "failed", "tests", len(bad))
    part.add_row("pytest", {}, "skipped", "tests", len(skipped))
    part.add_row("pytest", {}, "time", "s", round(time.monotonic() - begin_s, 1))
    for case in bad:
        part.add_row(str(case.get("name")), {}, "failed", "tests", 1)
    return done.returncode == 0


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        run_part("contract", measure)
