"""What the first release told readers to import is still there, under its name and with its meaning."""

import importlib
import warnings

import pytest

FORMER = [
    ("attacks", "build", "attacks:build"),
    ("attacks.base", "Attack", "attacks.base:Attack"),
    ("attacks.base", "NotApplicable", "attacks.result:NotApplicable"),
    ("attacks.base", "Reconstruction", "attacks.result:Reconstruction"),
    ("attacks.base", "attacks", "attacks:attacks"),
    ("defenses", "defenses", "fl.defense:defenses"),
    ("eval", "config", "eval.config"),
    ("eval", "harness", "eval.harness"),
    ("eval", "results", "eval.results"),
    ("eval", "store", "eval.store"),
    ("eval.audit", "leakage", "eval.audit.leakage_words:leakage"),
    ("eval.canaries", "audit", "eval.privacy.canaries:audit"),
    ("eval.rundir", "RunDir", "eval.run.run_directory:RunDir"),
    ("fl.capture", "from_batch", "fl.capture:from_batch"),
    ("fl.capture", "from_update", "fl.capture:from_update"),
    ("fl.client", "Gradient", "fl.gradient:Gradient"),
    ("fl.decay", "decay_shares", "fl.local.weight_decay:decay_shares"),
    ("fl.decay", "without_decay", "fl.local.weight_decay:without_decay"),
    ("fl.defense", "Defense", "fl.defense:Defense"),
    ("fl.method", "Step", "fl.types:Step"),
    ("fl.method", "methods", "fl.method:methods"),
    ("fl.methods.dp_fedavg", "DPFedAvg", "fl.methods.dp_fedavg:DPFedAvg"),
    ("fl.methods.fedavg", "FedAvg", "fl.methods.fedavg:FedAvg"),
    ("fl.predict", "predict", "fl.predict:predict"),
    ("fl.ranges", "Count", "fl.ranges:Count"),
    ("fl.ranges", "Length", "fl.ranges:Length"),
    ("fl.ranges", "Range", "fl.ranges:Range"),
    ("fl.ranges", "Share", "fl.ranges:Share"),
    ("fl.tensors", "Tensors", "fl.tensors:Tensors"),
    ("fl.tensors", "combine", "fl.tensors:add_scaled"),
    ("fl.tensors", "dense", "fl.tensors:dense"),
    ("fl.tensors", "times", "fl.tensors:mul"),
    ("fl.types", "Batch", "fl.types:Batch"),
    ("fl.types", "ServerView", "fl.view:ServerView"),
]
"""Module and name as they were published, and `module:name` of what they mean today."""
USED = {
    ("eval.config", "read"),
    ("eval.config", "load"),
    ("eval.harness", "prepare"),
    ("eval.harness", "run"),
    ("eval.harness", "Options"),
    ("eval.results", "publish"),
    ("eval.results", "assemble"),
    ("eval.store", "read_rows"),
    ("eval.rundir", "RunDir"),
}
"""What the published examples take from modules that they import as a whole."""


def resolved(place: str) -> object:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize(("module", "name", "today"), FORMER, ids=lambda text: text)
def test_former_import_works(module: str, name: str, today: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        space: dict[str, object] = {}
        exec(f"from {module} import {name}", space)
    found, meant = space[name], resolved(today)
    assert found is meant or (isinstance(found, type) and isinstance(meant, type) and issubclass(found, meant))


@pytest.mark.parametrize(("module", "name"), sorted(USED))
def test_former_modules_hold_what_examples_used(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))


def test_gradient_that_methods_are_handed_is_the_former_one() -> None:
    from fl.client import Gradient, LossGradient
    from fl.methods.fedavg import FedAvg

    assert issubclass(LossGradient, Gradient)
    assert FedAvg.gradient.__annotations__["grad"] in {"Gradient", Gradient}
