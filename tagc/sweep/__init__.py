"""Sweeps that survive: every point has one folder for good, its state is on disk, the same command goes on."""
