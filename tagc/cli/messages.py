"""One message for whatever a user got wrong: Hydra's and OmegaConf's exceptions in the words of this project."""

from __future__ import annotations

import difflib
import itertools
import re
import traceback
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tagc.config import Config
from tagc.errors import UserError
from tagc.launch import RankFailure


def legal_keys(schema: Any = None, prefix: str = "") -> list[str]:
    """Every key of the schema, dotted, sections included."""
    schema = Config() if schema is None else schema
    keys = []
    for item in fields(schema):
        value = getattr(schema, item.name)
        keys.append(prefix + item.name)
        if is_dataclass(value):
            keys += legal_keys(value, f"{prefix}{item.name}.")
    return keys


def check_keys(composed: DictConfig) -> None:
    """Refuse keys that the schema does not have; ``+key=value`` brings them past Hydra and OmegaConf.

    Errors: ``UserError`` naming the key and the nearest legal one.
    """
    legal = set(legal_keys())

    def walk(node: DictConfig, prefix: str) -> None:
        for name in map(str, node):
            key = prefix + name
            if key not in legal:
                raise UserError(unknown_key(key))
            child = node._get_node(name)
            if isinstance(child, DictConfig):
                walk(child, f"{key}.")

    walk(composed, "")


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)), None)


def unknown_key(key: str) -> str:
    """``unknown key compressor.sparsty; did you mean compressor.sparsity?``"""
    section, _, leaf = key.rpartition(".")
    keys = legal_keys()
    siblings = [legal for legal in keys if section and legal.rpartition(".")[0] == section]
    same_leaf = [legal for legal in keys if legal.rpartition(".")[2] == leaf]
    nearby = {legal.rpartition(".")[2] if siblings else legal: legal for legal in siblings or keys}
    nearest = _nearest(leaf if siblings else key, nearby)
    guess = same_leaf[0] if len(same_leaf) == 1 else nearby.get(nearest or "")
    if guess:
        return f"unknown key {key}; did you mean {guess}?"
    if siblings:
        return f"unknown key {key}; the keys of {section} are {', '.join(k.rpartition('.')[2] for k in siblings)}"
    return f"unknown key {key}; `python run.py --help` lists the legal keys, tagc/config/schema.py declares them"


def _unknown_option(missing: str, options: list[str]) -> str:
    group, _, option = missing.rpartition("/")
    guess = _nearest(option, options)
    question = f" Did you mean {group}={guess}?" if guess else ""
    return f"{group}={option}: there is no such option.{question} Choices: {', '.join(sorted(options))}"


def _explain_omegaconf(error: OmegaConfBaseException, outer: Exception) -> str:
    """OmegaConf knows the key; Hydra, around it, knows the file or the override."""
    source = re.match(r"In '([^']+)':", str(outer))
    where = f"{source[1]}.yaml: " if source else ""
    first_line = str(error.msg or error).splitlines()[0]
    key = str(error.full_key or error.key or "")
    if re.match(r"Key '.*' (not in|is not in struct)", first_line):
        return where + unknown_key(key)
    override = re.search(r"^Error merging override (.*)$", str(outer), re.MULTILINE)
    subject = override[1] if override else key
    return f"{where}{subject}: {first_line}" if subject else where + first_line


def _explain_group_value(arguments: Iterable[str], conf_dir: Path) -> str | None:
    """``bandwidth=10``: a group takes the name of an option, and Hydra does not say which group it was."""
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if not equals or not group.isidentifier() or re.search(r"[^\w,.-]", value):
            continue
        options = sorted(path.stem for path in (conf_dir / group).glob("*.yaml"))
        unknown = [part for part in value.split(",") if part not in options]
        if options and unknown:
            return (
                f"{group}={unknown[0]}: {group} takes the name of an option: {', '.join(options)}. "
                f"To set one of its keys write {group}.KEY=VALUE"
            )
    return None


def _raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra raised it on its own: below its first frame no frame of this package takes part."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    hydra_dir, own_dir = Path(hydra.__file__).parent, Path(__file__).parents[1]
    below = list(itertools.dropwhile(lambda file: hydra_dir not in file.parents, files))
    return bool(below) and not any(own_dir in file.parents for file in below)


def _explain_hydra(error: Exception, arguments: Iterable[str], conf_dir: Path) -> str:
    """What is left: the grammar of overrides and the rules of the defaults list."""
    text = str(error)
    lines = [line for line in text.splitlines() if "hydra.cc/docs" not in line]
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {lines[0]}; write KEY=VALUE; special characters need quotes: \"KEY='a, b'\""
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", text):
        return f"{ambiguous[1]}: several values make a sweep; add -m"
    if twice := re.match(r"Multiple values for (\S+)\. To override", text):
        return f"{twice[1]} is chosen already; write {twice[1]}=OPTION without a '+'"
    if swept := re.match(r"Sweeping over Hydra's configuration is not supported : '([^=]+)=(.*)'", text):
        quoted = swept[2].replace(",", "\\,")
        return (
            f"{swept[1]}={swept[2]}: the comma makes two values of it, and Hydra's own keys take one; a comma that "
            f"belongs to the value is quoted: \"{swept[1]}='{quoted}'\""
        )
    return _explain_group_value(arguments, conf_dir) or "\n".join(lines)


def explain(error: Exception, arguments: Iterable[str], conf_dir: Path) -> str | None:
    """The message for an error that the user can fix; ``None`` for a bug in the program."""
    if isinstance(error, UserError | RankFailure):
        return str(error)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, list(error.options))
    for candidate in (error, error.__cause__, error.__context__):
        if isinstance(candidate, OmegaConfBaseException):
            return _explain_omegaconf(candidate, error)
    if isinstance(error, OSError) and error.filename and _raised_by_hydra(error):
        return (
            f"the run folder {error.filename} cannot be created ({error.strerror}); "
            "set hydra.run.dir (in a sweep hydra.sweep.dir) to a folder that can be written"
        )
    if isinstance(error, HydraException | ValueError) and _raised_by_hydra(error):
        return _explain_hydra(error, arguments, conf_dir)
    return None
