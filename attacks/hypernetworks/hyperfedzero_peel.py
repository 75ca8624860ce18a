"""HyperFedZero without its random numbers: its update holds what flowed back to the networks that embed an image."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.base import NotApplicable, Reconstruction, ViewRewriter, attacks
from attacks.hypernetworks.rank_one_equations import effective_count
from attacks.update.observed_update import ObservedUpdate
from attacks.update.step_gradient import exact_step_gradient
from attacks.update.view_below_classifier import LAYER_SIGNAL, LayerSignal
from fl.methods.hyperfedzero import HyperFedZero
from fl.models.hyperfedzero import JoinedNet, ZeroNet
from fl.tensors import Tensors, dense
from fl.view import ServerView

MAX_RESIDUAL = 1e-3
"""Share of e's equations that may be left over, and distance of e's sum from 1, for the embedding to confirm itself."""
MIN_ROWS = 1.01
"""Rows of these equations, counted by what they weigh: of one alone a mixture of images would leave nothing either."""
EMBEDDER = "embedder."
LAST_LAYER = "fc"
"""Last layer of both networks: its bias's gradient is what flows back to them."""


class EmbeddingNetworks(nn.Module):
    """Extractor and noise network side by side."""

    def __init__(self, net: ZeroNet | JoinedNet) -> None:
        super().__init__()
        self.normalize, self.extractor, self.noisy = (
            copy.deepcopy(part) for part in (net.embedder.normalize, net.embedder.extractor, net.embedder.noisy)
        )
        self.joined = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both networks side by side (B, 2 P), from pixels (B, C, H, W)."""
        x = self.normalize(x)
        return self.joined(torch.cat([self.extractor(x), self.noisy(x)], -1))


@attacks.register("unembed")
@dataclass(frozen=True, kw_only=True)
class HyperFedZeroPeel(ViewRewriter):
    """Leaves the two small networks that embed an image of HyperFedZero's (Zhou et al., 2025), and nothing random.

    For one image in one step of SGD. Extractor f and noise network end in linear layers, whose bias gradients are
    exactly what flowed back to them, d_f and d_n, whatever noise z, classifier, label and penalties made of it. So
    <d_f, f(x)> + <d_n, noisy(x)> has, at the true image, the observed gradient in all parameters of both: the rest need
    not be known (as in `headless`). Both networks look at the same image, so the second, which the method has for its
    noise, doubles what the first gives away.

    The embedding e shows too: the hypernetwork's first layer is given e beside every chunk's embedding, so that its
    gradients are d e^T in e's columns and d in the bias, and e = dW^T db / |db|^2. (Where e is joined to the input,
    Opt. 1, the layer it is joined to gives it likewise.) From e the server makes the image's own classifier h(e); once
    another attack has found the image, its label is the one that explains the hypernetwork's gradient best.

    Threat model: an honest-but-curious server that sees one client's update and knows that it was one step of SGD
    on one image; neither label, classifier nor random numbers need be known.

    Attributes:
        part: "both" for a search; "extractor" leaves f alone, as a chain of layers, for attacks that solve one layer
            after the other.
    """

    plain: ClassVar[str] = (
        "cuts hyperfedzero down to the small network that looks at a picture first, so that no random number is left "
        "to guess."
    )

    part: Literal["both", "extractor"] = "both"

    def attack_view(self, view: ServerView, seed: int) -> Reconstruction | NotApplicable:
        """Return the embedding, without an image."""
        rewritten = self.rewrite(view)
        if isinstance(rewritten, NotApplicable):
            return rewritten
        read = rewritten.received[LAYER_SIGNAL]
        e, residual = dense(read["e"]).double(), float(dense(read["residual"]))
        told = float(dense(read["rows"])) >= MIN_ROWS
        sums = abs(float(e.sum()) - 1) < MAX_RESIDUAL and float(e.min()) > -MAX_RESIDUAL
        sure = told and residual < MAX_RESIDUAL and sums
        found: Tensors = {"embedding": read["e"]}
        return Reconstruction(None, view.labels, private=found, verified=sure and view.threat.knows_defense)

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of the embedding networks, without labels and noise."""
        if not isinstance(view.method, HyperFedZero):
            return NotApplicable(f"it opens hyperfedzero, not {view.method.name}")
        gradient = exact_step_gradient(view)
        if isinstance(gradient, NotApplicable):
            return gradient
        net = _network(view)
        signals = _backpropagated_signals(
            view, gradient, [f"{EMBEDDER}{part}.{LAST_LAYER}.bias" for part in ("extractor", "noisy")]
        )
        e = _embedding(net, gradient, view.method.embedding)
        for found in (signals, e):
            if isinstance(found, NotApplicable):
                return found
        assert isinstance(signals, Tensor)
        assert isinstance(e, dict)
        if self.part == "extractor":
            model: nn.Module = nn.Sequential()
            model.add_module("normalize", copy.deepcopy(net.embedder.normalize))
            model.add_module("extractor", copy.deepcopy(net.embedder.extractor))
            layer, delta = f"extractor.{LAST_LAYER}", signals[: view.method.embedding]
        else:
            model, layer, delta = EmbeddingNetworks(net), "joined", signals
        return _embedding_view(view, model, layer, gradient, {**e, "delta": delta})

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result with the image's embedding under `embedding`, and its label."""
        e = dense(rewritten.received[LAYER_SIGNAL]["e"])
        result = replace(result, private={**result.private, "embedding": e}, labels=view.labels)
        if result.inputs is None or view.labels is not None:
            return result
        return replace(result, labels=_likeliest_label(view, result.inputs, e))


def _network(view: ServerView) -> ZeroNet | JoinedNet:
    """Return the client's network with the weights that the server sent."""
    model = copy.deepcopy(view.client.fixed_statistics_model)
    known = {**view.shared, **view.buffers}
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name in known:
                value.copy_(dense(known[name]))
    assert isinstance(model, ZeroNet | JoinedNet)  # a defense that puts layers around it is refused before
    return model


def _backpropagated_signals(view: ServerView, gradient: Tensors, names: list[str]) -> Tensor | NotApplicable:
    """Return what flowed back to both networks (2 P,)."""
    found = []
    for name in names:
        if name not in gradient or not bool(dense(gradient[name]).any()):
            return NotApplicable(f"{name!r} did not move: nothing says what flows back")
        found.append(ObservedUpdate(view).before_defense(name, dense(gradient[name])))
    return torch.cat(found)


def _embedding(net: ZeroNet | JoinedNet, gradient: Tensors, size: int) -> Tensors | NotApplicable:
    """Return the image's e (P,), what share of its equations is left over, and how many rows there are of them."""
    weight, bias = "hypernet.layers.0.weight", "hypernet.layers.0.bias"
    if isinstance(net, JoinedNet):
        weight, bias = f"classifier.{net.joined}.condition", f"classifier.{net.joined}.inner.bias"
    if weight not in gradient or bias not in gradient or not bool(dense(gradient[bias]).any()):
        return NotApplicable(f"{bias!r} did not move: nothing says what the embedding is")
    signal, outer = dense(gradient[bias]).double(), dense(gradient[weight])[:, :size].double()
    e = signal @ outer / (signal @ signal)
    residual = (outer - torch.outer(signal, e)).norm() / outer.norm().clamp_min(1e-300)
    rows = effective_count(signal.square()[:, None])
    return {"e": e.to(dense(gradient[bias])), "residual": residual, "rows": rows}


def _embedding_view(view: ServerView, model: nn.Module, layer: str, gradient: Tensors, read: Tensors) -> ServerView:
    """Return the view of `model`, one step on <delta, output of its layer>."""
    names = [name for name, _ in model.named_parameters()]
    return replace(
        view,
        method=LayerSignal(layer=layer, train_mode=view.method.train_mode),
        defense=view.defense.with_unknown_scale(),
        task=replace(view.task, model=model, head="no head."),
        shared={name: view.shared[f"{EMBEDDER}{name}"] for name in names},
        update={name: gradient[f"{EMBEDDER}{name}"] for name in names if f"{EMBEDDER}{name}" in gradient},
        labels=None,
        schedule=(((1,),),),
        order=None,
        draws=None,
        buffers={},
        scale_unknown=False,  # the signals have the update's own factor
        received={LAYER_SIGNAL: read},
        history=(),
    )


def _likeliest_label(view: ServerView, image: Tensor, e: Tensor) -> Tensor:
    """Return the label (1,) whose cross entropy has the gradient nearest to that observed of h, or the classifier."""
    net = _network(view)
    moved = ObservedUpdate(view).gradient
    assert not isinstance(moved, NotApplicable)
    mine = {n: p for n, p in net.named_parameters() if p.requires_grad and not n.startswith(EMBEDDER) and n in moved}
    observed = torch.cat([dense(moved[name]).flatten() for name in mine])
    with torch.enable_grad():
        losses = -functional.log_softmax(net.classify(image.detach(), e[None]), -1)[0]
    scores = []
    for loss in losses:
        grads = torch.autograd.grad(loss, list(mine.values()), retain_graph=True, materialize_grads=True)
        scores.append(functional.cosine_similarity(torch.cat([g.flatten() for g in grads]), observed, dim=0))
    return torch.stack(scores).argmax().view(1)
