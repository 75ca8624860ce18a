"""Federated methods: one file each, found by name in `fl.method.methods`."""

from fl.method import methods

__all__ = ["build", "methods"]

build = methods.build
