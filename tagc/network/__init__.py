"""A rank's link: what caps it, and what its interface counted."""

from tagc.network.link import Counters, Link
from tagc.network.pacing import PacedLink
from tagc.network.select import build_link, dilate, enter_network, leave_network, open_network

__all__ = ["Counters", "Link", "PacedLink", "build_link", "dilate", "enter_network", "leave_network", "open_network"]
