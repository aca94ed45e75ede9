"""A rank's link: what caps it, and what its interface counted."""

from tagc.network.build import build_link, dilate
from tagc.network.link import Counters, Link
from tagc.network.pacing import PacedLink

__all__ = ["Counters", "Link", "PacedLink", "build_link", "dilate"]
