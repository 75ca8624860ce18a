"""Differential privacy: mechanisms, accounting, claims."""
