"""Audits inside federations: updates are recorded where they are made, screened in seconds, withheld if they leak."""
