"""Simulated federations: rounds, states, observation."""
