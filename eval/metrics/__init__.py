"""Figures of a reconstruction, and their statistics."""
