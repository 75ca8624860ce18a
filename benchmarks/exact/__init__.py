"""How far exact attacks reach."""
