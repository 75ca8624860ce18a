"""Files: how they are read and written, whole or not at all."""
