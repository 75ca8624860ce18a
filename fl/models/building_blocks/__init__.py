"""What networks are put together from."""
