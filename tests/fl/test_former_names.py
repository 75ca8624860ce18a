import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch

from fl.defense import Defense, overrides
from fl.methods.fedavg import FedAvg
from fl.models.mlp import MLP
from fl.registry import Registry, UnknownNameError
from fl.settings import FormerNameWarning, SettingError, current_settings, declared
from fl.tensors import Tensors

tools: Registry[Any] = Registry("tool", "fl")
tools._searched = True  # they live in this file


class Tool:
    registry: ClassVar[Registry[Any]] = tools
    former_names: ClassVar[Mapping[str, str]] = {"len": "length", "size": "length"}


@tools.register("saw")
@dataclass(frozen=True, kw_only=True)
class Saw(Tool):
    former_names: ClassVar[Mapping[str, str]] = {"kind": "material"}
    former_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = {"material": {"timber": "wood"}}

    length: int = 1
    material: Literal["wood", "metal"] = "wood"


@declared("box")
@dataclass(frozen=True, kw_only=True)
class Box:
    former_names: ClassVar[Mapping[str, str]] = {"content": "tools", "first": "best"}

    tools: tuple[Tool, ...] = ()
    best: Tool = field(default_factory=Saw)


@pytest.fixture
def noted() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
        found += [str(w.message) for w in caught]


def test_a_former_name_is_read_with_a_warning_that_says_todays() -> None:
    with pytest.warns(FormerNameWarning, match="^'size' is now 'length'$"):
        assert tools.build({"name": "saw", "size": 3}) == Saw(length=3)


def test_a_former_name_is_read_by_the_class_itself() -> None:
    with pytest.warns(FormerNameWarning, match="^'kind' is now 'material'$") as caught:
        assert Saw(kind="metal") == Saw(material="metal")  # type: ignore[call-arg]
    assert caught[0].filename == __file__


def test_a_former_value_is_read_with_a_warning() -> None:
    with pytest.warns(FormerNameWarning, match="^'timber' is now 'wood'$"):
        assert Saw(material="timber") == Saw()  # type: ignore[arg-type]


def test_the_names_of_a_base_class_are_known_beside_ones_own() -> None:
    with pytest.warns(FormerNameWarning) as caught:
        assert tools.build({"name": "saw", "len": 2, "kind": "timber"}) == Saw(length=2)
    assert {str(w.message) for w in caught} == {
        "'len' is now 'length'",
        "'kind' is now 'material'",
        "'timber' is now 'wood'",
    }


@pytest.mark.parametrize("values", [{"size": 3, "length": 3}, {"size": 3, "len": 3}])
def test_a_setting_by_two_of_its_names_is_an_error(values: dict[str, Any]) -> None:
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(SettingError, match=r"saw\.length: expected it once, got it as length and as (size|len)"),
    ):
        tools.build({"name": "saw", **values})


def test_what_is_close_is_told_of_todays_names_alone() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown setting .* 'siz'; known: length, material"):
        tools.build({"name": "saw", "siz": 3})


def test_what_is_written_has_todays_names_and_the_first_ones_where_they_are_asked_for() -> None:
    saw = Saw(length=4)
    assert tools.spec(saw) == {"name": "saw", "length": 4, "material": "wood"}
    assert tools.spec(saw, oldest_names=True) == {"name": "saw", "len": 4, "kind": "timber"}
    assert tools.spec(Saw(material="metal"), oldest_names=True)["kind"] == "metal"


def test_plain_data_is_brought_to_todays_names_however_deep() -> None:
    data = {"content": [{"name": "saw", "len": 2}, "saw", {"name": "plane", "len": 1}], "first": {"name": "saw"}}
    with pytest.warns(FormerNameWarning):
        found = current_settings(Box, data)
    assert json.dumps(found) == json.dumps(
        {"tools": [{"name": "saw", "length": 2}, "saw", {"name": "plane", "len": 1}], "best": {"name": "saw"}}
    )


def test_todays_names_bring_no_warning(noted: list[str]) -> None:
    Box(tools=(Saw(length=3),), best=tools.build({"name": "saw", "material": "metal"}))
    current_settings(Box, {"tools": [{"name": "saw", "length": 2}]})
    assert not noted


def test_a_hook_by_its_former_name_is_still_heard_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"^Withheld\.passed is now Withheld\.transmit_known_part$") as caught:

        @dataclass(frozen=True, kw_only=True)
        class Withheld(Defense):
            guide: int = 3  # a setting, and no hook
            detail: ClassVar[str] = "x"

            def passed(self, known: Tensors, observed: Tensors) -> Tensors:
                return {}

    assert len(caught) == 1
    assert caught[0].filename == __file__
    defense, known = Withheld(), {"w": torch.ones(2)}
    assert defense.transmit_known_part(known, known) == {}
    assert overrides(defense, "transmit_known_part")
    assert defense.guide == 3
    with pytest.warns(DeprecationWarning, match=r"Withheld\.deviations is now Withheld\.noise_std$") as caught:
        assert defense.deviations(known) == {"w": 0.0}  # type: ignore[attr-defined]
    assert caught[0].filename == __file__


def test_todays_name_of_a_hook_wins_where_a_class_has_both() -> None:
    with pytest.warns(DeprecationWarning, match="weight is now"):

        class Both(FedAvg):
            def aggregation_weight(self, images: int) -> float:
                return 2.0 * images

            def weight(self, images: int) -> float:
                return self.aggregation_weight(images)

    assert Both().aggregation_weight(3) == 6


def test_class_attributes_and_properties_by_their_former_names_are_heard() -> None:
    with pytest.warns(DeprecationWarning, match="takes_means|per_sample"):

        class Lonely(FedAvg):
            per_sample: ClassVar[bool] = False

            @property
            def takes_means(self) -> bool:
                return False

    method = Lonely()
    assert not method.has_per_sample_loss
    assert not method.aggregates_mean_only
    with pytest.warns(DeprecationWarning, match="Lonely.tuning is now Lonely.fine_tuning_phases"):
        assert method.tuning  # type: ignore[attr-defined]


def test_a_network_and_a_group_by_their_former_names_are_heard() -> None:
    with pytest.warns(DeprecationWarning, match=r"Grouped\.group is now Grouped\.group_size"):

        @dataclass(frozen=True, kw_only=True)
        class Grouped(Defense):
            @property
            def group(self) -> int:
                return 3

    assert Grouped().group_size == 3
    with pytest.warns(DeprecationWarning, match=r"MLP\.task is now MLP\.build_task"):
        task = MLP(input_shape=(1, 4, 4)).task(num_classes=3, seed=0)  # type: ignore[attr-defined]
    assert task.num_classes == 3


def test_a_network_draws_its_values_by_the_former_name_of_the_hook() -> None:
    with pytest.warns(DeprecationWarning, match=r"Halves\.initialise is now Halves\.initialize"):

        class Halves(MLP):
            def initialise(self, model: torch.nn.Module, generator: torch.Generator) -> None:
                for parameter in model.parameters():
                    parameter.detach().fill_(0.5)

    task = Halves(input_shape=(1, 4, 4)).build_task(num_classes=3)
    assert all((parameter == 0.5).all() for parameter in task.model.parameters())


def test_an_unknown_attribute_is_an_error_and_that_of_a_property_says_its_own() -> None:
    class Faulty(FedAvg):
        @property
        def aggregates_mean_only(self) -> bool:
            return self.nowhere  # type: ignore[attr-defined, no-any-return]

    for name in ("nowhere", "aggregates_mean_only"):
        with pytest.raises(AttributeError, match="'Faulty' object has no attribute 'nowhere'"):
            getattr(Faulty(), name)
