"""Networks of a user's own, by `task.model: module:function`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from fl.models import Network, models
from fl.models.function import FunctionNetwork, _fingerprint

SOURCE = """
import torch
from torch import nn

def build(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], num_classes), nn.Identity())

def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5))

def pair(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes)), torch.rand(1, 1, 4, 4), torch.zeros(1).long()

def text():
    return "a model"

def bare():
    return nn.Flatten()

def broken(num_classes):
    raise RuntimeError("no weights")

def needy(depth):
    return nn.Flatten()

def images():
    return nn.Conv2d(1, 3, 1)

calls = []

def restless(num_classes):
    calls.append(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
    nn.init.constant_(model[1].bias, len(calls))
    return model

def frozen(num_classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
    model[1].bias.requires_grad_(False)
    return model

ready = fixed()
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_networks", None)
    _fingerprint.cache_clear()


def network(function: str, **settings: object) -> Network:
    return models.build({"name": f"own_networks:{function}", "input_shape": (1, 4, 4), **settings})


@pytest.mark.parametrize("function", ["build", "pair", "frozen"])
def test_starts_from_the_seed_and_leaves_the_global_generator(function: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (network(function).build_task(num_classes=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert first.num_classes == 3
    assert first.head == "1."
    for name, value in first.parameters.items():
        assert torch.equal(value, again.parameters[name])
        assert not torch.equal(value, other.parameters[name])


def test_frozen_weights_do_not_train() -> None:
    assert [*network("frozen").build_task(num_classes=3).parameters] == ["1.weight"]


def test_short_form_is_built_written_and_read() -> None:
    built = models.build("own_networks:build")
    assert built == FunctionNetwork(function="own_networks:build")
    assert models.build(yaml.safe_load(yaml.safe_dump(models.spec(built)))) == built


def test_a_model_itself_is_copied() -> None:
    first, second = (network("ready").build_task(num_classes=5) for _ in range(2))
    with torch.no_grad():
        first.model[1].bias.fill_(7.0)
    assert not torch.equal(first.model[1].bias, second.model[1].bias)


def test_a_layer_that_normalizes_is_put_before() -> None:
    plain = network("build", mean=[0.5], std=[0.25]).build_task(num_classes=3)
    layered = network("build", normalize=True, mean=[0.5], std=[0.25]).build_task(num_classes=3)
    assert plain.mean == layered.mean == (0.5,)
    assert layered.head == "network.1."
    x = torch.rand(2, 1, 4, 4)
    assert torch.allclose(layered.model(x), plain.model((x - 0.5) / 0.25))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("biuld", "expected a function 'biuld' in own_networks, found none; did you mean 'build'?"),
        ("fixed", "expected 3 outputs, one for each class of the data set, got 5; let the function take num_classes"),
        ("text", "expected own_networks:text to return a model or .*, got str"),
        ("bare", "expected own_networks:bare to return a model with parameters, got one without"),
        ("broken", r"own_networks:broken raised RuntimeError: no weights \(line \d+\)"),
        ("needy", "or with num_classes and input_shape where it takes them"),
        ("images", r"expected a model that returns logits \(B, K\), got \(1, 3, 4, 4\)"),
    ],
)
def test_what_is_no_network_is_said(function: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        network(function).build_task(num_classes=3)
    assert str(caught.value).startswith("task.model")
    assert "\n" not in str(caught.value)


def test_a_missing_module_is_said() -> None:
    with pytest.raises(ValueError, match=r"task\.model: no module 'own_netwroks' in "):
        models.build({"name": "own_netwroks:build", "input_shape": (1, 4, 4)}).build_task(num_classes=3)


@pytest.mark.parametrize("name", ["own_networks:", ":build"])
def test_half_a_name_is_said(name: str) -> None:
    with pytest.raises(ValueError, match="expected module:function such as my_model:build"):
        models.build(name)


def test_fingerprint_follows_source_and_weights(tmp_path: Path) -> None:
    def again() -> str:
        sys.modules.pop("own_networks", None)
        _fingerprint.cache_clear()
        return network("build").fingerprint(num_classes=3, seed=0)

    first = again()
    assert again() == first
    assert network("build").fingerprint(num_classes=3, seed=1) != first
    (tmp_path / "own_networks.py").write_text(SOURCE.replace("nn.Identity()", "nn.Identity(), nn.ReLU()"))
    assert again() != first


def test_other_weights_at_every_call_are_refused() -> None:
    with pytest.raises(ValueError, match="same weights for the same seed, got others at the second call"):
        network("restless").fingerprint(num_classes=3, seed=0)


def test_timm_networks_start_as_timm_starts_them() -> None:
    timm = pytest.importorskip("timm")
    settings = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3}
    Path("timm_networks.py").write_text(
        f"import timm\n\ndef build():\n    return timm.create_model('test_vit', **{settings})\n"
    )
    chosen = {"name": "timm_networks:build", "input_shape": (1, 8, 8), "normalize": True}
    task = models.build(chosen).build_task(num_classes=3, seed=4)
    with torch.random.fork_rng():
        torch.manual_seed(4)  # noqa: TID251
        expected = timm.create_model("test_vit", **settings)
    for name, value in expected.state_dict().items():
        assert torch.equal(task.model.state_dict()[f"network.{name}"], value)
    assert (task.mean, task.std) == ((0.1307,), (0.3081,))
    assert task.model.normalize.mean.item() == pytest.approx(0.1307)
    assert task.model(torch.rand(2, 1, 8, 8)).isfinite().all()
