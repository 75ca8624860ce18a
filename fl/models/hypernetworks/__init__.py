"""Networks that generate the weights of others."""
