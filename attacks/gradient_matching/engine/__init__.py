"""The machinery of gradient matching: problems, distances, optimizers, batching."""
