"""Data sets, each by the name it is registered under."""
