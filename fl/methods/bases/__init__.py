"""Base classes that several methods share."""
