"""Local training: optimizers, batches, weight decay."""
