"""Ours beside the peers' own code, on the same victims from the same starts."""
