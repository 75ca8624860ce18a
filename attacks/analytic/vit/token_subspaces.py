"""Tells the images of a batch apart by the subspaces in which a vision transformer's gradient puts their tokens.

A linear layer that every token goes through has the weight gradient sum over images b and tokens t of s_bt h_bt^T, with
inputs h_bt and signals s_bt. Where there are fewer tokens N than numbers in h, and the signals are independent, its
rows span what the h_bt span and no more: a token of the batch leaves nothing outside. DAGER (Petrov et al., NeurIPS
2024, arXiv 2405.15586) tries words by that, TIGER (2606.18312) makes words leave little. Pixels can't be tried one by
one. But attention mixes tokens of one image alone, so these are equations for ONE image. Its patches x_t, put through
the first blocks, leave nothing outside:

    (I - U_l U_l^T) h_lt(x_1 ... x_T) = 0    for all layers l and tokens t; U_l spans the rows of layer l's gradient

They are smooth, the patches lie in a known subspace, too (that of the patch layer's gradient), and far more equations
than unknowns are left as long as N is well below the numbers of a token. Levenberg-Marquardt from gray ends at one of
the images to the last digit, where it does not get stuck. Its gradient g, with its label, is subtracted, and what
remains is the gradient of one image less; the last one follows in closed form (APRIL).

Label and factor: with G of rank N and G^+ its pseudo-inverse, G^+ g is lambda times a projector if g is lambda times
what the image put into G, and of no other label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from attacks.analytic.vit.patch_equations import PatchSolution
from attacks.analytic.vit.token_embedding import TokenEmbedding
from attacks.network.operation_recognition import has_trained_weight, product_operands
from attacks.network.operation_trace import IMAGE, Graph, Ref
from attacks.search_control import check_time_limit
from fl.seeds import stream

MAX_LAYERS = 8
"""Layers above the embedding whose subspaces are used: two blocks."""
MIN_RANK_DROP = 1e2
"""Factor by which singular values fall at the rank."""
MAX_NULL_SHARE = 1e-13
"""Size of the next singular value, relative to the largest."""
MAX_OUTSIDE = 1e-3
"""Share of a row outside its layer's subspace up to which it lies inside, in a rehearsal in double precision."""
MIN_SINGULAR_TO_NOISE = 3.0
"""How many times its noise a singular value must be to be told."""
MAX_STARTS = 4
"""Starts for each image."""
MAX_STEPS = 40
"""Gauss-Newton steps from each start."""
MAX_INNER_STEPS = 300
"""Conjugate gradient steps for each of these."""
MIN_GAIN = 1e-3
"""Share of a sum of squares below which a step that promises no more is the last."""
MAX_LABEL_DISTANCE = 0.2
"""Distance from a multiple of a projector, relative to it, up to which a label is believed."""
MAX_FRACTION = 0.05
"""How far from a whole number the copies of an image may be."""
MAX_SHARE_OF_NOTHING = 1e-5
"""Share of a batch's gradient up to which what is left of it is what single precision computes otherwise."""
MAX_DISTANCE_TO_LEVELS = 0.15 / 255
"""Root mean square distance to levels of 8 bits up to which pixels are taken to be on levels (0.29 by chance)."""


@dataclass(frozen=True)
class TokenLayer:
    """A product of tokens with a weight.

    Attributes:
        name: of the weight.
        tokens: what is multiplied: the tokens, one a row, or one a column if `columns`.
        shape: of the weight as it is multiplied.
        places: where each of its numbers stands in the parameter; None where they lie alike.
        columns: whether the weight stands first.
    """

    name: str
    tokens: Ref
    shape: torch.Size
    places: Tensor | None
    columns: bool

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.shape[-1] if self.columns else self.shape[-2]

    def arrange(self, sent: Tensor) -> Tensor:
        """Return the weight's gradient with a row for each number of a token (d, outputs)."""
        placed = (sent if self.places is None else sent.flatten()[self.places]).reshape(self.shape)
        return placed.flatten(0, -2).mT if self.columns else placed.flatten(0, -2)

    def rows(self, values: Mapping[Ref, Tensor]) -> Tensor:
        """Return the tokens one a row (n, d)."""
        given = values[self.tokens]
        return given.flatten(0, -2).mT if self.columns else given.flatten(0, -2)


@dataclass(frozen=True)
class Subspace:
    """The subspace that a layer's tokens lie in.

    Attributes:
        layer: the layer.
        basis: orthonormal columns (d, r).
        sizes: the gradient's singular values along them (r,).
        inside: which of an image's tokens lie in it (n,).
        noise: of each number of the gradient, standard deviation.
    """

    layer: TokenLayer
    basis: Tensor
    sizes: Tensor
    inside: Tensor
    noise: float

    @property
    def equations(self) -> int:
        """How many equations it gives for an image."""
        return int(self.inside.sum()) * (self.basis.shape[0] - self.basis.shape[1])

    def outside(self, values: Mapping[Ref, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what is outside of the tokens that should be inside (n', d), and the tokens (n', d)."""
        rows = self.layer.rows(values)[self.inside]
        return rows - (rows @ self.basis) @ self.basis.mT, rows

    def expected_error(self, rows: Tensor) -> Tensor:
        """Return what noise of the gradient leaves outside in each direction of each token (n', 1).

        A token h is U S w for some w; noise E of the gradient turns it by E w.
        """
        least = 1e-13 * rows.norm(dim=1, keepdim=True)
        return (self.noise * ((rows @ self.basis) / self.sizes).norm(dim=1, keepdim=True)).clamp_min(least)


@dataclass(frozen=True)
class TokenNetwork:
    """A vision transformer as its subspaces see it.

    Attributes:
        model: in double precision.
        graph: what it computes from one image.
        embedding: how it makes tokens of it.
        layers: the first that tokens go through.
    """

    model: nn.Module
    graph: Graph
    embedding: TokenEmbedding
    layers: tuple[TokenLayer, ...]

    @classmethod
    def of(cls, model: nn.Module, graph: Graph, embedding: TokenEmbedding) -> TokenNetwork:
        """Return the network with the layers found in its graph."""
        layers: list[TokenLayer] = []
        for number in graph.used_operations():
            node = graph.nodes[number]
            if number <= embedding.layer_node or node.operation == "convolution" or not has_trained_weight(graph, node):
                continue
            first, second = product_operands(node)
            columns = graph.depends_on_image(second)
            weight, tokens = (first, second) if columns else (second, first)
            parameter = graph.as_parameter(weight)
            if parameter is not None and len(layers) < MAX_LAYERS:
                layers.append(TokenLayer(parameter[0], tokens, graph.value(weight).shape, parameter[1], columns))
        return cls(model, graph, embedding, tuple(layers))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients are used."""
        return self.embedding.position, self.embedding.weight, *(layer.name for layer in self.layers)

    def values(self, image: Tensor) -> Mapping[Ref, Tensor]:
        """Return what flows into the layers of one image (1, C, H, W), differentiable."""
        return self.graph.replay_values(self._lower_operations, {Ref(IMAGE): image})

    @cached_property
    def _lower_operations(self) -> list[int]:
        """Numbers of the operations up to what flows into the last of the layers."""
        last = max(layer.tokens.node for layer in self.layers)
        return [number for number in self.graph.used_operations() if number <= last]

    def gradient(self, images: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the gradient of a loss of the logits of images (N, C, H, W)."""
        chosen = {n: p for n, p in self.model.named_parameters() if n in self.names}
        with torch.enable_grad():
            for value in chosen.values():
                value.requires_grad_(True)
            found = torch.autograd.grad(loss(self.model(images)), list(chosen.values()))
        return dict(zip(chosen, found, strict=True))

    def label_gradient(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """Return the gradient of one image's cross entropy."""
        target = torch.tensor([label], device=image.device)
        return self.gradient(image, lambda logits: nn.functional.cross_entropy(logits, target))

    def subspaces(self, gradient: Mapping[str, Tensor], count: int, noise: Mapping[str, float]) -> PatchSubspaces:
        """Return the subspaces that the gradient of `count` images puts tokens and patches in.

        Ranks, and which tokens lie inside, are those of images of noise: behind a class token some get no signal of
        their own in the last block.

        Args:
            gradient: up to one factor.
            count: images.
            noise: of a number of each tensor, standard deviation.
        """
        like = self.graph.image
        draw = stream(count, "rehearsal")
        images = torch.rand(count, *like.shape[1:], generator=draw, dtype=like.dtype).to(like)
        with torch.no_grad():
            logits = self.model(images)
        slope = torch.randn(logits.shape, generator=draw, dtype=like.dtype).to(like)
        slope = slope - slope.mean(1, keepdim=True)
        rehearsed = self.gradient(images, lambda found: (found * slope).sum())
        with torch.no_grad():
            values = [self.values(image[None]) for image in images]
            found = []
            for layer in self.layers:
                basis, _ = _row_space(layer.arrange(rehearsed[layer.name]), 0.0)
                inside = torch.stack([_share_outside(layer.rows(v), basis) <= MAX_OUTSIDE for v in values]).all(0)
                told, sizes = _row_space(layer.arrange(gradient[layer.name]), noise[layer.name], basis.shape[1])
                found.append(Subspace(layer, told, sizes, inside, noise[layer.name]))
            patches = self.embedding.patch_gradient(rehearsed[self.embedding.weight]).mT
            rank = _row_space(patches, 0.0)[0].shape[1]
            sent = self.embedding.patch_gradient(gradient[self.embedding.weight]).mT
            basis = _row_space(sent, noise[self.embedding.weight], rank)[0]
        if rank == len(sent):
            basis = torch.eye(rank, dtype=like.dtype, device=like.device)
        return PatchSubspaces(self, basis, tuple(s for s in found if s.equations))


def _row_space(matrix: Tensor, noise: float, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a basis of the columns of a matrix (d, n) that stand out of noise, and the singular values.

    Args:
        matrix: the matrix.
        noise: of each of its numbers, standard deviation.
        rank: at most that many; None tells it by where singular values fall to rounding.
    """
    left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
    if rank is None:
        small = sizes <= MAX_NULL_SHARE * sizes[0]
        fall = sizes[:-1] / sizes[1:].clamp_min(1e-300)
        ends = torch.nonzero(small[1:] & (fall >= MIN_RANK_DROP)).flatten()
        rank = int(ends[fall[ends].argmax()]) + 1 if len(ends) else len(sizes)
    told = int((sizes[:rank] > MIN_SINGULAR_TO_NOISE * noise * max(matrix.shape) ** 0.5).sum())
    return left[:, :told], sizes[:told]


def _share_outside(rows: Tensor, basis: Tensor) -> Tensor:
    return (rows - (rows @ basis) @ basis.mT).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-300)


@dataclass(frozen=True)
class PatchSubspaces:
    """Equations for each image of a batch.

    Attributes:
        network: the network.
        basis: what the patches of all images span (F, n).
        subspaces: of the layers above that leave room outside.
    """

    network: TokenNetwork
    basis: Tensor
    subspaces: tuple[Subspace, ...]

    @property
    def unknowns(self) -> int:
        """Numbers that an image has."""
        patches, _ = self.network.embedding.signal_shape
        return patches * self.basis.shape[1]

    @property
    def count(self) -> int:
        """Equations for them."""
        return sum(subspace.equations for subspace in self.subspaces)

    def solve(self, start: Tensor) -> Tensor:
        """Return the image (1, C, H, W) that the search from `start` ends at.

        First all that is outside counts alike, then relative to what noise would leave there.
        """
        found = self.network.embedding.patches(start) @ self.basis
        found = minimize_squares(lambda x: self._residual(x, None), found)
        with torch.no_grad():
            values = self.network.values(self._image(found))
            scales = [subspace.expected_error(subspace.outside(values)[1]) for subspace in self.subspaces]
        found = minimize_squares(lambda x: self._residual(x, scales), found)
        with torch.no_grad():
            return self._image(found)

    def _image(self, coordinates: Tensor) -> Tensor:
        return self.network.embedding.pixels(coordinates @ self.basis.mT).view_as(self.network.graph.image)

    def _residual(self, coordinates: Tensor, scales: Sequence[Tensor] | None) -> Tensor:
        """Return what is outside, relative to all of a layer's tokens or to `scales`."""
        values = self.network.values(self._image(coordinates))
        parts = []
        for k, subspace in enumerate(self.subspaces):
            outside, rows = subspace.outside(values)
            parts.append((outside / (rows.detach().norm() if scales is None else scales[k])).flatten())
        return torch.cat(parts)

    def starts(self) -> Iterator[Tensor]:
        """Return images to start from: gray, then smooth noise."""
        like = self.network.graph.image
        yield 0.5 * torch.ones_like(like)
        for number in range(1, MAX_STARTS):
            check_time_limit()
            coarse = torch.rand(1, like.shape[1], 3, 3, generator=stream(number, "start"), dtype=like.dtype).to(like)
            yield nn.functional.interpolate(coarse, like.shape[2:], mode="bilinear", align_corners=True)

    def match_label(
        self, gradient: Mapping[str, Tensor], image: Tensor, labels: Sequence[int]
    ) -> tuple[int, float, float]:
        """Return the label that an image has, the factor lambda of its gradient, and how far that is from believed.

        Args:
            gradient: of the batch.
            image: one of its images.
            labels: that it may have.
        """
        room = [subspace.equations for subspace in self.subspaces]
        subspace = self.subspaces[room.index(max(room))]
        layer = subspace.layer
        whole = layer.arrange(gradient[layer.name])
        left, sizes = subspace.basis, subspace.sizes
        right = (whole.mT @ left) / sizes
        best = (labels[0], 1.0, math.inf)
        for label in labels:
            own = layer.arrange(self.network.label_gradient(image, label)[layer.name])
            inner = (left.mT @ own @ right) / sizes
            square = inner @ inner
            factor = float(square.trace() / inner.trace())
            distance = float((square - factor * inner).norm() / (factor * inner).norm())
            if distance < best[2]:
                best = (label, factor, distance)
        return best


def minimize_squares(residual: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return where the sum of squares is smallest near `start`: Levenberg-Marquardt by conjugate gradients.

    Products with the Jacobian are derivatives of derivatives: it is never formed.

    Args:
        residual: of the unknowns, differentiable twice.
        start: the unknowns.
    """
    damping = 1e-3
    at = start.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        left = residual(at)
    cost = float(left.detach().square().sum())
    for _ in range(MAX_STEPS):
        check_time_limit()
        with torch.enable_grad():
            probe = torch.zeros_like(left, requires_grad=True)
            (pulled,) = torch.autograd.grad(left, at, probe, create_graph=True)

        def forward(step: Tensor, pulled: Tensor = pulled, probe: Tensor = probe) -> Tensor:
            return torch.autograd.grad(pulled, probe, step, retain_graph=True)[0]

        def backward(signal: Tensor, left: Tensor = left, at: Tensor = at) -> Tensor:
            return torch.autograd.grad(left, at, signal, retain_graph=True)[0]

        slope = backward(left.detach())
        if not bool(slope.any()):
            break
        scale = float((forward(slope).norm() / slope.norm()).square())
        for _ in range(6):
            step = _conjugate_gradients(lambda x: backward(forward(x)) + damping * scale * x, slope)  # noqa: B023
            tried = (at.detach() - step).requires_grad_(True)
            with torch.enable_grad():
                then = residual(tried)
            new, expected = float(then.detach().square().sum()), float((slope * step).sum())
            if new < cost or expected < MIN_GAIN * cost:
                break
            damping *= 8
        if not new < cost:
            break
        at, left, cost = tried, then, new
        damping = max(damping / 10, 1e-12)
        if cost < 1e-24 or expected < MIN_GAIN * cost:
            break
    return at.detach()


def _conjugate_gradients(product: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
    found, rest = torch.zeros_like(target), target.clone()
    direction, size = rest.clone(), float(rest.square().sum())
    first = size
    for _ in range(MAX_INNER_STEPS):
        turned = product(direction)
        curvature = float((direction * turned).sum())
        if not curvature > 0:
            break
        length = size / curvature
        found, rest = found + length * direction, rest - length * turned
        before, size = size, float(rest.square().sum())
        if size < 1e-10 * first:
            break
        direction = rest + (size / before) * direction
    return found


@dataclass(frozen=True)
class SeparatedImage:
    """One image of a batch.

    Attributes:
        pixels: (1, C, H, W).
        label: its class.
        gradient: what it put into the batch's.
        factor: of its own gradient in that, inverted: the number of images, or less where it is there several times.
    """

    pixels: Tensor
    label: int
    gradient: Mapping[str, Tensor]
    factor: float

    def copies(self, count: int) -> list[SeparatedImage]:
        """Return the image as often as it is in the mean of `count`, if the gradient's size is that of the mean."""
        often = count / self.factor
        number = round(often) if abs(often - round(often)) <= MAX_FRACTION else 1
        each = replace(self, gradient={name: value / max(number, 1) for name, value in self.gradient.items()})
        return [each] * max(number, 1)


def separate_images(
    equations: PatchSubspaces,
    gradient: Mapping[str, Tensor],
    count: int,
    noise: Mapping[str, float],
    labels: Sequence[int],
    *,
    size_known: bool,
) -> list[SeparatedImage]:
    """Return the images of a batch, as many as are found.

    Args:
        equations: for each of them.
        gradient: of the batch, up to one factor.
        count: images in it.
        noise: of a number of each tensor, standard deviation.
        labels: that images may have.
        size_known: whether that factor is 1. Otherwise an image that is there twice can't be told from one that put
            twice as much into the gradient, and each counts once.
    """
    network, rest, found = equations.network, dict(gradient), list[SeparatedImage]()
    while (left := count - len(found)) > 0:
        check_time_limit()
        if found and not size_known and _share_left(rest, gradient) <= MAX_SHARE_OF_NOTHING:
            break
        if left > 1:
            image = _next_image(equations if left == count else network.subspaces(rest, left, noise), rest, labels)
        else:
            image = _last_image(equations, rest, noise, labels)
        if image is None:
            break
        found += image.copies(count) if left > 1 and size_known else [image]
        rest = {name: value - sum(other.gradient[name] for other in found) for name, value in gradient.items()}
    return found[:count]


def _share_left(rest: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> float:
    """Return the largest share of a tensor's norm that images found leave."""
    return max(float(rest[name].norm() / value.norm().clamp_min(1e-300)) for name, value in gradient.items())


def _next_image(
    equations: PatchSubspaces, gradient: Mapping[str, Tensor], labels: Sequence[int]
) -> SeparatedImage | None:
    """Return the first image that a start leads to and that has a label, or None."""
    if not equations.subspaces or not equations.basis.shape[1]:
        return None
    for start in equations.starts():
        pixels = round_to_levels(equations.solve(start))
        label, factor, distance = equations.match_label(gradient, pixels, labels)
        if distance <= MAX_LABEL_DISTANCE:
            own = equations.network.label_gradient(pixels, label)
            return SeparatedImage(pixels, label, {name: value / factor for name, value in own.items()}, factor)
    return None


def _last_image(
    equations: PatchSubspaces, gradient: Mapping[str, Tensor], noise: Mapping[str, float], labels: Sequence[int]
) -> SeparatedImage:
    """Return the image that the gradient of one is of, with the label that makes it most alike."""
    network = equations.network
    names = network.embedding.names
    doubt = sum(
        noise[name] * math.sqrt(gradient[name].numel()) / max(float(gradient[name].norm()), 1e-300) for name in names
    )
    pixels = PatchSolution.of(network.embedding, gradient, doubt).pixels.view_as(network.graph.image)
    near = round_to_levels(pixels)
    if near is pixels:  # others are not on levels either: what they left in this gradient is off
        near = equations.solve(pixels)
    best: SeparatedImage | None = None
    least = math.inf
    for label in labels:
        own = network.label_gradient(near, label)
        ratio = sum(float((own[n] * gradient[n]).sum()) for n in own) / sum(
            float(v.square().sum()) for v in own.values()
        )
        scaled = {name: ratio * value for name, value in own.items()}
        misfit = sum(float((gradient[n] - scaled[n]).square().sum()) for n in scaled)
        if best is None or misfit < least:
            best, least = SeparatedImage(near, label, scaled, 1 / ratio if ratio else math.inf), misfit
    assert best is not None
    return best


def round_to_levels(image: Tensor) -> Tensor:
    """Return an image on levels of 8 bits where its pixels lie close to them, else as it is."""
    near = (image * 255).round() / 255
    return near if float((image - near).square().mean().sqrt()) <= MAX_DISTANCE_TO_LEVELS else image
