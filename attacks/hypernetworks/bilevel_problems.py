"""The two levels of the tailored attack on HyperFL are problems that a batch evaluates together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attacks.gradient_matching.engine.objectives import l2, normalize
from attacks.gradient_matching.engine.problem import INPUTS, Variables, private_key
from attacks.gradient_matching.engine.regularizers import total_variation
from attacks.hypernetworks.hypernet_view import HypernetView
from fl.client import Client
from fl.models.hypernetworks.hypernetwork import EMBEDDING, TRUNK_WEIGHT, Hypernetwork
from fl.network import Network
from fl.tensors import Tensors, compress, dense
from fl.view import ServerView

MAX_RANK = 8
"""Outer products kept of a dense upload of many steps."""


@dataclass(frozen=True)
class EmbeddingProblem:
    """The lower level: what a guess of embedding and output would have sent, compared with what was sent.

    The gradient of the inner loss is outer products, and so is the observed one (a dense upload is cut down to as many
    as there were steps): none is ever multiplied out.

    Attributes:
        view: the server's.
        observed: the hypernetwork's gradient, without decay and step size.
        inner: the inner loss: "squared" or "logcosh".
    """

    view: ServerView
    observed: Tensors
    inner: str

    @classmethod
    def of(cls, hypernet: HypernetView, inner: str) -> EmbeddingProblem:
        """Return the problem of a view whose decay is known."""
        rank = min(hypernet.steps or MAX_RANK, MAX_RANK)
        observed: Tensors = {}
        for name in hypernet.update.shared:  # not a shared classifier or further payloads: no inner loss reaches them
            value = hypernet.change[name]
            if name.startswith("hypernet.heads.") and isinstance(value, Tensor) and value.ndim == 2:
                value = compress(value, min(rank, *value.shape))
            observed[name] = value
        lr = hypernet.group.lr
        return cls(hypernet.view, {name: value * (1 / lr) for name, value in observed.items()}, inner)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""
        observed, size = normalize(self.observed)
        return {"shared": self.view.shared, "update": self.view.update, "observed": observed, "size": size}

    def initial_variables(self, draw: torch.Generator, *, normal: bool) -> Variables:
        """Return an embedding and an output to begin with: that of the embedding, or N(0, 1)."""
        like = dense(self.view.shared[TRUNK_WEIGHT])
        v = torch.randn(like.shape[1], generator=draw).to(like)
        theta = self.generate(v)
        if normal:
            theta = {n: torch.randn(w.shape, generator=draw).to(w) for n, w in theta.items()}
        return {private_key(EMBEDDING): v} | {private_key(n): w for n, w in theta.items()}

    def generate(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return h(v), by the network's names."""
        return self._generator.generate(_hypernet_parameters(self.view, embedding), self.view.client.task)

    def objective(self, embedding: Tensor, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the squared distance of the inner loss's gradient and the observed one, relative to the latter."""
        guess = {private_key(EMBEDDING): embedding} | {private_key(n): w for n, w in outputs.items()}
        return self.value(guess, self.constants, self.view.client, vmapped=False)

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return the same of variables, with the tensors of `constants`.

        Args:
            variables: embedding and output, by name.
            constants: tensors of the problem, perhaps of another in the batch.
            client: of the view.
            vmapped: whether this runs under `torch.vmap`; nothing depends on it.
        """
        view = replace(self.view, shared=constants["shared"], update=constants["update"])
        params, generator = _hypernet_parameters(view, variables[private_key(EMBEDDING)]), self._generator
        made = generator.generate(params, client.task)
        residuals = {n: w - variables[private_key(n)] for n, w in made.items()}
        if self.inner == "logcosh":
            residuals = {n: r.tanh() for n, r in residuals.items()}
        predicted = generator.pullback(params, residuals, client.task, list(constants["observed"]))
        if view.threat.knows_defense:
            predicted = view.defense.surrogate(predicted, view.update)
        return l2(predicted, constants["observed"], constants["size"])

    @property
    def _generator(self) -> Hypernetwork:
        generator = self.view.method.parametrization
        assert isinstance(generator, Hypernetwork)
        return generator


def _hypernet_parameters(view: ServerView, embedding: Tensor) -> Tensors:
    return view.method.parametrization.lift({**view.shared, EMBEDDING: embedding})


@dataclass(frozen=True)
class ImageProblem:
    """The upper level: images whose labels a classifier of any start finds behind the extractor that was recovered.

    Attributes:
        view: the server's.
        extractor: recovered, by the network's names.
        labels: (N,) known ones, or drawn.
        tv: weight of the total variation, in normalized units.
        moves: whose gradient is wanted: "images" or "classifier"; the others' is zero.
    """

    view: ServerView
    extractor: dict[str, Tensor]
    labels: Tensor
    tv_weight: float
    optimized: str = "images"

    @cached_property
    def constants(self) -> dict[str, Any]:
        """All tensors of the problem, as one tree."""
        view, task = self.view, self.view.client.task
        offset, scale = (
            torch.tensor(x, dtype=view.dtype, device=view.device).view(-1, 1, 1) for x in (task.mean, task.std)
        )
        return {
            "extractor": self.extractor,
            "labels": self.labels,
            "buffers": {**task.buffers, **view.buffers},
            "offset": offset,
            "scale": scale,
        }

    def initial_variables(self, draw: torch.Generator) -> Variables:
        """Return images from N(0, 1) in normalized units, and a classifier.

        That is as it was sent, else its biases are 0 and its weights N(0, 1 / fan-in).
        """
        task = self.view.client.task
        made = {INPUTS: torch.randn(len(self.labels), *task.input_shape, generator=draw)}
        for name, like in task.parameters.items():
            if name.startswith(task.head):
                drawn = torch.randn(like.shape, generator=draw) if like.ndim > 1 else torch.zeros(like.shape)
                sent = self.view.shared.get(name)
                made[private_key(name)] = drawn / like.shape[1:].numel() ** 0.5 if sent is None else dense(sent)
        return {name: value.to(dtype=self.view.dtype, device=self.view.device) for name, value in made.items()}

    def value(self, variables: Variables, constants: dict[str, Any], client: Client, *, vmapped: bool) -> Tensor:
        """Return the cross-entropy plus the total variation.

        Args:
            variables: images, and the classifier's parameters.
            constants: tensors of the problem, perhaps of another in the batch.
            client: of the view.
            vmapped: whether this runs under `torch.vmap`; nothing depends on it.
        """
        classifier = {n: variables[private_key(n)] for n in client.task.parameters if private_key(n) in variables}
        inputs = variables[INPUTS]
        if self.optimized == "images":
            classifier = {name: value.detach() for name, value in classifier.items()}
        else:
            inputs = inputs.detach()
        pixels = inputs * constants["scale"] + constants["offset"]
        network = Network(client.predictor, {**constants["extractor"], **classifier}, constants["buffers"])
        loss = nn.functional.cross_entropy(network(pixels), constants["labels"])
        return loss + self.tv_weight * total_variation(pixels, constants["scale"].flatten())
