"""Engines: several ways to train the clients of a round, all giving the same round.

`loop` is the reference; `factored` trains HyperFL's clients without ever making a head's matrix; `process` spreads
clients over processes, bit for bit like what it spreads. None is named by a method: `choose` asks what applies.
"""

from __future__ import annotations

import logging
from typing import Literal

from fl.client import Client
from fl.engines.base import Engine
from fl.engines.factored import Factored, obstacle
from fl.engines.process import Processes

log = logging.getLogger(__name__)
EngineName = Literal["auto", "loop", "factored"]


def choose(name: EngineName, client: Client, workers: int = 1) -> Engine:
    """The engine called `name`; `factored` falls back to `loop` where it does not apply.

    Args:
        name: "loop", "factored", or "auto" for the fastest that applies.
        client: of the federation.
        workers: processes to spread clients over; 1 is none.

    Raises:
        ValueError: an unknown name, or fewer than one worker.
    """
    if name not in ("auto", "loop", "factored"):
        raise ValueError(f"expected engine auto, loop or factored, got {name!r}")
    if workers < 1:
        raise ValueError(f"expected workers >= 1, got {workers}")
    engine = Engine()
    if name != "loop":
        reason = obstacle(client)
        if reason is None:
            engine = Factored()
        elif name == "factored":
            log.info("%s is trained by the loop engine: %s", client.method.name, reason)
    return Processes(engine, workers) if workers > 1 else engine
