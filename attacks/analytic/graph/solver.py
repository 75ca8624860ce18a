"""Solves for the inputs of a network's weighted layers, from the top down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attacks.analytic.graph.equation_sets import EquationSet, equation_sets
from attacks.analytic.graph.image_factors import (
    find_factors_by_biases,
    find_factors_by_shifts,
    find_image_factors,
)
from attacks.analytic.graph.input_projections import solve_projection, weighted_projection
from attacks.analytic.graph.joint_least_squares import OutOfTimeError
from attacks.analytic.graph.layer_solves import (
    NEARLY_OPEN,
    KnownSignal,
    SolvedInput,
    count_shortfall,
    error_by_gradients,
    have_redundancy,
    open_above,
    solve_input,
    solve_signal,
)
from attacks.analytic.graph.mask_correction import correct_by_biases
from attacks.analytic.graph.network_graph import NetworkGraph
from attacks.analytic.graph.normalized_layers import (
    find_normalized_layers,
    path_to_normalization,
    solve_normalized_input,
)
from attacks.analytic.graph.output_equations import find_output_equations
from attacks.analytic.graph.pooled_layer import find_pooled_signal
from attacks.analytic.graph.propagation import Propagation, UnknownError
from attacks.analytic.graph.shift_signals import ShiftSignals
from attacks.network.operation_trace import IMAGE, Ref
from attacks.search_control import check_time_limit

MAX_MISFIT = 2e-2
"""Share of the gradient that a solved input may leave, in the median channel."""
MAX_MISFIT_RATIO = 30.0
"""Times the largest misfit so far up to which an input that has few equations to spare is believed."""
PRECISE_RATIO = 10.0
"""Times the largest misfit so far up to which no further equations are asked."""
MAX_SIGNED_MISFIT = 1e-4
"""Misfit of what is known above, at most, for a search by signs: what is less precise hides which numbers are zero."""
MAX_BAD_CHANNELS = 0.25
"""Share of the output channels that may not fit."""
MIN_LIKENESS = 0.99
"""Cosine of what an image makes of a tensor and what was solved for there, at least, for both to be of one image."""
ASKED_OF_UPDATES = " (is it one plain step on so many images, with statistics of batch norm fixed?)"
"""What may be wrong where a layer's equations contradict each other."""
NO_SIZE_ABOVE = "its output is normalized, and above it each image is known up to a factor alone"
"""Why a layer is not solved for from above."""


@dataclass
class SolvedTensor:
    """An input of layers that was solved for.

    Attributes:
        ref: the tensor.
        values: (n, ...).
        misfit: share of the gradient, or of known outputs above, that it leaves unexplained.
        scaled: whether its size is known, rather than up to a factor for each image.
        by: names of the layers whose equations gave it.
        projection: (n, H W, H W), that of the tensor which `values` are and which is all that its layers' equations
            determine; None where they determine the tensor (`input_projections`).
    """

    ref: Ref
    values: Tensor
    misfit: float
    scaled: bool
    by: tuple[str, ...]
    projection: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of its numbers that are not zero; of a projection, of those that are determined."""
        if self.projection is None:
            return int((self.values != 0).sum())
        return round(float(self.projection.diagonal(dim1=1, dim2=2).sum())) * self.values.shape[1]


@dataclass
class GraphSolver:
    """The state of a solution.

    Attributes:
        network: the graph, of a trace at the number of distinct images.
        images: how many there are.
        known: values and signals.
        solved: the tensors solved for, the lowest last.
        projections: what is known of tensors that could not be solved for.
        guides: what gradients say of such tensors with nothing to check it by.
        ends: why layers' inputs could not be solved for, by the layer's weight: facts about these layers.
        waiting: which signal was missing, of layers that were never asked for lack of one above.
        anchor: weight of the convolution whose shifts gave the first signals; empty before.
        shifts: finds what flows back into a convolution by the shifts of its gradient.
        scaled: whether the signals found last have the images' sizes, rather than a factor for each.
        before_anchor: what was known before the convolution that gave the signals found last.
    """

    network: NetworkGraph
    images: int
    known: Propagation
    solved: list[SolvedTensor] = field(default_factory=list)
    projections: list[SolvedTensor] = field(default_factory=list)
    guides: list[SolvedTensor] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    anchor: str = ""
    scaled: bool = False
    shifts: ShiftSignals = field(init=False)
    before_anchor: Propagation = field(init=False)

    def __post_init__(self) -> None:
        self.shifts = ShiftSignals(self.network, self.images, self.ends)
        self.before_anchor = self.known.snapshot()

    def run(self, lowest: int = IMAGE) -> None:
        """Solve for all that can be solved for, from the last layer down.

        Args:
            lowest: operation below whose output nothing is asked.
        """
        for ref in self._inputs():
            if ref in self.known.values or ref.node < lowest:
                continue
            check_time_limit()
            self._solve_tensor(ref)
            if ref not in self.known.values:
                self._begin_at(ref)
            if ref not in self.known.values:
                self._solve_below_pooling(ref)
            if ref in self.known.values:
                self._find_sizes()
                self._find_signals()
            else:
                self._project(ref)

    def begin_at_linear_layers(self) -> None:
        """Solve from linear layers with a bias down: of one image, the bias gradient is what flows back into them.

        A convolution of one position is a linear layer. A normalization's shift behind it is as good as a bias.
        """
        for number in self._operations_of_one_position():
            like = self.network.graph.value(Ref(number))
            for _, name in self.network.bias_like_parameters(number):
                sent = self.network.gradient[name]
                if name in self.network.sent:
                    continue  # where nothing was sent of an output its signal is unknown
                if bool(sent.any()) and sent.numel() == like.numel():  # not one number for all outputs
                    self._begin_with(number, sent.reshape(like.shape))
        if self.scaled:
            self.ends.clear()
            self.waiting.clear()
            self.run()

    def _begin_with(self, number: int, signal: Tensor) -> None:
        """Note what flows back into what an operation made, and into the layers that it scales."""
        self.known.set_signal(Ref(number), signal)
        self.scaled = True
        for below in self.network.layers:
            out = Ref(below)
            while (above := self.network.sole_scaling(out)) is not None and above[0] <= number:
                out = Ref(above[0])
            if out == Ref(number) != Ref(below):
                self.known.set_signal(Ref(below), self.known.signal(Ref(below)))

    def _operations_of_one_position(self) -> list[int]:
        """Return the operations that make one number of each channel of one image, weighted layers first."""
        made = ((number, node.outputs) for number, node in enumerate(self.network.graph.nodes))
        shapes = ((number, outputs[0].shape) for number, outputs in made if outputs)
        single = [number for number, shape in shapes if len(shape) > 1 and shape[1] == shape.numel()]
        return sorted(single, key=lambda number: number not in self.network.layers)

    def _inputs(self) -> list[Ref]:
        """Return what weighted layers take, the last made first."""
        taken = {self.network.layer_input(number) for number in self.network.layers}
        return sorted(taken, key=lambda ref: -ref.node)

    def _users(self, ref: Ref) -> list[int]:
        return [number for number in self.network.consumers.get(ref, []) if number in self.network.layers]

    def _begin_at(self, ref: Ref) -> None:
        """Solve for what a convolution takes by the shifts of its gradient alone.

        Where another convolution gave the first signals, several images come in an order of their own. What they make
        of the tensor that was solved for last tells it.
        """
        for number in self._users(ref):
            found = self.shifts.find(number, is_first=not self.anchor)
            if found is None:
                continue
            before = self.known.snapshot(), self.scaled, self.before_anchor, list(self.solved)
            order = self._begin_with_columns(ref, number, *found)
            if order is not None and order.tolist() != list(range(self.images)):
                self._take_back(*before)
                columns, two_valued = found
                order = self._begin_with_columns(ref, number, columns[..., order], two_valued)
            if order is not None:
                self.anchor = self.anchor or self.network.layers[number].name
                return
            self._take_back(*before)

    def _begin_with_columns(self, ref: Ref, number: int, columns: Tensor, two_valued: bool) -> Tensor | None:
        """Solve for a layer's input by what flows back into it, of each image up to a factor.

        Returns:
            Which image is which of the tensor that was solved for last; None where the input does not follow, or
            nothing tells the order.
        """
        self.before_anchor = self.known.snapshot()
        upper = self.solved[-1] if self.solved else None
        self._set_anchor(number, columns, two_valued)
        self._solve_tensor(ref)
        if ref not in self.known.values:
            return None
        if upper is None or self.images == 1:
            return torch.arange(self.images)
        return self._match_order(ref, upper)

    def _take_back(
        self, known: Propagation, scaled: bool, before_anchor: Propagation, solved: list[SolvedTensor]
    ) -> None:
        """Take back what was noted since this was so."""
        self.known = known.snapshot()
        self.scaled, self.before_anchor, self.solved = scaled, before_anchor, list(solved)

    def _match_order(self, ref: Ref, upper: SolvedTensor) -> Tensor | None:
        """Return which image of a tensor is which of one above that was solved for, or None where it does not tell.

        Args:
            ref: the tensor, in an order of its own, up to a factor for each image.
            upper: the tensor above, likewise up to factors.
        """
        try:
            made = Propagation(self.network, {ref: self.known.values[ref]}).value(upper.ref).flatten(1)
        except UnknownError:
            return None
        directions = [rows / rows.norm(dim=1, keepdim=True) for rows in (upper.values.flatten(1), made)]
        likeness, order = (directions[0] @ directions[1].mT).max(1)
        is_clear = bool((likeness > MIN_LIKENESS).all()) and len(set(order.tolist())) == self.images
        return order if is_clear else None

    def _solve_below_pooling(self, ref: Ref) -> None:
        """Solve for what convolutions take whose outputs are rectified and max pooled, of one image."""
        if self.images > 1:
            return
        for number in self._users(ref):
            found = find_pooled_signal(self.known, number)
            if found is None:
                continue
            before = dict(self.known.signals), dict(self.known.masks)
            self.known.set_signal(Ref(number), found.reshape(self.network.graph.value(Ref(number)).shape))
            self._solve_tensor(ref)
            if ref in self.known.values:
                return
            self.known.restore(*before)

    def _set_anchor(self, number: int, columns: Tensor, two_valued: bool) -> None:
        """Note what flows back into a convolution, with the images' factors where a bias tells them."""
        layer, out = self.network.layers[number], Ref(number)
        signal = columns.permute(2, 0, 1).reshape(layer.output_shape)
        signal, bits = _two_values(signal) if two_valued else (signal, torch.ones_like(signal, dtype=torch.bool))
        factors = find_image_factors(self.network, number, signal * bits)
        self.scaled = factors is not None
        signal = signal if factors is None else signal * factors[:, None, None, None]
        gate = self.network.gate(out)
        if two_valued and gate is not None:
            activation, slope = gate
            self.known.set_signal(Ref(activation), signal.reshape(slope.shape) / slope)
            self.known.set_mask(activation, bits.reshape(slope.shape))
        else:
            self.known.set_signal(out, (signal * bits).reshape(self.network.graph.value(out).shape))

    def _find_sizes(self) -> None:
        """Bring values and signals to the images' sizes, where tensors that were solved for tell them."""
        if self.scaled:
            return
        own = self.known.since(self.before_anchor)
        factors = find_factors_by_shifts(own)
        factors = find_factors_by_biases(own) if factors is None else factors
        if factors is None:
            return
        self.known.rescale(factors, self.before_anchor)
        self.scaled = True
        self.solved = [
            replace(tensor, values=self.known.values[tensor.ref], scaled=True) if tensor.ref in own.values else tensor
            for tensor in self.solved
        ]

    def _solve_tensor(self, ref: Ref) -> None:
        """Solve for what layers take, if the signals at their outputs are known and the equations are enough."""
        users = self._askable_users(ref)
        if not users:
            self._solve_below_normalizations(ref)
            return
        solved, signals = self._solve_for_input(ref, users)
        if solved is not None:
            self._note_bits(users, signals)
            self._note_values(ref, solved, tuple(known.layer.name for known in signals))

    def _solve_below_normalizations(self, ref: Ref) -> None:
        """Solve for what layers take whose outputs are normalized by statistics of each image."""
        users = self._users(ref)
        if not self.scaled:
            self._note_missing_size(users)
            return
        layers = find_normalized_layers(self.known, users)
        if layers is None:
            return
        names = tuple(self.network.layers[layer.number].name for layer in layers)
        found = solve_normalized_input(self.known, ref, layers)
        reason = found if isinstance(found, str) else self._doubt_by_gradients(found.solved, found.signals)
        if isinstance(found, str) or reason is not None:
            self.ends[" and ".join(names)] = str(reason)
        else:
            self._note_values(ref, found.solved, names)
            if self.network.is_rectified(ref):
                # a wrong bit spoils all numbers normalized with it
                correct_by_biases(self.known, ref.node, found.solved.values)

    def _note_missing_size(self, users: list[int]) -> None:
        """Say of layers whose outputs are normalized that what is known above does not tell the images' sizes."""
        for number in users if self.solved else ():
            if path_to_normalization(self.network, number) is not None:
                self.ends[self.network.layers[number].name] = NO_SIZE_ABOVE

    def _doubt_by_gradients(self, solved: SolvedInput, signals: list[KnownSignal]) -> str | None:
        """Return why an input is not believed that gradients alone gave, or None."""
        off = error_by_gradients(signals, solved)
        if off > MAX_MISFIT:
            return NEARLY_OPEN.format(off)
        return _doubt(solved, off) or self._stands_out(solved, signals)

    def _solve_for_input(self, ref: Ref, users: list[int]) -> tuple[SolvedInput | None, list[KnownSignal]]:
        """Return the input of layers, by known outputs too where gradients are few, and their signals.

        Single numbers that are known outright, and signs, are asked where equations are too few without. Where it is
        None, `ends` says why.
        """
        signals = [self.known.layer_signal(number) for number in users]
        outputs = find_output_equations(self.known, ref, signals[0].layer.input_shape) if self.scaled else None
        bits = [known.bits for known in signals]
        reason, best = "", None
        for equations in equation_sets(
            signals, outputs, rectified=self.network.is_rectified(ref), precise=self._is_precise()
        ):
            for known, before in zip(signals, bits, strict=True):
                known.bits = before  # a solution that is not believed has turned some for nothing
            solved = self._solve_by(equations, signals)
            if isinstance(solved, str):
                reason = solved
            elif best is None or solved.misfit < best[0].misfit:
                best = solved, [known.bits for known in signals]
            if best is not None and (solved is not best[0] or self._is_as_precise(best[0])):
                break
        if best is None:
            self.ends[" and ".join(known.layer.name for known in signals)] = reason
            return None, signals
        for known, turned in zip(signals, best[1], strict=True):
            known.bits = turned
        return best[0], signals

    def _is_as_precise(self, solved: SolvedInput) -> bool:
        """Return whether an input explains its equations about as well as those above, so that no others are asked."""
        usual = max((tensor.misfit for tensor in self.solved), default=solved.misfit)
        return solved.misfit <= PRECISE_RATIO * usual

    def _solve_by(self, equations: EquationSet, signals: list[KnownSignal]) -> SolvedInput | str:
        """Return the input that layers have by these equations, or why there is none to be believed."""
        if short := count_shortfall(signals, equations.count, equations.entries):
            return short
        try:
            solved = solve_input(signals, equations.others, equations.entries)
        except OutOfTimeError as error:
            return str(error)
        if solved is None:
            return "its equations leave inputs open"
        # where equations are hardly more than unknowns, wrong inputs may explain them, but not others
        missed = 0.0 if equations.judges is None else equations.judges.misfit(solved.values)
        if equations.is_of_gradients_alone:
            missed = error_by_gradients(signals, solved)
            if missed > MAX_MISFIT:
                return NEARLY_OPEN.format(missed)
        if (reason := _doubt(solved, missed) or self._stands_out(solved, signals)) is not None:
            return reason
        return replace(solved, misfit=max(solved.misfit, missed))

    def _project(self, ref: Ref) -> None:
        """Note the part of what layers take that their equations determine, where they leave the rest open."""
        users = self._askable_users(ref) if self.scaled else []
        signals = [self.known.layer_signal(number) for number in users]
        found = solve_projection(signals) if signals else None
        if found is None or not found.misfit < MAX_MISFIT:
            self._note_guide(ref, signals)
            return
        names = tuple(known.layer.name for known in signals)
        numbers = signals[0].layer.unknown_inputs
        self.ends[" and ".join(names)] = (
            f"its equations leave inputs open: they determine {found.rank} of {numbers} numbers of each input channel"
        )
        values = found.values.reshape(self.network.graph.value(ref).shape)
        self.projections.append(SolvedTensor(ref, values, found.misfit, True, names, found.projection))

    def _note_guide(self, ref: Ref, signals: list[KnownSignal]) -> None:
        """Note what gradients say of what layers take, where that can not be checked: it guides a search."""
        found = weighted_projection(signals) if signals else None
        if found is not None:
            names = tuple(known.layer.name for known in signals)
            values = found.values.reshape(self.network.graph.value(ref).shape)
            self.guides.append(SolvedTensor(ref, values, 0.0, True, names, found.matrix))

    def _is_precise(self) -> bool:
        """Return whether what was solved for last is so precise that zeros below it can be told from small numbers."""
        return bool(self.solved) and self.solved[-1].misfit < MAX_SIGNED_MISFIT

    def _stands_out(self, solved: SolvedInput, signals: list[KnownSignal]) -> str | None:
        """Return why an input with few equations to spare is not believed: a wrong bit goes into all of its numbers."""
        usual = max((tensor.misfit for tensor in self.solved), default=solved.misfit)
        if have_redundancy(signals) or solved.misfit <= MAX_MISFIT_RATIO * usual:
            return None
        return f"{solved.misfit:.1e} of its gradient is left, where above it was {usual:.1e} or less"

    def _askable_users(self, ref: Ref) -> list[int]:
        """Return the layers that take a tensor, as far as the signals at their outputs are known."""
        users = []
        for number in self._users(ref):
            layer = self.network.layers[number]
            if layer.groups != 1:
                self.ends[layer.name] = f"{layer.groups} groups of channels: {layer.input_equations} equations each"
                continue
            try:
                self.known.layer_signal(number)
                users.append(number)
            except UnknownError as error:
                self.waiting[layer.name] = f"{error}{self._count_pointwise(number)}"
        return users

    def _count_pointwise(self, number: int) -> str:
        """Say of a pointwise convolution why nothing is known of it but by what flows back from above."""
        layer = self.network.layers[number]
        if self.network.graph.nodes[number].operation != "convolution" or not layer.is_pointwise:
            return ""
        equations, numbers = layer.count_factors()
        return (
            "; a pointwise convolution's gradient has no shifts of a map: with the biases behind it, it is at most "
            f"{equations:,} independent equations for the {numbers:,} numbers that go in and flow back at "
            f"{layer.unknown_signals:,} positions"
        )

    def _note_bits(self, users: list[int], signals: list[KnownSignal]) -> None:
        for number, known in zip(users, signals, strict=True):
            gate = self.network.gate(Ref(number))
            if known.bits is not None and gate is not None:
                activation = gate[0]
                self.known.set_mask(activation, known.bits.reshape(gate[1].shape))

    def _note_values(self, ref: Ref, solved: SolvedInput, names: tuple[str, ...]) -> None:
        values = solved.values.reshape(self.network.graph.value(ref).shape)
        while (before := self._undo_arrangement(ref, values)) is not None:
            self.known.set_value(ref, values)
            ref, values = before
        activation = self.network.activations.get(ref.node)
        if not self.scaled and (self._is_positive(ref) or (activation is not None and activation.slope >= 0)):
            signs = _signs(values)
            values = values * signs
            self.known.rescale(signs.flatten(), self.before_anchor)  # signals turn with them: only products are known
        if activation is not None:
            threshold = open_above(values) if activation.slope == 0 else 0.0
            mask = values > threshold
            self.known.set_mask(ref.node, mask)
            values = values * mask if activation.slope == 0 else values
        elif self._is_positive(ref):  # as of pooled activations
            values = values * (values > open_above(values))
        self.known.set_value(ref, values)
        self.solved.append(SolvedTensor(ref, values, solved.misfit, self.scaled, names))

    def _undo_arrangement(self, ref: Ref, values: Tensor) -> tuple[Ref, Tensor] | None:
        """Return the tensor that an operation made this one of by arranging numbers alone, and its values, or None."""
        flows = self.network.flows_into(ref.node) if ref.node >= 0 and self.network.is_affine(ref.node) else []
        if len(flows) != 1 or len(self.network.consumers[flows[0]]) != 1 or flows[0].node == IMAGE or ref.output:
            return None  # a further output, as of split, is a part
        before = self.network.pull_back(ref.node, values, flows[0])
        again = self.network.run(ref.node, {flows[0]: before})
        same = before.numel() == values.numel() and torch.equal(again, values)
        return (flows[0], before) if same else None

    def _is_positive(self, ref: Ref) -> bool:
        """Return whether the trace has no negative number there, as where an activation was pooled."""
        return bool((self.network.graph.value(ref) >= 0).all())

    def _find_signals(self) -> None:
        """Solve for what flows back into layers whose input alone is known."""
        for number, layer in self.network.layers.items():
            if layer.groups != 1 or layer.signal_equations < layer.unknown_signals:
                continue
            try:
                values = self.known.value(self.network.layer_input(number)).reshape(layer.input_shape)
            except UnknownError:
                continue
            try:
                self.known.signal(Ref(number))
                continue
            except UnknownError:
                pass
            found = solve_signal(layer, values)
            if found is not None and found[1] < MAX_MISFIT:
                self.known.set_signal(Ref(number), found[0].reshape(self.network.graph.value(Ref(number)).shape))


def _doubt(solved: SolvedInput, missed: float) -> str | None:
    """Return why a solved input that misses so much of known outputs is not believed, or None."""
    if missed > MAX_MISFIT:
        return f"its equations nearly leave inputs open: {missed:.1e} of known outputs are missed"
    if not solved.misfit < MAX_MISFIT:
        return f"no input explains its gradient: {solved.misfit:.1e} of it is left{ASKED_OF_UPDATES}"
    if solved.bad_channels > MAX_BAD_CHANNELS * solved.channels:
        return f"{solved.bad_channels} of {solved.channels} channels do not fit{ASKED_OF_UPDATES}"
    return None


def _two_values(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Return of signals that are 0 or one number for a channel of an image that number, and where they are not 0."""
    flat = signal.flatten(2)
    largest = flat.gather(2, flat.abs().argmax(2, keepdim=True))
    heard = largest.abs() > 1e-5 * largest.abs().amax(1, keepdim=True)
    bits = (flat / largest.where(heard, torch.ones_like(largest)) > 0.5) & heard
    mean = (flat * bits).sum(2, keepdim=True) / bits.sum(2, keepdim=True).clamp_min(1)
    return mean.expand_as(flat).reshape(signal.shape), bits.reshape(signal.shape)


def _signs(values: Tensor) -> Tensor:
    """Return the sign of each image's values that makes their sum positive."""
    return values.flatten(1).sum(1).sign().reshape(-1, *[1] * (values.ndim - 1))
