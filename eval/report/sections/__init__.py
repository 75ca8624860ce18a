"""The sections of a report, a module for each, and the parts that they are put together from."""
