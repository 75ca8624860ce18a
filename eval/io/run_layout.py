"""Names of files and folders of a run that those who write it and those who read it share."""

PARTITIONS = "partitions"
"""Folder with the lists of who holds which images."""
