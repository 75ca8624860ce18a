"""Attacks on updates of hypernetworks, and their equations."""
