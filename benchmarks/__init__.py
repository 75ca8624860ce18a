"""Measurements, each a script: `python -m benchmarks.NAME` from the checkout."""
