"""Experiments read from YAML and written to it: the public names of `eval.experiment.yaml_config`."""

from eval.experiment.yaml_config import (
    dump,
    load,
    read,
)

__all__ = [
    "dump",
    "load",
    "read",
]
