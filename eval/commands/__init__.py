"""The parts of the command `hyperleak`, one module each; what they need is imported when they run."""
