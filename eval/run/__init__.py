"""Runs: their plan, cells, folders and results."""
