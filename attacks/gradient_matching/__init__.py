"""Attacks that search for images whose update matches the one observed."""
