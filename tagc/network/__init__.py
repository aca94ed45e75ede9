"""Bandwidth caps on a rank's link."""

from tagc.network.pacing import PacedLink, build_link

__all__ = ["PacedLink", "build_link"]
