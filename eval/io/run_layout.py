"""Names of files and folders of a run that those who write it and those who read it share."""

PARTITIONS = "partitions"
"""Folder with the lists of who holds which images."""
UNLIKE_DEFAULTS = "unlike_defaults"
"""In `run.json`: the line on defaults in which the run's methods differ (`eval.experiment.default_differences`)."""
