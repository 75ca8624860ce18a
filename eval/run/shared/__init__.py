"""A run whose cells are computed by several workers that share its folder, on this machine or on others."""
