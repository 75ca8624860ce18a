"""Evaluation: scores, experiments, results and the command line."""
