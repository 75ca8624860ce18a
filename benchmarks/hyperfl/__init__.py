"""HyperFL: what its updates give away."""
