"""One style of `build`: every package and every registry takes a name or settings with a name."""

from collections.abc import Callable
from typing import Any

import pytest

import attacks
import defenses
import fl.data
import fl.methods
import fl.models
from attacks.base import Chain
from fl.types import Task

BUILDS: list[tuple[Callable[..., Any], Any, str, dict[str, Any]]] = [
    (attacks.build, attacks.attacks, "ig", {"iterations": 7}),
    (defenses.build, defenses.defenses, "noise", {"std": 0.5}),
    (fl.methods.build, fl.methods.methods, "fedavg", {"lr": 0.5}),
    (fl.models.build, fl.models.models, "mlp", {"input_shape": (1, 4, 4)}),
    (fl.data.build, fl.data.datasets, "faces", {"size": 8}),
]


@pytest.mark.parametrize(("build", "registry", "name", "settings"), BUILDS)
def test_a_name_or_settings_make_an_object(build: Any, registry: Any, name: str, settings: dict[str, Any]) -> None:
    assert build(name) == registry.build(name) == registry.get(name)()
    changed = build({"name": name, **settings})
    assert changed == registry.build({"name": name, **settings}) == registry.get(name)(**settings)
    assert build(changed) is changed


def test_the_registry_of_attacks_builds_chains_and_presets() -> None:
    chain = attacks.attacks.build({"name": "peel+ig", "iterations": 7})
    assert isinstance(chain, Chain)
    assert chain == attacks.build({"name": "peel+ig", "iterations": 7})
    preset = next(iter(attacks.attacks.get("ig").presets))
    assert attacks.attacks.build({"name": "ig", "preset": preset}) == attacks.build({"name": "ig", "preset": preset})


def test_a_network_with_a_number_of_classes_is_a_task() -> None:
    by_name = fl.models.build("mlp", num_classes=3, seed=1, input_shape=(1, 4, 4))
    by_settings = fl.models.build({"name": "mlp", "input_shape": (1, 4, 4)}, num_classes=3, seed=1)
    assert isinstance(by_name, Task)
    assert by_name.num_classes == by_settings.num_classes == 3
    assert all((value == by_settings.parameters[key]).all() for key, value in by_name.parameters.items())
