"""Empirical and theoretical bounds of differential privacy."""
