"""Hosts in network namespaces: the network itself, real ranks on it, what a killed run leaves (nothing), refusals."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import time
from pathlib import Path

import pytest

import tagc.data
from tagc.config import BandwidthConfig, Config, NetworkConfig
from tagc.errors import UserError
from tagc.launch import launch
from tagc.network import netns, open_network
from tagc.network.namespaces import ENVIRONMENT_KEY, Host, NamespaceLink, NamespacesUnavailable, open_hosts
from tests.launch import workers
from tests.launch.test_launcher import _check_interrupted, _start, _wait_for, _wait_for_end

RATE = 2.5e6


@pytest.fixture
def _namespaces() -> None:
    """Skip where they do not work."""
    try:
        with open_hosts(1, RATE):
            pass
    except NamespacesUnavailable as obstacle:
        pytest.skip(str(obstacle))


def _holders() -> set[str]:
    """Every network namespace that some process is in or holds open."""
    found = set()
    for pattern in ("[0-9]*/task/*/ns/net", "[0-9]*/fd/*"):
        for path in Path("/proc").glob(pattern):
            with contextlib.suppress(OSError):
                found.add(os.readlink(path))
    return {name for name in found if name.startswith("net:")}


def _still_held(names: set[str], timeout_s: float = 60) -> set[str]:
    """Those of ``names`` that somebody holds all the time: a number may be given to another test's namespace."""
    end_s = time.monotonic() + timeout_s
    while (held := names & _holders()) and time.monotonic() < end_s:
        time.sleep(0.2)
    return held


def _rates(handle: int, interface: str) -> list[int]:
    def read(ip):
        index = ip.link_lookup(ifname=interface)[0]
        options = [q.get_attr("TCA_OPTIONS") for q in ip.get_qdiscs(index) if q.get_attr("TCA_KIND") == "tbf"]
        return [option.get_attr("TCA_TBF_PARMS")["rate"] for option in options]

    return netns.call_inside(handle, read)


@pytest.mark.usefixtures("_namespaces")
def test_both_directions_are_capped_and_nothing_is_left(monkeypatch):
    before = socket.if_nameindex(), sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else []
    with open_hosts(3, RATE) as environment, open_hosts(3, RATE):  # the second: same addresses, another network
        monkeypatch.setenv(ENVIRONMENT_KEY, environment[ENVIRONMENT_KEY])
        host = Host(2)
        names = {os.readlink(f"/proc/self/fd/{fd}") for fd in environment[ENVIRONMENT_KEY].split(":")[1].split(",")}
        assert len(names) == 4 and names <= _holders()
        link = NamespaceLink(host, RATE)
        for rate, expected in ((RATE, [2_500_000]), (25_000.0, [25_000]), (None, []), (4e9, [4_000_000_000])):
            link.set_rate(rate)
            assert _rates(host.own, "eth0") == _rates(host.switch, "port2") == expected
        assert _rates(host.switch, "port1") == [2_500_000], "a rank changes its own link only"
        for refused in (10.0, 1e10):
            with pytest.raises(UserError, match=r"cannot cap a link at .*bandwidth\.rate_mbps.*network=paced"):
                link.set_rate(refused)
        assert _rates(host.own, "eth0") == [4_000_000_000]
        assert (socket.if_nameindex(), before[1]) == before, "the machine's own network shows something"
        NamespaceLink(Host(2), None).close()  # of a rank that is started again
        assert _rates(host.own, "eth0") == []
        link.close()
    assert not _still_held(names)


@pytest.mark.distributed
@pytest.mark.usefixtures("_namespaces")
def test_all_bytes_of_a_training_run_pass_the_interface(tmp_path, monkeypatch):
    monkeypatch.setattr(tagc.data, "prepare", lambda config: "none")
    config = Config(network=NetworkConfig("namespaces", time_dilation=1), bandwidth=BandwidthConfig("200mbps", 200.0))
    summary = launch(config, tmp_path, workers.train_in_namespaces)
    assert summary["inside"] != summary["outside"] == os.readlink("/proc/self/ns/net")
    counted, sent, received = (sum(column) for column in zip(*summary["rows"], strict=True))
    headers = 66 / 1448 * counted  # of full frames, at most
    for wire in (sent, received):
        assert counted < wire < 1.05 * counted + headers
    assert not _still_held({summary["inside"]})


@pytest.mark.distributed
@pytest.mark.usefixtures("_namespaces")
def test_runs_at_once_and_none_leaves_anything_however_it_ends(tmp_path):
    """One loses its launcher, one gets Ctrl-C, one loses a rank; each meets its end while another runs."""
    runs = [_start("hang_in_namespace", tmp_path / name, "namespaces") for name in "abc"]
    pids, names = [], set()
    for name in "abc":
        pids.append([int(pid) for pid in _wait_for([tmp_path / name / f"started_{rank}" for rank in (0, 1)])])
        names |= set(_wait_for([tmp_path / name / f"namespace_{rank}" for rank in (0, 1)]))
    assert len(names) == 6 and names <= _holders()
    runs[0].kill()
    runs[0].communicate(timeout=300)
    assert not _wait_for_end(pids[0]) and runs[1].poll() is runs[2].poll() is None
    os.killpg(runs[2].pid, signal.SIGINT)
    _check_interrupted(runs[2], tmp_path / "c", signal.SIGINT, pids[2])
    assert runs[1].poll() is None
    os.kill(pids[1][1], signal.SIGKILL)
    _, err = runs[1].communicate(timeout=300)
    assert err.startswith("error: rank 1 was killed by SIGKILL")
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["status"] == "failed"
    assert not _wait_for_end(pids[1])
    assert not _still_held(names)


def _config(**network) -> Config:
    return Config(network=NetworkConfig(**network), bandwidth=BandwidthConfig("100mbps", 100.0))


def _refuse_with(monkeypatch, name: str, number: int) -> None:
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"tagc.network.namespaces.{name}", refuse)


@pytest.mark.parametrize(
    ("step", "number", "message"),
    [
        ("create_namespace", errno.EPERM, "it needs root, or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN"),
        ("create_namespace", errno.ENOSPC, "setting up network namespaces .*No space left"),
        ("_plug_in", errno.EOPNOTSUPP, r"this kernel lacks veth pairs \(module veth\)"),
        ("cap_interface", errno.ENOENT, r"this kernel lacks the token bucket filter \(module sch_tbf\)"),
    ],
)
def test_what_is_missing_is_named_and_auto_takes_the_paced_link(monkeypatch, caplog, step, number, message):
    if step != "create_namespace":
        monkeypatch.setattr("tagc.network.namespaces.create_namespace", netns.open_own_namespace)
        monkeypatch.setattr("tagc.network.namespaces.call_inside", lambda handle, function: function(_NoKernel()))
        monkeypatch.setattr("tagc.network.namespaces._configure_host", lambda rank, ip: None)
    _refuse_with(monkeypatch, step, number)
    with pytest.raises(UserError, match=f"{message}.*network=paced"), open_network(_config(name="namespaces"), "cpu"):
        pass
    caplog.set_level(logging.INFO, "tagc")
    with open_network(_config(name="auto"), "cpu") as (config, environment):
        assert (config.network.name, environment) == ("paced", {})
    assert "network=auto: paced, because" in caplog.text


class _NoKernel:
    """An IPRoute that agrees to everything."""

    def __getattr__(self, name):
        return lambda *arguments, **options: [1]


@pytest.mark.parametrize(
    ("network", "device", "message"),
    [
        ({}, "cuda", "GPUs of one machine"),
        ({"latency_ms": 1.0}, "cpu", r"network\.latency_ms=1 "),
        ({"time_dilation": 1e6}, "cpu", r"cannot cap a link at 0\.0001 Mbit/s"),
    ],
)
def test_what_namespaces_cannot_do_is_refused(network, device, message):
    with pytest.raises(UserError, match=f"{message}.*network=paced"):
        open_network(_config(name="namespaces", **network), device).__enter__()
    with open_network(_config(name="auto", **network), device) as (config, _):
        assert config.network.name == "paced"
