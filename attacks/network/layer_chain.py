"""Extracts a network's chain of weighted layers, for attacks that undo it one layer at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attacks.network.curved_activations import TWO_INPUTS, CurvedActivation, ValleyActivation
from attacks.network.layer_sequence import Piece, read_pieces
from attacks.network.operation_recognition import (
    ElementwiseAffine,
    Permutation,
    Reshape,
    UnknownRest,
)
from attacks.network.operation_trace import Graph, first_difference, trace_operations
from attacks.network.reading_cache import cached_reading
from attacks.result import NotApplicable
from attacks.search_control import check_time_limit
from fl.seeds import stream
from fl.tensors import dense
from fl.view import ServerView

WEIGHTED = (nn.Conv2d, nn.Linear)
ACTIVATIONS = (nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.Tanh, CurvedActivation)
RESHAPING = (nn.Identity, nn.Flatten, Reshape)
POINTWISE = (*RESHAPING, ElementwiseAffine)
"""Linear maps that move or scale numbers one by one, so that they can be undone."""
SECOND_PROBE_BRIGHTNESS = 0.2
"""How bright the second probe is: a network that looks at the brightness of its images is found out by it."""


@dataclass(frozen=True)
class Stage:
    """A weighted layer with the linear maps around it and the activation above, in float64.

    Attributes:
        name: of the layer, as in the update.
        layer: the layer, with the weights that the server sent.
        shape: of what comes in, (C, H, W) or (F,).
        before: linear maps between the activation below and the layer.
        after: linear maps between the layer and its activation.
        activation: above; `nn.Identity` where there is none.
        names: of the layer's weight and bias in the update, where they are not called so; the bias's is empty where
            none is trained.
        places: where each number of weight and bias stands in the parameter of that name, where they lie otherwise.
        end_reason: why the chain ends with this layer although the network does not; empty where both end.
    """

    name: str
    layer: nn.Module
    shape: torch.Size
    before: nn.Sequential = field(default_factory=nn.Sequential)
    after: nn.Sequential = field(default_factory=nn.Sequential)
    activation: nn.Module = field(default_factory=nn.Identity)
    names: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Tensor] = field(default_factory=dict)
    end_reason: str = ""

    @property
    def pointwise(self) -> bool:
        """Whether what comes in follows from what the layer is given."""
        return all(isinstance(module, POINTWISE) for module in self.before)

    @property
    def layer_input_shape(self) -> torch.Size:
        """Shape of what the layer is given, which pooling below makes smaller than what comes in."""
        return self.layer_input(self.zero_input()).shape[1:]

    def parameter_name(self, kind: str) -> str:
        """Return the name of the layer's "weight" or "bias" in the update."""
        return self.names.get(kind, f"{self.name}.{kind}")

    def arrange(self, kind: str, sent: Tensor) -> Tensor:
        """Return what was sent of the layer's "weight" or "bias", as it lies in the layer."""
        return sent.flatten()[self.places[kind]].contiguous() if kind in self.places else sent

    def layer_input(self, values: Tensor) -> Tensor:
        """Return what the layer is given, from what comes in (N, *shape)."""
        result: Tensor = self.before(values)
        return result

    def zero_input(self, count: int = 1) -> Tensor:
        """Return zeros that may come in (count, *shape), where the layer's weight is."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight.new_zeros(count, *self.shape)

    def input_affine(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return the offset and slope (1, ...) of what comes in on its way to the layer; for pointwise maps.

        Max pooling may lie there, too: behind an activation that rises it passes on what that makes of pooled outputs.
        """
        zero = self.zero_input().to(dtype)
        offset = self.layer_input(zero)
        return offset, self.layer_input(zero + 1) - offset

    def undo_input_maps(self, given: Tensor) -> Tensor:
        """Return what comes in, from what the layer is given (N, ...); for pointwise maps."""
        offset, slope = self.input_affine(given.dtype)
        return ((given - offset) / slope).reshape(-1, *self.shape)

    def activation_input(self, given: Tensor) -> Tensor:
        """Return what the activation is given, from what the layer is given."""
        result: Tensor = self.after(self.layer(given))
        return result


def gradients_by_layer(stages: Sequence[Stage], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an update's tensors with those of the stages as they lie there, under `layer.weight` and `layer.bias`."""
    result = dict(sent)
    for stage in stages:
        for kind in ("weight", "bias"):
            if stage.parameter_name(kind) in sent and (
                kind in stage.places or stage.parameter_name(kind) != f"{stage.name}.{kind}"
            ):
                result[f"{stage.name}.{kind}"] = stage.arrange(kind, sent[stage.parameter_name(kind)])
    return result


def load_sent_weights(model: nn.Module, view: ServerView) -> nn.Module:
    """Return the network with the numbers that the server sent."""
    known = {**view.shared, **view.buffers}
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name in known:
                value.copy_(dense(known[name]))
    return model


Trace = tuple[nn.Module, Graph]


def trace_view(view: ServerView, device: torch.device | str = "cpu", *, count: int = 1) -> Trace | NotApplicable:
    """Return the network of `view` in double precision, and what it computes from images, or why that can't be told.

    While an attack runs others may be given the same (`attacks.network.reading_cache`): it is not to be changed.

    Args:
        view: what the server saw.
        device: where it computes.
        count: of the images.
    """
    what = ("trace", torch.device(device), count)
    return cached_reading(view, what, lambda: make_trace(view, device, count=count), _count_numbers)


def _count_numbers(trace: Trace | NotApplicable) -> int:
    if isinstance(trace, NotApplicable):
        return 0
    model, graph = trace
    made = sum(output.numel() for node in graph.nodes for output in node.outputs)
    return made + sum(value.numel() for value in model.parameters())


def make_trace(
    view: ServerView,
    device: torch.device | str = "cpu",
    *,
    count: int = 1,
    dtype: torch.dtype = torch.float64,
    running_statistics: bool = False,
) -> Trace | NotApplicable:
    """Return a network and its trace that are the caller's own, as `trace_view` does, in any precision.

    Args:
        view: what the server saw.
        device: where it computes.
        count: of the images.
        dtype: in which it computes.
        running_statistics: whether batch normalization uses these, as in evaluation mode. In training mode a network
            does not run on one image where it normalizes channels of one position.
    """
    check_time_limit()
    model = load_sent_weights(view.client.network_in(dtype, device), view)
    if running_statistics:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        check_time_limit()
        if not bool(value.isfinite().all()):
            return NotApplicable(f"the model has numbers at {name} that are not finite")
        value.data = value.data.contiguous()  # sums are taken in the order of memory
    probe = torch.rand(count, *view.task.input_shape, generator=stream(0, "unroll"), dtype=torch.float64)
    probe = probe.to(device, dtype)
    graphs = []
    for image in (probe, SECOND_PROBE_BRIGHTNESS * probe.flip(-1)):
        graph = trace_operations(model, image)
        if isinstance(graph, str):
            return NotApplicable(graph, limit=True)
        graphs.append(graph)
    if apart := first_difference(*graphs):
        return NotApplicable(f"what the network computes depends on the image: see {apart}", limit=True)
    return model, graphs[0]


def extract_layer_chain(
    view: ServerView, *, lossy: bool = False, device: torch.device | str = "cpu"
) -> tuple[Stage, ...] | NotApplicable:
    """Return the network of `view` as stages on `device`, bottom first, or why it is no such chain.

    `lossy` lets max pooling stand among the linear maps, and activations that fall and rise above layers, for
    attacks that know what to do with them.

    What the network computes from two images of noise is recorded, operation by operation
    (`attacks.network.operation_trace`), cut where all of it passes through one tensor, and each part told by what it
    does (`attacks.network.operation_recognition`): the way forward is written does not count. The stages must give
    every layer what the network gives it, and send back what the network does. Where the chain breaks off above a
    linear layer with a bias, it ends with that layer.

    Args:
        view: what the server saw.
        lossy: whether what hides some of its input may stand between layers.
        device: where the stages are made.
    """
    found = trace_view(view, device)
    if isinstance(found, NotApplicable):
        return found
    model, graph = found
    pieces: list[Piece] = []  # those that the chain reaches to
    stages = _build_stages(view, _record_pieces(read_pieces(graph), pieces), lossy)
    if isinstance(stages, NotApplicable):
        return stages
    if apart := _forward_mismatch(stages, pieces, graph.image) or _gradient_mismatch(
        stages, pieces, model, graph.image
    ):
        return NotApplicable(apart, limit=True)
    return stages


def _forward_mismatch(stages: Sequence[Stage], pieces: Sequence[Piece], probe: Tensor) -> str | None:
    """Say which layer returns something else in the network than in its stage; None if all agree."""
    right, values = {piece.name: piece.output for piece in pieces if piece.name}, probe
    with torch.no_grad():
        for stage in stages:
            given = stage.layer_input(values)
            returned, expected = stage.layer(given), right[stage.name]
            if returned.numel() != expected.numel() or not torch.allclose(returned, expected.view_as(returned)):
                return f"the network is no plain chain of layers: {stage.name} is given something else than it seems"
            values = stage.activation(stage.activation_input(given))
    return None


def _gradient_mismatch(stages: Sequence[Stage], pieces: Sequence[Piece], model: nn.Module, probe: Tensor) -> str | None:
    """Return the layer whose gradient in the network differs from its stage's; None if all agree."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    mine = [(stage, kind) for stage in stages for kind in ("weight", "bias") if stage.parameter_name(kind) in trained]
    if not mine:
        return None
    with torch.enable_grad():
        returned = model(probe.clone())
        draw = torch.randn(returned.shape, generator=stream(1, "unroll"), dtype=torch.float64).to(returned)
        grads = torch.autograd.grad((returned * draw).sum(), list(trained.values()), allow_unused=True)
        right, values = dict(zip(trained, grads, strict=True)), probe
        for stage in stages:
            values = stage.activation(stage.activation_input(stage.layer_input(values)))
        flows = draw
        if stages[-1].end_reason:
            signal = right.get(stages[-1].parameter_name("bias"))
            if signal is None:
                return None
            flows = stages[-1].arrange("bias", signal)
        end = values if stages[-1].end_reason else _network_output(pieces, values)
        if end.numel() != flows.numel():
            return f"the network is no plain chain of layers: it returns something else than {stages[-1].name}"
        end = end * flows.reshape(end.shape)  # which may be arranged otherwise behind the last layer
        found = torch.autograd.grad(end.sum(), [s.layer.get_parameter(kind) for s, kind in mine], allow_unused=True)
    for (stage, kind), got in zip(mine, found, strict=True):
        expected = right[stage.parameter_name(kind)]
        if (expected is None) != (got is None):
            return f"no gradient reaches {stage.parameter_name(kind)} in the network by way of what is computed from it"
        if expected is None or got is None:
            continue
        size = float(got.abs().max())
        if not torch.allclose(stage.arrange(kind, expected), got, rtol=1e-6, atol=1e-9 * size):
            other = "it is used elsewhere, or what flows back is changed"
            return f"the gradient of {stage.parameter_name(kind)} is not that of the layer alone: {other}"
    return None


def _network_output(pieces: Sequence[Piece], values: Tensor) -> Tensor:
    """Return what the network returns of logits: a log-softmax at the end, which cross entropy does not see."""
    return values.log_softmax(1) if pieces and pieces[-1].normalizes else values


def _record_pieces(pieces: Iterable[Piece], kept: list[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        kept.append(piece)
        yield piece


def _build_stages(view: ServerView, pieces: Iterable[Piece], lossy: bool) -> tuple[Stage, ...] | NotApplicable:
    """Return the pieces put together to stages, as far up as they go."""
    stages: list[Stage] = []
    pending: list[nn.Module] = []
    shape, closed = torch.Size(view.task.input_shape), True
    refused: NotApplicable | None = None
    for piece in pieces:
        refused = _refusal(view, piece, lossy)
        if refused is None and isinstance(piece.module, ACTIVATIONS) and closed:
            reason = f"no weighted layer stands between the activation {piece.place} and "
            reason += "the one below" if stages else "the image"
            refused = NotApplicable(reason, limit=True)
        if refused is None and any(piece.name and piece.name == stage.name for stage in stages):
            refused = NotApplicable(f"{piece.name} runs twice, so that its gradients are summed", limit=True)
        if refused is not None:
            break
        assert piece.module is not None
        if isinstance(piece.module, WEIGHTED):
            if not closed:
                stages[-1] = replace(stages[-1], after=nn.Sequential(*pending))
                pending, shape = [], piece.input.shape[1:]
            stages.append(_build_stage(piece, shape, pending))
            pending, closed = [], False
        elif isinstance(piece.module, ACTIVATIONS):
            moved = _first_movable(pending)
            stages[-1] = replace(stages[-1], after=nn.Sequential(*pending[:moved]), activation=piece.module)
            pending, closed = pending[moved:], True
            shape = piece.output.shape[1:] if not pending else _shape_before(pending)
        else:
            pending += list(piece.module) if isinstance(piece.module, nn.Sequential) else [piece.module]
    if refused is not None:
        return _end_at_last_linear(stages, refused)
    if stages and not closed:
        stages[-1] = replace(stages[-1], after=nn.Sequential(*pending))
    return tuple(stages) if stages else NotApplicable("the network has no convolution and no linear layer", limit=True)


def _end_at_last_linear(stages: Sequence[Stage], refused: NotApplicable) -> tuple[Stage, ...] | NotApplicable:
    """Return the chain up to its last linear layer with a bias, whose gradient says what flows back, if it has one."""
    for i in reversed(range(len(stages))):
        stage = stages[i]
        if isinstance(stage.layer, nn.Linear) and stage.layer.bias is not None and stage.parameter_name("bias"):
            end = replace(stage, after=nn.Sequential(), activation=UnknownRest(), end_reason=refused.reason)
            return (*stages[:i], end)
    return refused


def _first_movable(pending: Sequence[nn.Module]) -> int:
    """Return the first map below an activation from which on all may as well stand above it: reorderings."""
    for i, module in enumerate(pending):
        if isinstance(module, Permutation) and all(
            isinstance(m, Permutation | nn.Flatten | Reshape) for m in pending[i:]
        ):
            return i
    return len(pending)


def _shape_before(pending: Sequence[nn.Module]) -> torch.Size:
    first = pending[0]
    assert isinstance(first, Permutation)
    return first.shape


def _build_stage(piece: Piece, shape: torch.Size, pending: Sequence[nn.Module]) -> Stage:
    """Return a stage whose layer takes its input in the input's own order, where a permutation changes only that."""
    layer, places, maps = piece.module, dict(piece.places), list(pending)
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    at = next((i for i, module in enumerate(maps) if isinstance(module, Permutation)), None)
    if at is not None and all(
        isinstance(module, nn.Flatten | Reshape | ElementwiseAffine) for module in maps[at + 1 :]
    ):
        turned = maps[at]
        assert isinstance(turned, Permutation)
        order = turned.index if isinstance(layer, nn.Linear) else _channel_order(turned, piece.input.shape[1:])
        if order is not None:
            layer, places["weight"] = _permute_inputs(layer, order, places.get("weight"))
            maps[at:] = (
                [turned.undo_scalings(maps[at + 1 :])]
                if any(isinstance(m, ElementwiseAffine) for m in maps[at:])
                else []
            )
            maps += [nn.Flatten()] if isinstance(layer, nn.Linear) and len(turned.shape) > 1 else []
    return Stage(piece.name, layer, shape, nn.Sequential(*maps), names=piece.names, places=places)


def _channel_order(turned: Permutation, taken: torch.Size) -> Tensor | None:
    """Return the order of whole channels, where a permutation changes no more than that."""
    if turned.shape != taken:
        return None
    index = turned.index.view(taken[0], -1)
    order = index[:, 0] // index.shape[1]
    whole = order[:, None] * index.shape[1] + torch.arange(index.shape[1], device=index.device)
    return order if torch.equal(index, whole) else None


def _permute_inputs(
    layer: nn.Conv2d | nn.Linear, order: Tensor, places: Tensor | None
) -> tuple[nn.Conv2d | nn.Linear, Tensor]:
    """Return the layer that takes what comes before a permutation, and where its weight stands as sent."""
    weight = layer.weight
    if places is None:
        places = torch.arange(weight.numel(), device=weight.device).view_as(weight)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    turned = copy.copy(layer)
    turned._parameters = dict(layer._parameters)
    turned.weight = nn.Parameter(weight.detach()[:, back], requires_grad=weight.requires_grad)
    return turned, places[:, back]


def _refusal(view: ServerView, piece: Piece, lossy: bool) -> NotApplicable | None:
    """Return why a piece can't be undone, or None."""
    hidden = sorted(name for name in piece.sources if name in view.private)
    if hidden and not hidden[0].startswith(view.task.head or "?"):
        return NotApplicable(f"the server does not know {hidden[0]}")
    if piece.refusal:
        hint = "; see the attack cascade" if "max pooling" in piece.refusal and not lossy else ""
        return NotApplicable(f"{piece.refusal}{hint}", limit=True)
    parts = piece.module if isinstance(piece.module, nn.Sequential) else [piece.module]
    if not lossy and any(isinstance(part, nn.MaxPool2d) for part in parts):
        hides = "max pooling is not linear and hides which values it took; see the attack cascade"
        return NotApplicable(f"{piece.place}: {hides}", limit=True)
    if not lossy and isinstance(piece.module, ValleyActivation):
        return NotApplicable(f"{TWO_INPUTS.format(piece.place)}; see the attack cascade", limit=True)
    return None
