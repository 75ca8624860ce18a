"""Experiments as they are described: files, overrides, sweeps."""
