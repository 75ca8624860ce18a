"""The report of a run: what leaked in plain words, with the figures, pictures and settings it rests on."""
