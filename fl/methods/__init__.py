"""Federated methods: one file each, found by name in `fl.method.methods`."""
