"""Views of a user's own model or of a captured update: the public names of `fl.simulation.capture`."""

from fl.simulation.capture import (
    from_batch,
    from_update,
)

__all__ = [
    "from_batch",
    "from_update",
]
