import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

import fl.methods
from fl.method import methods
from fl.methods.fedavg import FedAvg
from fl.registry import Registry, UnknownNameError

priors: Registry[Any] = Registry("prior", "fl")
attacks: Registry[Any] = Registry("attack", "fl")
for _registry in (priors, attacks):
    _registry._searched = True  # these live in this file: no package to look through


class Metric(StrEnum):
    COSINE = "cosine"
    EUCLIDEAN = "euclidean"


@dataclass(frozen=True)
class Step:
    size: float
    count: int = 1


class Prior:
    registry: ClassVar[Registry[Any]] = priors


@priors.register("tv")
@dataclass(frozen=True, kw_only=True)
class TotalVariation(Prior):
    weight: float = 1e-4

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"expected weight >= 0, got {self.weight}")


@attacks.register("ig")
@dataclass(frozen=True, kw_only=True)
class InvertingGradients:
    lr: float = 0.1
    iterations: int = 100
    signed: bool = True
    metric: Metric = Metric.COSINE
    boxed: Literal["hard", "none"] = "hard"
    milestones: tuple[float, ...] = (0.375, 0.625)
    prior: Prior | None = None
    priors: tuple[Prior, ...] = ()
    steps: tuple[Step, ...] = ()
    step: Step | None = None
    where: Path | None = None
    scales: dict[str, float] = field(default_factory=dict)

    @classmethod
    def example(cls) -> "InvertingGradients":
        return cls(iterations=2)


@attacks.register("dlg")
@dataclass(frozen=True, kw_only=True)
class DeepLeakage:
    restarts: int


@attacks.register("any")
@dataclass(frozen=True, kw_only=True)
class Anything:
    thing: Any = None


@attacks.register("peel")
def peel(view: object) -> object:
    return view


def test_registering_sets_the_name_and_a_name_belongs_to_one_class() -> None:
    assert InvertingGradients.name == "ig"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"attack 'ig' is taken by {__name__}.InvertingGradients"):

        @attacks.register("ig")
        @dataclass(frozen=True, kw_only=True)
        class Other:
            pass


def test_only_frozen_keyword_only_dataclasses_are_taken() -> None:
    @dataclass
    class Loose:
        x: int = 0

    @dataclass(frozen=True)
    class Positional:
        x: int = 0

    @dataclass(frozen=True, kw_only=True)
    class Named:
        name: str = ""

    with pytest.raises(ValueError, match="expected a frozen keyword-only dataclass"):
        attacks.register("loose")(Loose)
    with pytest.raises(ValueError, match=r"expected keyword-only fields in .*Positional, got x"):
        attacks.register("positional")(Positional)
    with pytest.raises(ValueError, match="no field 'name'"):
        attacks.register("named")(Named)
    assert attacks.names() == ["any", "dlg", "ig", "peel"]


def test_unknown_names_say_what_is_close() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown attack 'igg'; did you mean 'ig'\? known: any, dlg, ig, peel"):
        attacks.get("igg")
    with pytest.raises(UnknownNameError, match=r"unknown attack 'my_own_search'.*--import FILE, or imports:"):
        attacks.get("my_own_search")
    with pytest.raises(UnknownNameError, match="unknown setting of attack 'ig' 'iteration'; did you mean 'iterations'"):
        attacks.build({"name": "ig", "iteration": 3})
    with pytest.raises(UnknownNameError, match="unknown setting of attack 'peel' 'lr'"):
        attacks.build({"name": "peel", "lr": 3})


def test_values_are_converted_to_the_type_of_their_field() -> None:
    spec = {
        "name": "ig",
        "lr": 1e-4,
        "iterations": 7.0,
        "metric": "euclidean",
        "milestones": [0, 0.5],
        "prior": "tv",
        "priors": [{"name": "tv", "weight": 1}, TotalVariation()],
        "steps": [{"size": 2}],
        "step": {"size": 1, "count": 3},
    }
    built = attacks.build(spec)
    assert built == InvertingGradients(
        lr=1e-4,
        iterations=7,
        metric=Metric.EUCLIDEAN,
        milestones=(0.0, 0.5),
        prior=TotalVariation(),
        priors=(TotalVariation(weight=1.0), TotalVariation()),
        steps=(Step(2.0),),
        step=Step(1.0, 3),
    )
    assert isinstance(built.lr, float)
    assert isinstance(built.milestones, tuple)
    assert attacks.build(built) is built
    assert attacks.build("peel") is peel


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "fast"}, r"ig.lr: expected a number, got 'fast'"),
        ({"iterations": 1.5}, r"ig.iterations: .*got 1\.5"),
        ({"boxed": "soft"}, r"ig.boxed: .*'hard' or 'none', got 'soft'"),
        ({"milestones": [0.1, "x"]}, r"ig.milestones\.1: .*got 'x'"),
        ({"prior": "tw"}, r"ig.prior: unknown prior 'tw'; did you mean 'tv'"),
        ({"priors": [{"name": "tv", "weight": -1}]}, r"priors\.0: prior 'tv': expected weight >= 0, got -1\.0"),
        ({"prior": 3}, r"prior: expected prior as a name or a mapping with 'name', got 3"),
    ],
)
def test_a_value_that_does_not_fit_names_its_field(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attacks.build({"name": "ig", **settings})


def test_a_spec_without_a_name_or_a_needed_value_is_refused() -> None:
    with pytest.raises(ValueError, match="expected attack as a name or a mapping with 'name'"):
        attacks.build({"lr": 1})
    with pytest.raises(ValueError, match="attack 'dlg': expected a value for restarts"):
        attacks.build("dlg")


def test_an_object_of_a_class_that_is_not_registered_is_answered_with_how_to_register_it() -> None:
    """Followed to the letter, the hint ends in an object that is taken."""

    class Mine(FedAvg):
        """A method of one's own."""

    with pytest.raises(ValueError, match="its class is not registered") as refused:
        methods.build(Mine(steps=1))
    assert "@fl.methods.methods.register('a-name') above @dataclass(frozen=True, kw_only=True) of" in str(refused.value)
    mine = fl.methods.methods.register("a-name")(dataclass(frozen=True, kw_only=True)(Mine))
    try:
        made = mine(steps=1)
        assert methods.build(made) is made
        assert methods.spec(made)["name"] == "a-name"
    finally:
        del methods._entries["a-name"]
    with pytest.raises(ValueError, match="give its name, 'fedavg', or an object of it"):
        methods.build(FedAvg)
    with pytest.raises(ValueError, match="none of ours: `hyperleak list methods` names those"):
        methods.build(object())


@pytest.mark.parametrize(
    "instance",
    [
        InvertingGradients(),
        InvertingGradients(
            lr=1e-6,
            metric=Metric.EUCLIDEAN,
            prior=TotalVariation(weight=3.0),
            priors=(TotalVariation(),),
            steps=(Step(1.0), Step(0.25, 4)),
            step=Step(1e-30),
            where=Path("a/b.npz"),
            scales={"tv": 1e-7},
        ),
        DeepLeakage(restarts=3),
    ],
)
def test_a_spec_survives_yaml(instance: object) -> None:
    text = yaml.safe_dump(attacks.spec(instance))
    assert attacks.build(yaml.safe_load(text)) == instance


def test_a_spec_needs_a_registered_object_and_plain_values() -> None:
    with pytest.raises(ValueError, match="expected a registered attack"):
        attacks.spec(TotalVariation())
    with pytest.raises(TypeError, match="attack 'any', thing: expected plain data, got object"):
        attacks.spec(Anything(thing=object()))
    assert attacks.spec(peel) == {"name": "peel"}


def test_examples_come_from_the_class_or_its_defaults() -> None:
    registry: Registry[Any] = Registry("prior", "fl")
    registry._searched = True
    registry._entries = {"ig": InvertingGradients, "peel": peel, "tv": TotalVariation}
    assert list(registry.examples()) == [
        ("ig", InvertingGradients(iterations=2)),
        ("peel", peel),
        ("tv", TotalVariation()),
    ]


def _package(root: Path, name: str, **modules: str) -> Registry[Any]:
    folder = root / name
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from fl.registry import Registry\nregistry = Registry('thing', {name!r})\nentries = registry\n"
    )
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return Registry("thing", name)


ENTRY = """
from dataclasses import dataclass
from {package} import registry

@registry.register("{name}")
@dataclass(frozen=True, kw_only=True)
class Thing:
    size: int = 1
"""


def test_a_file_in_the_package_is_all_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(
        tmp_path,
        "made_up_things",
        one=ENTRY.format(package="made_up_things", name="one"),
        two="import a_library_nobody_has\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    import made_up_things  # type: ignore[import-not-found]

    registry = made_up_things.registry
    assert "made_up_things.one" not in sys.modules  # imported at the first lookup, not before
    assert registry.names() == ["one"]
    assert registry.build({"name": "one", "size": 2}).size == 2
    assert registry.skipped_modules() == {
        "made_up_things.two": "made_up_things.two needs a_library_nobody_has, which is not installed"
    }
    with pytest.raises(UnknownNameError, match=r"known: one; made_up_things.two needs a_library_nobody_has"):
        registry.get("two")


@pytest.mark.parametrize(
    "fault", ["import fl.no_such_module", "raise RuntimeError('broken')", "from fl import nothing"]
)
def test_faults_in_our_own_code_are_not_skipped(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"faulty_things_{abs(hash(fault))}"
    registry = _package(tmp_path, name, broken=fault)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # a second lookup must not find an empty registry
        with pytest.raises((ImportError, RuntimeError)):
            registry.names()


@pytest.mark.parametrize("name", [["fedavg"], None, 3, {"name": "fedavg"}])
def test_names_that_are_no_text_are_unknown(name: object) -> None:
    with pytest.raises(UnknownNameError, match="unknown method"):
        methods.get(name)  # type: ignore[arg-type]
