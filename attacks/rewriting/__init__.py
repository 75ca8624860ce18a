"""Attacks that turn a view into a simpler one and attack that."""
