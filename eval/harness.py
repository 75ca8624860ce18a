"""Plans the cells of an experiment and computes those that are missing: the public names of `eval.run`."""

from eval.run.plan import Plan, prepare
from eval.run.runner import Failure, Options, Progress, run

__all__ = ["Failure", "Options", "Plan", "Progress", "prepare", "run"]
