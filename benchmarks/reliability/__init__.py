"""Experiments that try to make an audit wrong: each has a goal, a count, and a command of its own."""
