"""Attacks that learn to invert from updates of their own making."""
