"""The time dilation: its formula, and when a run's link is capped."""

from __future__ import annotations

import pytest

from tagc.config import REFERENCE_GPUS as NAMES
from tagc.config import Config
from tagc.errors import UserError
from tagc.network import Link, build_link
from tagc.network.calibration import CALIBRATION_STEPS, REFERENCE_GPUS, LinkScale, resolve_dilation
from tests.policy.compose import compose_config

FLOPS = 29.8e12 * 0.4 * 0.01  # what an RTX 3080 computes in 10 ms


def capped_config(**network: object) -> Config:
    config = Config()
    config.bandwidth.rate_mbps = 8000.0  # 10^9 bytes per second
    config.network.latency_ms = 2.0
    for key, value in network.items():
        setattr(config.network, key, value)
    return config


def make_scale(config: Config, device: str = "cpu") -> tuple[LinkScale, Link, list[float]]:
    """A scale, its link, and what the rank told the others; they were twice as slow."""
    told: list[float] = []
    link = build_link(config.bandwidth, config.network)
    return LinkScale(config, link, FLOPS, device, lambda own: told.append(own) or 2 * own), link, told


def close_steps(scale: LinkScale, *compute_ms: float) -> list[float | None]:
    rows = [{"iteration_ms": 900.0, "compute_cpu_ms": ms, "wire_bytes": 10**6} for ms in compute_ms]
    return [scale.close_step(row)["time_dilation"] for row in rows]


def test_the_dilation_is_time_here_over_time_on_the_reference() -> None:
    config = Config()
    assert resolve_dilation(0.5, FLOPS, config) == pytest.approx(50)
    config.trainer.param_dtype = "bfloat16"
    assert resolve_dilation(0.5, FLOPS, config) == pytest.approx(50 * 59.5 / 29.8)
    config.network.reference_gpu = "h100"
    assert resolve_dilation(0.5, FLOPS, config) == pytest.approx(50 * 989.4 / 29.8)
    assert resolve_dilation(1e-9, FLOPS, config) == 1  # a link is never made faster than it is
    assert tuple(REFERENCE_GPUS) == NAMES


def test_auto_caps_the_link_after_the_first_steps_by_the_slowest_rank() -> None:
    scale, link, told = make_scale(capped_config())
    assert close_steps(scale, 1, 300, 250) == [None] * 3
    assert (link.rate_bytes_per_s, link.latency_s) == (None, 0)
    assert close_steps(scale, 400) == [None]
    assert told == [0.25]  # the first step is no sample, the shortest of the others counts
    assert scale.dilation == pytest.approx(50) and scale.is_measured
    assert link.rate_bytes_per_s == pytest.approx(1e9 / 50)
    assert link.latency_s == pytest.approx(2e-3 * 50)
    columns = scale.close_step({"iteration_ms": 900.0})
    assert columns == {"time_dilation": scale.dilation, "scaled_iteration_ms": pytest.approx(18)}
    assert told == [0.25]


@pytest.mark.parametrize(("max_steps", "measured"), [(1, 1), (2, 1), (3, 2), (5, 4), (100, CALIBRATION_STEPS)])
def test_a_short_run_measures_fewer_steps_and_says_when_none_is_left(max_steps: int, measured: int, caplog) -> None:
    config = capped_config()
    config.trainer.max_steps = max_steps
    scale, _, told = make_scale(config)
    with caplog.at_level("INFO", logger="tagc"):
        assert close_steps(scale, *[200.0] * measured) == [None] * measured
    assert told == [0.2]
    assert scale.dilation == pytest.approx(40)
    assert ("no step is left" in caplog.text) == (max_steps == 1)
    assert "200 Mbit/s" in caplog.text


@pytest.mark.parametrize(
    ("device", "changes", "dilation"),
    [("cpu", {"time_dilation": 4}, 4.0), ("cuda", {}, 1.0), ("cuda", {"time_dilation": 2.5}, 2.5)],
)
def test_what_needs_no_measurement_is_in_force_at_once(device: str, changes: dict, dilation: float) -> None:
    scale, link, told = make_scale(capped_config(**changes), device)
    assert link.rate_bytes_per_s == 1e9 / dilation
    assert not scale.is_measured
    assert close_steps(scale, 200) == [dilation]
    assert told == []


def test_nothing_to_cap_is_nothing_to_measure() -> None:
    assert make_scale(Config())[0].dilation == 1
    alone = capped_config()
    alone.cluster.ranks = 1
    assert make_scale(alone)[0].dilation == 1
    assert make_scale(capped_config(name="real"))[0].dilation == 1  # not ours to change
    only_latency = Config()
    only_latency.network.latency_ms = 1.0
    assert make_scale(only_latency)[0].dilation is None


def test_a_restarted_run_goes_on_with_the_dilation_it_had() -> None:
    scale, link, told = make_scale(capped_config())
    scale.set_dilation(7.0)
    assert close_steps(scale, 200, 200) == [7.0, 7.0]
    assert (link.rate_bytes_per_s, told) == (1e9 / 7, [])


@pytest.mark.parametrize(("value", "result"), [("auto", "auto"), ("50", 50), ("2.5", 2.5)])
def test_the_key_takes_auto_or_a_number(value: str, result: object) -> None:
    assert compose_config([f"network.time_dilation={value}"]).network.time_dilation == result


@pytest.mark.parametrize("value", ["0.5", "fast", "nan", "1e7"])
def test_any_other_value_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"network\.time_dilation=.*(auto, or a factor in \[1, 10\^6\]|finite)"):
        compose_config([f"network.time_dilation={value}"])
