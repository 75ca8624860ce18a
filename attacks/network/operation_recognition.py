"""Recognizes what the operations between two tensors do, by their numbers and not by how they are written.

The modules first defined here stand for what lies between weighted layers; they take any number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.network.curved_activations import TWO_INPUTS, CurvedActivation, MonotoneActivation, ValleyActivation
from attacks.network.operation_trace import IMAGE, MODEL_ERRORS, Graph, Node, Ref, Segment
from fl.seeds import stream


class Reshape(nn.Module):
    """Gives a tensor another shape; numbers and their order stay."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, ...) as (N, *shape)."""
        return x.reshape(len(x), *self.shape)


class ReplayedMap(nn.Module):
    """A recorded map of one image, image by image.

    Args:
        run: takes (1, *shape).
        shape: of one image's numbers.
        whole: whether `run` gives several images at once what it gives each.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], shape: torch.Size, *, whole: bool = False) -> None:
        super().__init__()
        self.run, self.shape, self.whole = run, shape, whole

    def forward(self, x: Tensor) -> Tensor:
        """Return what the map makes (N, ...) of (N, *shape)."""
        x = x.reshape(len(x), *self.shape)
        return self.run(x) if self.whole or len(x) == 1 else torch.cat([self.run(one[None]) for one in x])


class ElementwiseAffine(ReplayedMap):
    """Each number times a number of its own plus another: a normalization, batch norm in evaluation mode."""

    def by_channel(self) -> tuple[Tensor, Tensor] | None:
        """Return the factor and shift of each channel (C,); None where they differ from place to place."""
        zero = torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            shift = self(zero)
            factor = (self(zero + 1) - shift).flatten(2)[0] if len(self.shape) > 1 else None
        if factor is None:
            return None
        shift = shift.flatten(2)[0]
        alike = torch.allclose(factor, factor[:, :1], rtol=1e-9) and torch.allclose(shift, shift[:, :1], rtol=1e-9)
        return (factor[:, 0], shift[:, 0]) if alike else None

    place = ""
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")


class LinearMap(ReplayedMap):
    """Any other affine map that has no parameters: a permutation, a resize, a blur, a mean taken off."""


class UnknownRest(nn.Identity):
    """Stands for all that a network computes above the last layer that its chain reaches to."""


ROUNDING = 1e-13
"""Rounding of a function, relative and absolute."""
TRIED_TOGETHER = 3
"""Images that a map is tried on at once."""
Map = Callable[[Tensor], Tensor]
PRODUCTS = {"addmm", "mm", "bmm", "baddbmm"}
BRANCHES = (
    "what goes in is used more than once before all of it comes together again (a residual connection, branches, "
    "attention)"
)


class Permutation(LinearMap):
    """Puts the numbers of a tensor in another order.

    Attributes:
        index: where each of the numbers that come out stands among those that come in, row by row.
    """

    def __init__(self, run: Map, shape: torch.Size, index: Tensor) -> None:
        super().__init__(run, shape)
        self.index = index

    def undo_scalings(self, scalings: Sequence[nn.Module]) -> ElementwiseAffine:
        """Return what `scalings` behind the new order do, in the old one."""
        places = self.index.argsort()

        def run(x: Tensor) -> Tensor:
            y = self(x)
            for scaling in scalings:
                y = scaling(y)
            return y.flatten(1)[:, places].view_as(x)

        found = ElementwiseAffine(run, self.shape, whole=True)
        known = next(scaling for scaling in scalings if isinstance(scaling, ElementwiseAffine))
        found.dtype, found.device, found.place = known.dtype, known.device, known.place
        return found


def recognize(graph: Graph, segment: Segment) -> nn.Module | str:
    """Return a module that does the same as a segment without parameters of its own to solve for, or why it is none."""
    taken, given = as_row(graph.value(segment.start)), as_row(graph.value(segment.end))
    run = partial(_replay_rows, graph, segment)
    named = str(graph.nodes[segment.nodes[-1]])
    if not given.is_floating_point():
        return f"{named} returns numbers of another kind ({given.dtype})"
    if given.ndim < 1 or not bool(given.isfinite().all()):
        return f"{named} returns something else than finite numbers"
    if given.shape[:1] != (1,) or taken.shape[:1] != (1,):
        return f"{named} mixes the dimension of the images with others: what follows sees more than one input per image"
    if contains_weighted_branch(graph, segment):
        return _obstacle(graph, segment, None, taken)
    with torch.no_grad():
        return _identify(graph, segment, run)


def as_row(value: Tensor) -> Tensor:
    """Return what stands for one image as a column (n, 1), as of matrices that multiply from the left, as (1, n)."""
    return value.mT if _is_column(value) else value


def _is_column(value: Tensor) -> bool:
    return value.ndim == 2 and value.shape[1] == 1


def _identify(graph: Graph, segment: Segment, run: Map) -> nn.Module | str:
    taken, given = as_row(graph.value(segment.start)), as_row(graph.value(segment.end))
    try:
        if segment.start == Ref(IMAGE) and (found := _as_pixel_scaling(run, taken, given)):
            return found
        return (
            _as_torch_module(graph, segment)
            or _identify_map(run, taken, given)
            or _obstacle(graph, segment, run, taken)
        )
    except MODEL_ERRORS:  # an operation on numbers that no image makes
        return _obstacle(graph, segment, None, taken)


def _as_torch_module(graph: Graph, segment: Segment) -> nn.Module | None:
    """Return pooling or padding by one operation that is a module, too."""
    if len(segment.nodes) != 1:
        return None
    node = graph.nodes[segment.nodes[0]]
    taken, given = graph.value(segment.start), graph.value(segment.end)
    name, args = node.operation, node.args
    if taken.ndim != 4:
        return None
    if name == "avg_pool2d":
        _, kernel, stride, padding, ceil, counted, divisor = args
        return nn.AvgPool2d(tuple(kernel), tuple(stride) or None, tuple(padding), ceil, counted, divisor)
    if name == "max_pool2d_with_indices":
        _, kernel, stride, padding, dilation, ceil = args
        return nn.MaxPool2d(tuple(kernel), tuple(stride) or None, tuple(padding), tuple(dilation), ceil_mode=ceil)
    if name == "adaptive_avg_pool2d":
        return nn.AdaptiveAvgPool2d(tuple(args[1]))
    if name == "constant_pad_nd" and args[2] == 0 and len(args[1]) <= 4 and min(args[1]) >= 0:
        pads = [*args[1], *[0] * (4 - len(args[1]))]
        return nn.ZeroPad2d((pads[0], pads[1], pads[2], pads[3]))
    if name in {"mean", "amax", "adaptive_max_pool2d"}:
        return _as_pooling(partial(replay_segment, graph, segment), taken, given)
    return None


def replay_segment(graph: Graph, segment: Segment, x: Tensor) -> Tensor:
    """Return what a recorded segment makes of `x` in the place of what it was given."""
    return graph.replay(segment.nodes, segment.end, {segment.start: x})


def _replay_rows(graph: Graph, segment: Segment, x: Tensor) -> Tensor:
    """Return what a recorded segment makes of `x`, which is given row by row, and so is that."""
    made = replay_segment(graph, segment, x.mT if _is_column(graph.value(segment.start)) else x)
    return made.mT if _is_column(graph.value(segment.end)) else made


def _identify_map(run: Map, taken: Tensor, given: Tensor) -> nn.Module | None:
    draw = partial(_noise, taken)
    if taken.numel() == given.numel():
        found = _as_permutation(run, taken, given, draw(1))
        if found is not None:
            return found
        if taken.shape == given.shape and _is_elementwise(run, draw):
            return _as_elementwise(run, taken, draw)
    return _as_pooling(run, taken, given) or _as_linear_map(run, taken, draw)


def _as_pixel_scaling(run: Map, taken: Tensor, given: Tensor) -> nn.Module | None:
    """Return a function that is a scaling of pixels in [0, 1], whatever it is beyond: clamping, say."""
    if taken.shape != given.shape or not _is_elementwise(lambda x: run(x.sigmoid()), partial(_noise, taken)):
        return None
    offset, top = run(torch.zeros_like(taken)), run(torch.ones_like(taken))
    slope = top - offset
    gray = [torch.rand(taken.shape, generator=stream(key, "pixels"), dtype=torch.float64).to(taken) for key in range(4)]
    straight = all(torch.allclose(run(x), offset + slope * x, rtol=1e-10, atol=1e-12) for x in gray)
    if not straight or not bool(slope.all()):
        return None
    if not bool(offset.any()) and bool((slope == 1).all()):
        return nn.Identity()
    beyond = 7 * gray[0] - 3
    if torch.allclose(run(beyond), offset + slope * beyond, rtol=1e-10, atol=1e-12):
        return None  # by its own operations, to the bit
    return _as_scaling(lambda x: offset + slope * x, taken)


def _noise(like: Tensor, key: int, count: int = 1) -> Tensor:
    draw = torch.randn(count, *like.shape[1:], generator=stream(key, "recognize"), dtype=torch.float64)
    return draw.to(like)


def _as_permutation(run: Map, taken: Tensor, given: Tensor, noise: Tensor) -> nn.Module | None:
    """Return a module that reorders or reshapes numbers as `run` does; None where `run` changes them."""
    index = permuted_places(run, taken, noise)
    if index is None:
        return None
    if bool((index.diff() != 1).any()):
        return Permutation(lambda x: x.flatten(1)[:, index].view(len(x), *given.shape[1:]), taken.shape[1:], index)
    return nn.Flatten() if given.ndim == 2 and taken.ndim > 1 else Reshape(given.shape[1:])  # Flatten refuses (N,)


def permuted_places(run: Map, taken: Tensor, noise: Tensor) -> Tensor | None:
    """Return where each number that `run` returns stood in what it was given; None where it does more than reorder.

    Args:
        run: the map.
        taken: a tensor of the shape that it is given.
        noise: likewise, of random numbers.
    """
    numbers = torch.arange(taken.numel(), dtype=taken.dtype, device=taken.device)
    index = run(numbers.view_as(taken)).flatten().round().long()
    if len(index) != len(numbers) or not bool((index.sort().values == numbers).all()):
        return None
    return index if torch.equal(run(noise).flatten(), noise.flatten()[index]) else None


def _is_elementwise(run: Map, draw: Callable[[int], Tensor]) -> bool:
    """Return whether each number that comes out hangs on the one in its place alone."""
    one, other = draw(2), draw(3)
    chosen = draw(4) > 0
    for base in (one, 3 * one):
        mixed = torch.where(chosen, base, other)
        one_way, other_way = (torch.where(chosen, run(x), 0.0) for x in (mixed, base))
        if not torch.allclose(
            one_way, other_way, rtol=ROUNDING, atol=ROUNDING
        ):  # the same function rounds as it is vectorized
            return False
    return True


def _as_elementwise(run: Map, taken: Tensor, draw: Callable[[int], Tensor]) -> nn.Module | None:
    """Return a scaling, or an activation that rises."""
    base, zero = draw(5), torch.zeros_like(taken)
    offset = run(zero)
    slope = run(zero + 1) - offset
    tried = (base, -2 * base, 5 * base.abs(), -5 * base.abs())
    if all(torch.allclose(run(x), offset + slope * x, rtol=1e-9, atol=1e-9) for x in tried):
        if not bool(slope.all()):
            return None
        return _as_scaling(run, taken)
    return _as_activation(run, taken)


def _as_scaling(run: Map, taken: Tensor) -> ElementwiseAffine:
    found = ElementwiseAffine(run, taken.shape[1:], whole=_takes_batches(run, taken))
    found.dtype, found.device = taken.dtype, taken.device
    return found


def _takes_batches(run: Map, taken: Tensor) -> bool:
    several = _noise(taken, 6, TRIED_TOGETHER)
    try:
        return torch.equal(run(several), torch.cat([run(one[None]) for one in several]))
    except MODEL_ERRORS:
        return False


def function_on_grid(run: Map, taken: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a grid (n,) and what a function makes of it; None where it is none of single numbers, alike for all.

    Args:
        run: takes tensors like the next, without gradients.
        taken: one that it may be given (1, ...).
    """
    return _on_grid(run, taken) if _is_elementwise(run, partial(_noise, taken)) else None


def _on_grid(run: Map, taken: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a grid and a function's values there; None where some numbers fare otherwise than others."""
    grid = torch.cat([torch.linspace(-30, 30, 2401), torch.linspace(-2, 2, 1601)]).to(taken)
    function = CurvedActivation(run, taken.shape[1:])
    with torch.no_grad():
        values, shifted = function(grid), function(grid.roll(1)).roll(-1)
    return (grid, values) if torch.allclose(values, shifted, rtol=ROUNDING, atol=ROUNDING) else None


def _as_activation(run: Map, taken: Tensor) -> nn.Module | None:
    """Return one function of each number, the same for all of them, that never falls, or falls and then rises."""
    curve = _on_grid(run, taken)
    if curve is None:
        return None
    (grid, values), function = curve, MonotoneActivation(run, taken.shape[1:])
    above, one = grid >= 0, torch.ones(1, dtype=taken.dtype, device=taken.device)
    gentle = float(-function(-one))
    if torch.equal(values[above], grid[above]) and torch.allclose(values[~above], gentle * grid[~above], rtol=1e-12):
        if gentle == 0:
            return nn.ReLU()
        return nn.LeakyReLU(gentle) if gentle > 0 else None
    for known in (nn.Sigmoid(), nn.Tanh()):
        if torch.allclose(values, known(grid), rtol=1e-12, atol=1e-14):
            return known
    order = grid.argsort()
    steps = values[order].diff()
    if bool((steps >= -ROUNDING).all()):
        return function if bool((steps > ROUNDING).any()) else None
    lowest = int(values[order].argmin())
    if (
        0 < lowest < len(steps)
        and bool((steps[:lowest] <= ROUNDING).all())
        and bool((steps[lowest:] >= -ROUNDING).all())
    ):
        return ValleyActivation(run, taken.shape[1:], grid[order][[lowest - 1, lowest + 1]])
    return None


def _as_pooling(run: Map, taken: Tensor, given: Tensor) -> nn.Module | None:
    """Return pooling over windows side by side, or over the whole picture."""
    if taken.ndim != 4 or given.ndim not in {2, 4} or given.shape[1] != taken.shape[1]:
        return None
    rows, columns = given.shape[2:] if given.ndim == 4 else (1, 1)
    height, width = taken.shape[2:]
    if height % rows or width % columns or (height, width) == (rows, columns):
        return None
    window, noise = (height // rows, width // columns), _noise(taken, 7)
    result = run(noise).flatten()
    pooled: nn.Module
    if torch.allclose(result, functional.avg_pool2d(noise, window).flatten(), rtol=1e-10, atol=1e-12):
        pooled = nn.AdaptiveAvgPool2d(1) if (rows, columns) == (1, 1) else nn.AvgPool2d(window)
    elif torch.equal(result, functional.max_pool2d(noise, window).flatten()):
        pooled = nn.MaxPool2d(window)
    else:
        return None
    return nn.Sequential(pooled, nn.Flatten()) if given.ndim == 2 else pooled


def _as_linear_map(run: Map, taken: Tensor, draw: Callable[[int], Tensor]) -> nn.Module | None:
    """Return any affine map, told by sums of probes."""
    one, other, zero = draw(8), draw(9), torch.zeros_like(taken)
    offset = run(zero)
    parts = run(one) - offset, run(other) - offset
    both = run(3 * one - 2 * other) - offset
    if not all(bool(part.isfinite().all()) for part in (*parts, both)):
        return None
    if not torch.allclose(
        both, 3 * parts[0] - 2 * parts[1], rtol=1e-8, atol=1e-9 * float(parts[0].abs().max() + 1e-300)
    ):
        return None
    return LinearMap(run, taken.shape[1:])


def _obstacle(graph: Graph, segment: Segment, run: Map | None, taken: Tensor) -> str:
    """Return what keeps a segment from being undone, in words."""
    nodes = [graph.nodes[number] for number in segment.nodes]
    last, first = nodes[-1], nodes[0]
    norm = next((node for node in nodes if _uses_batch_statistics(node)), None)
    if norm is not None:
        return f"{norm}: batch statistics couple all values of a channel"
    if contains_weighted_branch(graph, segment):
        return f"from {first} to {last} {BRANCHES}"
    if "max_pool" in last.operation or last.operation == "amax":
        return f"{last}: max pooling is not linear and hides which values it took"
    same_shape = run is not None and as_row(graph.value(segment.end)).shape == taken.shape
    if run is not None and same_shape and _is_elementwise(run, partial(_noise, taken)):
        if _is_not_monotone(run, taken):
            return TWO_INPUTS.format(last)
        return f"{last} treats numbers one by one, but not all alike or not so that it rises"
    if len(nodes) > 1:
        return f"from {first} to {last} {BRANCHES}"
    if run is not None and same_shape and _is_elementwise_within_range(run, taken):
        return f"{last} treats numbers one by one, but is no activation: of some numbers it makes none (NaN)"
    return f"{last} is neither a linear map nor an activation that treats numbers one by one"


def _is_elementwise_within_range(run: Map, taken: Tensor) -> bool:
    """Return whether a function treats numbers one by one within the range of those that it was given."""
    low, high = taken.amin(), taken.amax()
    return _is_elementwise(lambda x: run(low + (high - low) * x.sigmoid()), partial(_noise, taken))


def _is_not_monotone(run: Map, taken: Tensor) -> bool:
    """Return whether a function of single numbers, alike for all of them, rises and falls."""
    grid = torch.linspace(-30, 30, 4801).to(taken)
    with torch.no_grad():
        steps = CurvedActivation(run, taken.shape[1:])(grid).diff()
    return bool((steps > ROUNDING).any() and (steps < -ROUNDING).any())


def _uses_batch_statistics(node: Node) -> bool:
    if "batch_norm" not in node.operation:
        return False
    given = {a.name: v for a, v in zip(node.op._schema.arguments, node.args, strict=True)}
    return bool(given.get("training", given.get("train", "no_training" not in node.operation)))


def contains_weighted_branch(graph: Graph, segment: Segment) -> bool:
    """Return whether a layer with parameters stands between two tensors beside something else."""
    return len(segment.nodes) > 1 and any(has_trained_weight(graph, graph.nodes[number]) for number in segment.nodes)


def has_trained_weight(graph: Graph, node: Node) -> bool:
    """Return whether an operation is a convolution of, or a product with, something that is made of parameters."""
    if node.operation == "convolution":
        return bool(parameters_behind(graph, node.args[1]))
    if node.operation not in PRODUCTS:
        return False
    pair = product_operands(node)
    return sum(graph.depends_on_image(ref) for ref in pair) == 1 and any(parameters_behind(graph, ref) for ref in pair)


def parameters_behind(graph: Graph, ref: object) -> frozenset[str]:
    """Return the parameters from which a tensor that does not depend on the image is computed."""
    if not isinstance(ref, Ref) or graph.depends_on_image(ref):
        return frozenset()
    return graph.origins(ref) & graph.parameters


def product_operands(node: Node) -> list[Ref]:
    """Return the two factors of a product, those that come from a source."""
    pair = node.args[1:3] if node.operation in {"addmm", "baddbmm"} else node.args[:2]
    return [arg for arg in pair if isinstance(arg, Ref)]


def merge_segments(segments: Sequence[Segment]) -> Segment:
    """Return several segments, one after the other, as one."""
    nodes = tuple(number for segment in segments for number in segment.nodes)
    return Segment(nodes, segments[0].start, segments[-1].end)
