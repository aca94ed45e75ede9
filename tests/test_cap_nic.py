"""slurm/cap_nic.sh: what it would do, and what it does to an interface in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "slurm" / "cap_nic.sh"
IN_NAMESPACE = """
set -e
ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up
before=$(tc qdisc; ip -br link | cut -d' ' -f1)
"$0" v0 500mbit; "$0" v0 100mbit
tc qdisc
"$0" v0 undo
[ "$before" = "$(tc qdisc; ip -br link | cut -d' ' -f1)" ]
tc qdisc add dev v0 root handle 5: tbf rate 1mbit burst 5000 limit 10000
"$0" v0 1gbit
"""


def call(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)


def test_a_dry_run_caps_both_directions_and_takes_both_caps_away() -> None:
    shown = call(SCRIPT, "--dry-run", "eth0", "1gbit").stdout.splitlines()
    buckets = [line.split(" dev ")[1].split()[0] for line in shown if "tbf rate 1000000000bit burst 250000" in line]
    assert sorted(buckets) == ["eth0", "ifb_eth0"]
    assert any("mirred egress redirect dev ifb_eth0" in line for line in shown)
    assert call(SCRIPT, "--dry-run", "eth0", "undo").stdout.count("del ") == 3


@pytest.mark.parametrize("arguments", [["eth0"], ["--dry-run", "eth0", "10"], ["--dry-run", "eth0", "0mbit"]])
def test_a_wrong_call_says_so_and_does_nothing(arguments: list[str]) -> None:
    done = call(SCRIPT, *arguments)
    assert done.returncode != 0 and "mbit" in done.stderr and not done.stdout


def test_an_interface_is_capped_released_and_left_alone_when_it_is_somebodys() -> None:
    if not shutil.which("tc") or call("unshare", "-n", "ip", "link", "add", "ifb9", "type", "ifb").returncode:
        pytest.skip("needs root, tc and the ifb module")
    done = call("unshare", "-n", "bash", "-c", IN_NAMESPACE, SCRIPT)
    assert done.stdout.count("rate 100Mbit burst 25000b") == 2
    assert done.returncode == 1 and "already has a queue that somebody configured" in done.stderr
