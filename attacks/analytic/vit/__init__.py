"""Vision transformers: how tokens are made of pixels, and how the images of a batch are told apart by them."""
