"""A method, a defense and a network put together as training would, without a step of it."""

from __future__ import annotations

from eval.experiment.spec import FederationSpec
from eval.run.cache_keys import dataset_sources
from fl.client import Client
from fl.seeds import stream

ASSEMBLY_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""What is raised where settings that are legal by themselves do not fit each other; a missing file is none of these."""
LARGEST = 300_000
"""Parameters of a network up to which a server is made for it twice, once to see that it can be made."""
ROUNDS = 1000
"""Rounds whose local training is looked at."""


def check_assembly(client: Client, federation: FederationSpec, clients: int) -> None:
    """Make what clients and server start with, and what the first client is sent.

    A hypernetwork on the server has a hundred numbers or more for each of the network's, so that large networks are
    left out, unless the server reads images, which have to fit whatever the network.

    Args:
        client: the rule.
        federation: for how many rounds it is trained, and what is scored.
        clients: how many of them may take part.

    Raises:
        ValueError: settings that do not fit each other; or another of `FORWARD_ERRORS`.
    """
    method, task = client.method, client.task
    for number in range(min(federation.rounds, ROUNDS) + 1):
        method.phases(task, number)
    if federation.fine_tune_epochs:
        method.fine_tuning_phases(task, federation.fine_tune_epochs)
    method.adaptation_method()
    if (beside := method.personal_method()) is not None:
        beside.phases(task, 0)
    if sum(value.numel() for value in task.parameters.values()) > LARGEST and not dataset_sources([method]):
        return
    params = method.initial_parameters(task, stream(0, "init"))
    method.init_memory(params, task)
    server = method.init_server(params, task, clients, stream(0, "server"))
    method.broadcast(server, 0, task)
    if federation.held_out_clients:
        method.serve(server, clients, task)
