"""Parts of the exact inversion of a network as a graph of linear maps and activations."""
