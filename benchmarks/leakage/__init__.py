"""How much attacks recover."""
