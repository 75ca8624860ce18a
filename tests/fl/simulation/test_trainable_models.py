"""Models of people's own whose forward trains nothing, or something else, are refused; others are taken as they are."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attacks
import hyperleak
from attacks.base import Reconstruction
from fl.capture import from_batch
from fl.methods.fedper import FedPer
from fl.models.building_blocks.initialization import initialize
from fl.models.building_blocks.model_checks import find_head
from fl.seeds import stream

SHAPE, LABEL = (1, 8, 8), torch.tensor([2])


def image() -> Tensor:
    return (255 * torch.rand(1, *SHAPE, generator=stream(0, "trainable"))).round() / 255


def dense() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 5))
    initialize(model, stream(1, "trainable"))
    return model


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = dense()


class WithoutGradient(Wrapped):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


class ByNumPy(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.body(x).detach().numpy())


class OfAnother(nn.Module):
    """Runs a network that is none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.head = [dense()], nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.other[0](x)
        return logits


def bound_to_another() -> nn.Module:
    model = dense()
    own = model[1].forward
    model[1].forward = lambda x: own(2 * x)  # type: ignore[method-assign]
    return model


def under_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def of_integers() -> nn.Module:
    model = dense()
    model[3] = type("Linear", (nn.Identity,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})()
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (WithoutGradient, "what it returns has no gradient: its forward runs under"),
        (ByNumPy, "or goes by .detach.., .data or NumPy"),
        (OfAnother, "none of a copy's gets a gradient"),
        (bound_to_another, "got a function as that of '1', which a copy would share with the original"),
        (under_inference, "got '1.weight', made under torch.inference_mode"),
        (lambda: dense().to("meta"), "got '1.weight', on the device meta"),
        (of_integers, "got Linear in '3', whose integers nobody trains"),
    ],
)
def test_what_trains_nothing_of_its_own_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    """The update would be zero, which looks as if nothing leaked."""
    with pytest.raises(ValueError, match=said):
        from_batch(build(), image(), LABEL)


def of_a_method() -> nn.Module:
    model = dense()
    model.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, 2 * x - 1), model)  # type: ignore[method-assign]
    return model


def compiled_forward() -> nn.Module:
    model = dense()
    model[1].forward = torch.compile(model[1].forward, backend="eager")  # type: ignore[method-assign]
    return model


def with_compiled_parts() -> nn.Module:
    body, *rest = dense()
    return nn.Sequential(body, *(torch.compile(part, backend="eager") for part in rest))  # type: ignore[arg-type]


def with_parallel_parts() -> nn.Module:
    return nn.Sequential(torch.compile(nn.DataParallel(dense()), backend="eager"), nn.Identity())  # type: ignore[arg-type]


def with_a_part_switched_off() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), *dense())
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    return model


def exported() -> nn.Module:
    return torch.export.export(dense(), (image(),)).module()


@pytest.mark.parametrize(
    "build",
    [of_a_method, compiled_forward, with_compiled_parts, with_parallel_parts, with_a_part_switched_off, exported],
)
def test_what_computes_with_its_own_parameters_is_attacked(build: Callable[[], nn.Module]) -> None:
    found = attacks.build("analytic")(from_batch(build(), image(), LABEL)[0])
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert found.inputs is not None
    torch.testing.assert_close(found.inputs, image(), atol=1e-4, rtol=0)


def test_wrapped_parts_keep_the_names_of_the_state() -> None:
    model = with_compiled_parts()
    view = from_batch(model, image(), LABEL)[0]
    assert set(view.update) == set(model.state_dict())
    assert any("_orig_mod" in name for name in view.update)


def test_a_classifier_is_found_that_is_not_defined_last() -> None:
    early = nn.ModuleDict({"head": nn.Linear(6, 5), "body": nn.Linear(8, 6)})
    assert find_head(early, None, 5) == "head."
    bare = nn.ParameterDict({"w": nn.Parameter(torch.zeros(6, 8)), "last": nn.Parameter(torch.zeros(5, 6))})
    assert find_head(bare, None, 5) == "last"
    with pytest.raises(ValueError, match="found none; give head="):
        find_head(nn.Conv2d(1, 5, 3), None, 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.Linear, "got type; that is the class: give an object of it, Linear"),
        (lambda x: x, "got function; a function goes into the forward of an nn.Module"),
        (type("ModelProto", (), {})(), "got ModelProto; ONNX holds no nn.Module"),
        (
            type("ExportedProgram", (), {})(),
            r"got ExportedProgram; give the nn.Module that was exported, or program.mod",
        ),
    ],
)
def test_what_is_no_model_is_answered_with_how_it_becomes_one(given: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        hyperleak.audit(given, image(), LABEL)  # type: ignore[call-overload]


class WithFurtherHead(Wrapped):
    """Returns a tensor in evaluation mode, and more in training mode, as GoogLeNet and Inception do."""

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        logits: Tensor = self.body(x)
        return {"logits": logits, "further": 2 * logits} if self.training else logits


def test_what_a_model_returns_in_training_mode_alone_is_taken_apart() -> None:
    found = attacks.build("analytic")(from_batch(WithFurtherHead().train(), image(), LABEL)[0])
    assert isinstance(found, Reconstruction)
    assert found.verified


class WithBareMatrices(nn.Module):
    """Has the matrices of its layers as its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.rand(8, 64, generator=stream(2, "trainable")) - 0.5)
        self.last = nn.Parameter(torch.rand(5, 8, generator=stream(3, "trainable")) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.inner.T).sigmoid() @ self.last.T


def test_a_classifier_beside_other_matrices_of_a_module_is_not_the_whole_module() -> None:
    """Where the classifier stays with a client, the others are sent."""
    model = nn.Sequential(WithBareMatrices())
    assert find_head(model, None, 5) == "0.last"
    assert set(from_batch(model, image(), LABEL, method=FedPer())[0].update) == {"0.inner"}
