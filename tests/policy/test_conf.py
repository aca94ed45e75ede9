"""Every file in conf/ composes and validates, and is named after what it sets."""

from __future__ import annotations

import pytest
import yaml

import tagc.compressors
from tagc.config import COMPRESSORS, CONF_DIR, KEYS, WEIGHTS, Config, flatten, to_dict, uses
from tagc.record.arm import label_arm
from tests.policy.compose import compose_config

OPTIONS = sorted((path.parent.name, path.stem) for path in CONF_DIR.glob("*/*.yaml"))


def test_every_section_of_the_schema_has_a_group_and_the_reverse() -> None:
    groups = {group for group, _ in OPTIONS}
    assert groups == {
        "model",
        "data",
        "compressor",
        "weights",
        "bandwidth",
        "network",
        "cluster",
        "trainer",
        "logging",
        "experiment",
    }
    assert sorted(path.stem for path in (CONF_DIR / "compressor").glob("*.yaml")) == sorted(COMPRESSORS)
    assert sorted(path.stem for path in (CONF_DIR / "weights").glob("*.yaml")) == sorted(WEIGHTS)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_validates_and_carries_its_name(group: str, option: str) -> None:
    config = compose_config([f"{group}={option}"])
    if group == "experiment":
        assert config.experiment == option
    elif hasattr(getattr(config, group), "name"):
        assert getattr(config, group).name == option


@pytest.mark.parametrize(("group", "option"), [pair for pair in OPTIONS if pair[0] != "experiment"])
def test_an_option_holds_differences_only(group: str, option: str) -> None:
    """A default that is repeated in conf/ no longer follows the schema."""
    values = yaml.safe_load((CONF_DIR / group / f"{option}.yaml").read_text()) or {}
    values = values.get(group, values)  # of a file that sets more than its group
    values.pop("name", None)
    defaults = vars(getattr(Config(), group))
    assert {key: value for key, value in values.items() if defaults[key] == value} == {}


def test_the_schema_and_the_registry_name_the_same_methods() -> None:
    assert set(COMPRESSORS) == set(tagc.compressors.COMPRESSORS)


def test_every_key_has_help_and_only_names_options_that_exist() -> None:
    """`used_by` names options of the key's own group."""
    for name, key in KEYS.items():
        options = {option for group, option in OPTIONS if group == key.section}
        assert key.declaration.help, name
        assert set(key.declaration.used_by or ()) <= options, name


def test_without_overrides_the_schemas_defaults_are_run() -> None:
    assert compose_config([]) == Config()


def test_the_main_job_is_what_the_first_command_promises() -> None:
    config = compose_config(["experiment=main"])
    assert (config.compressor.name, config.cluster.ranks, config.model.name) == ("tagc2", 2, "nano")
    assert (config.data.name, config.trainer.max_steps) == ("pystdlib", 100)
    assert config.bandwidth.rate_mbps == 25_000 and config.network.time_dilation == "auto"
    assert compose_config(["experiment=main", "compressor=fsdp", "trainer.max_steps=5"]).trainer.max_steps == 5


@pytest.mark.parametrize("preset", [option for group, option in OPTIONS if group == "bandwidth"])
def test_a_preset_has_the_rate_of_its_name(preset: str) -> None:
    unit = {"mbps": 1, "gbps": 1000}.get(preset[-4:])
    expected = None if preset == "unlimited" else int(preset[:-4]) * unit
    assert compose_config([f"bandwidth={preset}"]).bandwidth.rate_mbps == expected


@pytest.mark.parametrize("option", sorted(COMPRESSORS))
def test_an_arm_is_named_after_its_option_and_what_differs_from_it(option: str) -> None:
    """The manifest's label knows the same defaults of an option as Hydra composes."""
    config = flatten(to_dict(compose_config([f"compressor={option}"])))
    assert label_arm(config) == option
    changed = config | {"compressor.layers": "blocks.0.*"}
    expected = f"{option} layers=blocks.0.*" if uses(option, "compressor.layers") else option
    assert label_arm(changed) == expected
