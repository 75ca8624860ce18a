"""Engines: several ways to train the clients of a round, all giving the same round.

`loop` is the reference; `factored` trains HyperFL's clients without ever making a head's matrix; `vmap` stacks clients,
for a GPU; `process` spreads them over processes, bit for bit like what it spreads. None is named by a method: `choose`
asks what applies.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

from fl.client import Client
from fl.engines.factored.engine import Factored
from fl.engines.factored.engine import obstacle as factored_obstacle
from fl.engines.process import Processes
from fl.engines.sequential import Engine
from fl.engines.vectorized import Vectorized
from fl.engines.vectorized import obstacle as vectorized_obstacle
from fl.runtime.main_guard import leave_if_unguarded
from fl.runtime.workers import START_SECONDS

log = logging.getLogger(__name__)
EngineName = Literal["auto", "loop", "factored", "vmap"]
SPECIAL = {"factored": (Factored, factored_obstacle), "vmap": (Vectorized, vectorized_obstacle)}
"""Engines that do not apply to every client, best first, and what tells why."""


def choose(name: EngineName, client: Client, workers: int = 1) -> Engine:
    """Return the engine called `name`; `factored` and `vmap` fall back to `loop` where they do not apply.

    Args:
        name: "loop", "factored", "vmap", or "auto" for the fastest that applies; `vmap` is that on a GPU only.
        client: of the federation.
        workers: processes to spread clients over, once training has taken as long as they take to start; 1 is none.

    Raises:
        ValueError: an unknown name, or fewer than one worker.
    """
    if name not in get_args(EngineName):
        raise ValueError(f"expected engine {', '.join(get_args(EngineName))}, got {name!r}")
    if workers < 1:
        raise ValueError(f"expected workers >= 1, got {workers}")
    engine = Engine()
    for wanted in _candidate_engines(name, client):
        made, obstacle = SPECIAL[wanted]
        reason = obstacle(client)
        if reason is None:
            engine = made()
            break
        if name != "auto":
            log.info("%s is trained by the loop engine: %s", client.method.name, reason)
    if workers == 1:
        return engine
    leave_if_unguarded()
    return Processes(engine, workers, START_SECONDS)


def _candidate_engines(name: EngineName, client: Client) -> list[str]:
    """Return the engines of `SPECIAL` to ask, in turn."""
    if name != "auto":
        return [name] if name in SPECIAL else []
    on_gpu = any(value.device.type == "cuda" for value in client.task.parameters.values())
    return [special for special in SPECIAL if special != "vmap" or on_gpu]
