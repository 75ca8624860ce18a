"""Whether the whole update bears out what an attack found, which a result has to pass to count as verified."""
