"""How an arm looks: the same order, colour, marker, line and hatch in every table and figure.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; marker, line and hatch do it without colour.
Their yellow is darkened, or it would be lost on white paper.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Style(NamedTuple):
    """What matplotlib needs to draw an arm."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[float, ...]]
    hatch: str


_DASH_DOT_DOT = (0, (4.0, 1.5, 1.0, 1.5, 1.0, 1.5))
_LONG_DASH = (0, (8.0, 2.0))
#: in the order of every table
STYLES = {
    "noop": Style("#7f7f7f", "x", ":", ""),
    "fsdp": Style("#000000", "o", "-", ""),
    "bf16": Style("#0072b2", "s", "--", "//"),
    "lhc": Style("#a6980c", "P", "-.", ".."),
    "tagc": Style("#e69f00", "^", "-.", "\\\\"),
    "tagc2": Style("#d55e00", "D", "-", "xx"),
    "packed": Style("#009e73", "v", "--", "--"),
    "int8": Style("#56b4e9", "<", ":", "||"),
    "int4": Style("#cc79a7", ">", _DASH_DOT_DOT, "oo"),
    "int4_delta4": Style("#882255", "H", "-", "xx"),
    "zeropp": Style("#117733", "d", "--", "\\\\"),
    "zeropp_hpz": Style("#44aa99", "1", "-.", "//"),
    "sdp4bit": Style("#332288", "X", ":", "||"),
    "fsdp_gloo": Style("#4d4d4d", "h", _LONG_DASH, "++"),
    "ddp": Style("#8c564b", "*", _LONG_DASH, "**"),
    "powersgd1": Style("#9467bd", "p", ":", "OO"),
    "powersgd4": Style("#5e3c99", "8", "-.", ".."),
}
OTHER = Style("#bcbd22", "d", _DASH_DOT_DOT, "//..")
#: lines of further settings of one compressor, whose colour and marker they share
VARIANT_LINES = ("-", "--", "-.", ":", _DASH_DOT_DOT, _LONG_DASH)


def compressor_of(arm: str) -> str:
    """The compressor in an arm's label.

    >>> compressor_of("tagc2 sparsity=0.9 layers=all")
    'tagc2'
    """
    return arm.split(" ", 1)[0]


def style_of(arm: str) -> Style:
    """The style of an arm's compressor; one grey-green style for all that have no entry of their own."""
    return STYLES.get(compressor_of(arm), OTHER)


def sort_arms(arms: Iterable[str]) -> list[str]:
    """Without repetition, in the order of ``STYLES``; a compressor's own setting, then its variants by key and value.

    >>> sort_arms(["zip", "tagc2 ratio=16", "tagc2 ratio=8", "tagc2 layers=all", "tagc2", "fsdp", "fsdp"])
    ['fsdp', 'tagc2', 'tagc2 layers=all', 'tagc2 ratio=8', 'tagc2 ratio=16', 'zip']
    """
    order = {name: i for i, name in enumerate(STYLES)}
    return sorted(set(arms), key=lambda arm: (order.get(compressor_of(arm), len(order)), _split_numbers(arm)))


def _split_numbers(text: str) -> list[tuple[str, float]]:
    """Text before each number, and the number: 8 comes before 16."""
    return [(before, float(number or 0)) for before, number in re.findall(r"([^\d]*)(\d+(?:\.\d+)?|$)", text)]
