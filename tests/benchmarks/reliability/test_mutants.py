"""A sample of the mutated configs: what is wrong for certain is refused with its key."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.reliability.mutants import PERHAPS, UNFIT, WRONG, mutants, outcome, unfit
from fl.method import ServerState, methods
from fl.methods.fedavg import FedAvg
from fl.tensors import Tensors
from fl.types import Task


def test_mutants_that_are_wrong_are_refused_with_the_key() -> None:
    made = list(mutants(42, seed=1))
    assert {mutant.kind for mutant in made} == {*WRONG, *PERHAPS}
    said = [(mutant.config, mutant.kind, mutant.key, outcome(mutant)) for mutant in made]
    assert [case for case in said if case[1] in WRONG and case[3] != "refused"] == []
    assert {case[3] for case in said} <= {"refused", "built"}


@pytest.mark.parametrize(("key", "method"), UNFIT, ids=[f"{method['name']}-{key}" for key, method in UNFIT])
def test_settings_that_do_not_fit_each_other_are_refused_before_training(key: str, method: dict[str, object]) -> None:
    said = unfit(method)
    assert key in said
    assert str(method["name"]) in said or key == "held_out_clients"


@pytest.mark.parametrize("method", methods.names())
def test_every_methods_example_passes(method: str) -> None:
    example = methods.spec(dict(methods.examples())[method])
    assert unfit(example) == ""


@pytest.mark.parametrize("fault", [RuntimeError, KeyError, ZeroDivisionError])
def test_what_torch_says_of_a_method_is_said_before_training(fault: type[Exception]) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(FedAvg):
        """Fails where its server is made."""

        def init_server(self, params: Tensors, task: Task, clients: int, generator: torch.Generator) -> ServerState:
            raise fault("mat1 and mat2 shapes cannot be multiplied")

    methods.names()
    methods.register("broken-server")(Broken)
    try:
        assert "method 'broken-server': " in unfit({"name": "broken-server"})
    finally:
        del methods._entries["broken-server"]
