"""Attacks that solve the equations of an update in closed form, or exactly."""
