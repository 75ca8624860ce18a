"""Attacks on chains of layers that are undone one layer at a time: their equations."""
