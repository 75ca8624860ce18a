"""Solves the equations of weighted layers for their inputs and for their signals, and corrects wrong activation masks.

What flows back into a layer is often known but for the bits of the activation above it: s = q where a bit is set and
slope q where it is not. A wrong bit spoils the equations of its own output channel alone. So channels that fit badly
are given less and less weight, the input is solved for, and then their bits are set right: one at a time where that
lessens the misfit, or all at once by fitting the channel's signal to the patches of the input, s_c = G_c X^+, of which
s_c / q_c is near 1 or near the slope.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.analytic.graph.joint_equations import GradientEquations, KnownEntries, LinearEquations
from attacks.analytic.graph.joint_least_squares import JointSolver, OutOfTimeError
from attacks.analytic.graph.layer_equations import LayerEquations
from attacks.analytic.graph.unsent_entries import EXACT, AndersonAcceleration, masked_least_squares
from attacks.search_control import check_time_limit

MAX_ROUNDS = 8
"""Rounds of solving for an input and correcting bits."""
MAX_FLIPS = 16
"""Bits of a channel that are turned one at a time."""
MISFIT_FACTOR = 30.0
"""A channel fits if its misfit is no more than so many times the median; a wrong bit of any weight makes it more."""
MAX_CHANNEL_MISFIT = 1e-2
"""Share of a channel's gradient that may stay unexplained: rounding of what is the difference of larger numbers."""
SILENT_CHANNEL, UNIFORM_ROUNDING = 1e-2, 4.0
"""Size of a channel, relative to the median, below which next to nothing flows back through it, and how many times what
is left of the median channel may then be left by rounding."""
MIN_CHANNEL_SIZE = 1e-3
"""Size of a channel, relative to the median, that it is taken to have at least."""
RIDGE = 1e-13
"""Share of the mean square of the patches that keeps their system solvable where positions see the same."""
ROBUST_ROUNDS = 6
"""Solutions with new weights of the channels, at most."""
TOLERANCES = (1e-4, 1e-6, 1e-8)
"""Tolerances of iterative solutions, one after the other: the first ones only show which channels fit badly."""
SETTLED = 0.1
"""Share by which the median misfit and the worst one change, at most, where further weights change nothing."""
EVEN_MISFITS = 4.0
"""Channels fit alike where the worst misfit is no more than so many times the median."""
MIN_RATIO, MIN_JOINT_RATIO = 1.1, 1.25
"""Equations that an unknown must have: gradients alone, and together with forward equations, which overlap."""
MIN_SIGNED_RATIO = 0.8
"""Equations for one unknown where no unknown is negative: about half of them will turn out to be zero."""
MIN_REDUNDANCY = 1.5
"""Equations that are kept for one unknown, even of channels that do not fit."""
TURNS, MAX_TURNS = 20, 200
"""Rounds of fitting an input and a signal in turn, at most: where all entries were sent, and else."""
REMEMBERED = 8
"""Last steps from which the next one is extrapolated."""
MIN_FALL = 0.9
"""Share to which the residual must fall for the iteration to go on."""
PATIENCE = 10
"""Turns without such a fall after which it ends."""
MIN_GAIN = 0.1
"""Share of a channel's squared misfit that turning a bit must remove."""
MIN_TOLD_SIGNAL = 1e-2
"""Share of a channel's largest signal above which its fitted signal says the bit."""


NEARLY_OPEN = "its equations nearly leave inputs open: by what is left of them inputs may be {:.1e} off"
"""Why an input is not believed that gradients alone gave."""
NO_GRADIENT = "its gradient is zero or no more than rounding"
"""Why a layer says nothing of what it takes."""
THRESHOLD_FACTOR = 1.5
"""An activation is open where its output is more than so many times the most negative one, which rounding made."""
MIN_THRESHOLD = 3e-7
"""Share of the largest output below which an activation counts as closed: sums in float32 round that much."""


@dataclass
class KnownSignal:
    """What flows back into a layer, given the bits of the activation above it.

    Attributes:
        layer: with its gradient.
        signal: (n, C, h, w) where every bit is set.
        bits: (n, C, h, w) bool, or None where the signal is known outright.
        slope: of the activation where its bit is not set.
        doubtful: (n, C, h, w) bool, bits that may be wrong; None where all may.
    """

    layer: LayerEquations
    signal: Tensor
    bits: Tensor | None = None
    slope: float = 0.0
    doubtful: Tensor | None = None

    def masked(self) -> Tensor:
        """Return the signal with its bits."""
        return self.signal if self.bits is None else torch.where(self.bits, self.signal, self.slope * self.signal)


@dataclass(frozen=True)
class SolvedInput:
    """The input of one or several layers.

    Attributes:
        values: (n, K, H, W).
        misfit: median over the channels of the share of the gradient that the input leaves.
        bad_channels: how many channels were left with more than a wrong bit may leave.
        channels: how many there are.
    """

    values: Tensor
    misfit: float
    bad_channels: int
    channels: int


def count_shortfall(signals: Sequence[KnownSignal], others: int = 0, entries: KnownEntries | None = None) -> str:
    """Say how few equations there are for the input of layers, in counts; empty where they suffice.

    Args:
        signals: of the layers.
        others: number of equations beside those of the layers' gradients, for all channels together.
        entries: numbers of the input that are known outright, which are none of its unknowns.
    """
    channels, unknowns = signals[0].layer.input_shape[1], signals[0].layer.unknown_inputs
    ratio = MIN_JOINT_RATIO if others or entries else MIN_RATIO
    if entries is not None and entries.nonnegative:
        ratio = MIN_SIGNED_RATIO
    counts = torch.full((channels,), unknowns) if entries is None else entries.unknown_counts()
    equations = sum(known.layer.input_equations for known in signals)
    if _count_missing(counts, equations, ratio) <= others:
        return ""
    names = " and ".join(known.layer.name for known in signals)
    more = f" and {others // channels} of known outputs" if others else ""
    which = (
        "" if entries is None or not bool(entries.known.any()) else f" (of {unknowns}; the others are known outright)"
    )
    numbers = round(float(counts.double().mean()))
    return f"{equations} equations of {names}{more} for {numbers} numbers{which} of each input channel"


def _count_missing(counts: Tensor, equations: int, ratio: float) -> float:
    """Return how many equations channels of so many unknowns (K,) lack, which have so many each.

    What channels have to spare is of use to none but themselves.
    """
    return float((ratio * counts - equations).clamp_min(0).sum())


def have_redundancy(signals: Sequence[KnownSignal]) -> bool:
    """Return whether gradients alone have equations to spare, by which wrong bits show."""
    layers = [known.layer for known in signals]
    return sum(layer.input_equations for layer in layers) >= MIN_REDUNDANCY * layers[0].unknown_inputs


def solve_input(
    signals: Sequence[KnownSignal], others: LinearEquations | None = None, entries: KnownEntries | None = None
) -> SolvedInput | None:
    """Return the input that the layers have in common, correcting bits of `signals` in place; None if undetermined.

    Args:
        signals: one for each layer that takes the input; layers of one group of channels.
        others: equations for the input beside those of the layers' gradients.
        entries: numbers of the input that are known outright.

    Raises:
        OutOfTimeError: the time for searches was over before any solution.
    """
    layers = [known.layer for known in signals]
    right = [layer.right_side() for layer in layers]
    size = [channel_sizes(known, g) for known, g in zip(signals, right, strict=True)]
    good = [torch.ones_like(norm, dtype=torch.bool) for norm in size]
    joint, last, floor, began = None, None, 0.0, time.process_time()
    for turn in range(MAX_ROUNDS):
        check_time_limit()
        matrices = [known.layer.signal_matrix(known.masked()) for known in signals]
        joint = None if others is None and entries is None else JointSolver(others, entries, began)
        solved = _robust_least_squares(_Systems(layers, matrices, size, joint), good, last)
        if solved is None and last is None and joint is not None and joint.ran_out:
            raise OutOfTimeError(joint.explain_time())
        if solved is None or (joint is not None and _are_few(joint, signals)):
            return last  # too few channels fit
        x, misfits = solved
        residual = [layer.unexplained(m, x) for layer, m in zip(layers, matrices, strict=True)]
        typical = _usual_misfit(misfits, good)
        floor = typical / 2 if turn == 0 else floor
        typical = max(typical, floor)  # what is left of few channels may fit by chance
        bad = [m > MISFIT_FACTOR * typical for m in misfits]
        values = layers[0].as_images(x.mT, layers[0].input_shape)
        found = sum(_count_misfits(m, n) for m, n in zip(misfits, size, strict=True))
        last = SolvedInput(values, typical, found, sum(map(len, right)))
        if not any(map(bool, map(torch.any, bad))) or turn == MAX_ROUNDS - 1:
            break
        turned = 0
        for known, rest, wrong, norm in zip(signals, residual, bad, size, strict=True):
            if known.bits is not None and bool(wrong.any()):
                turned += _correct_bits(known, values, rest, wrong, MISFIT_FACTOR * typical * norm)
        before, good = good, _choose_channels(bad, misfits, layers)
        if not turned and all(torch.equal(a, b) for a, b in zip(before, good, strict=True)):
            break
    return last


def open_above(values: Tensor) -> float:
    """Return up to which number an output of a ReLU, of those solved for, is none but for rounding."""
    return max(THRESHOLD_FACTOR * float(-values.min()), MIN_THRESHOLD * float(values.max()))


def error_by_gradients(signals: Sequence[KnownSignal], solved: SolvedInput) -> float:
    """Return by which share an input may be off that gradients alone gave; 0 where they have equations to spare."""
    return 0.0 if have_redundancy(signals) else estimate_error(signals, solved)


def estimate_error(signals: Sequence[KnownSignal], solved: SolvedInput) -> float:
    """Return by which share of itself an input may be off that gradients alone gave, by what it leaves of them.

    What is left of m equations of n unknowns has m - n directions, its error all n. Of a system that is nearly square
    and ill-conditioned little is left, whatever the right side, and the input is far off.
    """
    layers = [known.layer for known in signals]
    weights = [1 / channel_sizes(known, known.layer.right_side()) for known in signals]
    matrix, right = (
        torch.cat([(side * w[:, None, None]).flatten(0, 1) for side, w in zip(sides, weights, strict=True)])
        for sides in (
            [known.layer.signal_matrix(known.masked()) for known in signals],
            [layer.right_side() for layer in layers],
        )
    )
    values = layers[0].as_channels(solved.values).mT
    share, known = _sent_share(layers), _known_equations(layers)
    residual = right - matrix @ values if known is None else (right - matrix @ values) * known
    spare = max(1.0, share * len(matrix) - matrix.shape[1])
    squares = residual.square().sum() / share / spare
    factor, failed = torch.linalg.cholesky_ex(matrix.mT @ matrix)
    if int(failed):
        return math.inf
    spread = torch.cholesky_inverse(factor).diagonal().sum()
    return float((squares * spread).sqrt() / values.norm().clamp_min(1e-300))


def _sent_share(layers: Sequence[LayerEquations]) -> float:
    """Return which share of the entries of gradients are known."""
    return sum(layer.input_equations for layer in layers) / sum(
        layer.weight.numel() // layer.weight.shape[1] for layer in layers
    )


def _known_equations(layers: Sequence[LayerEquations], used: Sequence[Tensor] | None = None) -> Tensor | None:
    """Return which equations of layers' gradients are known (equations, K), layer by layer; None where all are.

    Args:
        layers: of one input.
        used: output channels (C,) of each that are asked; all if left out.
    """
    if all(layer.sent is None for layer in layers):
        return None
    parts = []
    for number, layer in enumerate(layers):
        known = layer.sent_equations()
        known = torch.ones_like(layer.right_side(), dtype=torch.bool) if known is None else known
        parts.append((known if used is None else known[used[number]]).flatten(0, 1))
    return torch.cat(parts)


def solve_signal(layer: LayerEquations, values: Tensor) -> tuple[Tensor, float] | None:
    """Return the signal (n, C, h, w) of a layer whose input is known, and the misfit; None if equations are too few.

    Args:
        layer: of one group of channels.
        values: its input (n, K, H, W).
    """
    if layer.signal_equations < MIN_RATIO * layer.unknown_signals:
        return None
    patches = layer.patches(values)
    if layer.sent is not None:
        return _solve_signal_by_sent(layer, patches, layer.sent)
    gram = patches @ patches.mT
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return None
    wanted = layer.gradient.flatten(1)
    found = torch.cholesky_solve(patches @ wanted.mT, factor)
    found = found + torch.cholesky_solve(patches @ (wanted - found.mT @ patches).mT, factor)
    misfit = float((wanted - found.mT @ patches).norm() / wanted.norm())
    return layer.as_images(found.mT, layer.output_shape), misfit


def _solve_signal_by_sent(layer: LayerEquations, patches: Tensor, sent: Tensor) -> tuple[Tensor, float] | None:
    """Return a layer's signal (n, C, h, w) by the entries of its gradient that are known, and the misfit of these."""
    found = masked_least_squares(patches.mT, layer.gradient.flatten(1).mT, sent.flatten(1).mT)
    if found is None:
        return None
    residual = (layer.gradient.flatten(1) - found.mT @ patches) * sent.flatten(1)
    return layer.as_images(found.mT, layer.output_shape), float(residual.norm() / (layer.gradient * sent).norm())


def fit_in_turn(layer: LayerEquations, signal: Tensor) -> Tensor:
    """Return a signal (n, C, h, w) that explains a layer's gradient better, or this one where it has too few equations.

    The gradient is linear in the input, given the signal, and in the signal, given the input: least squares in turn.
    The signals of the images may be mixed, by one mixing for all channels and positions.
    """
    if layer.sent is not None:
        return _fit_sent_in_turn(layer, signal)
    for _ in range(TURNS):
        found = _fit_once(layer, signal)
        if found is None:
            break
        signal = found[0]
    return signal


def _fit_once(layer: LayerEquations, signal: Tensor) -> tuple[Tensor, float] | None:
    """Return the signal that explains most with the input that this one explains most with, and the misfit."""
    known = layer.sent_equations()
    taken = _least_squares(
        layer.signal_matrix(signal).flatten(0, 1),
        layer.right_side().flatten(0, 1),
        None if known is None else known.flatten(0, 1),
    )
    return None if taken is None else solve_signal(layer, layer.as_images(taken.mT, layer.input_shape))


def _fit_sent_in_turn(layer: LayerEquations, signal: Tensor) -> Tensor:
    """Return likewise a signal that explains the entries that were sent, to rounding where it comes to that.

    What is not sent makes turns slow. So steps are extrapolated from the last few (Anderson's acceleration).
    """
    accelerated, least, best, since = AndersonAcceleration(REMEMBERED), math.inf, signal, 0
    for _ in range(MAX_TURNS):
        check_time_limit()
        signal = signal / signal.norm()
        found = _fit_once(layer, signal)
        if found is None:
            break
        made, misfit = found
        since = 0 if misfit < MIN_FALL * least else since + 1
        best, least = (made, misfit) if misfit < least else (best, least)
        if misfit < EXACT or since == PATIENCE:
            break
        signal = accelerated.extrapolate(signal, made / made.norm())
    return best


def _are_few(joint: JointSolver, signals: Sequence[KnownSignal]) -> bool:
    """Return whether equations are few for what turned out to be other than zero."""
    if joint.entries is None or joint.zero is None:
        return False
    counts = joint.entries.unknown_counts(joint.zero)
    equations = sum(known.layer.input_equations for known in signals)
    others = 0 if joint.others is None else joint.others.count
    return _count_missing(counts, equations, MIN_JOINT_RATIO) > others


def channel_sizes(known: KnownSignal, right: Tensor) -> Tensor:
    """Return how large the gradient of each output channel (C,) should be by its signal, which its rounding goes by.

    The gradient itself may be small by chance, where terms of several positions cancel.
    """
    sent = known.layer.as_channels(known.masked()).norm(dim=1)
    there = sent > 0
    if not bool(there.any()):
        return torch.ones_like(sent)
    shares = _row_norms(right)[there] / sent[there]
    heard = shares > 0  # of others nothing was sent, say
    usual = shares[heard].median() if bool(heard.any()) else shares.new_ones(())
    return (sent * usual).clamp_min(MIN_CHANNEL_SIZE * float((sent[there] * usual).median()) + 1e-300)


def _count_misfits(misfits: Tensor, size: Tensor) -> int:
    """Return how many channels miss more of their gradient than may be left of it.

    A channel through which next to nothing flows back may have a gradient of nothing but the rounding of the update,
    which is as large as what is left of others.
    """
    residual, silent = misfits * size, size < SILENT_CHANNEL * size.median()
    rounded = silent & (residual <= UNIFORM_ROUNDING * residual.median())
    return int(((misfits > MAX_CHANNEL_MISFIT) & ~rounded).sum())


def _row_norms(values: Tensor) -> Tensor:
    return values.flatten(1).norm(dim=1)


@dataclass(frozen=True)
class _Systems:
    """The equations of all layers that share an input.

    Attributes:
        layers: with their gradients.
        matrices: A (C, kh kw, n H W) of each.
        size: of each layer's channels (C,).
        joint: solves them together with what else is known; None where nothing is.
    """

    layers: Sequence[LayerEquations]
    matrices: Sequence[Tensor]
    size: Sequence[Tensor]
    joint: JointSolver | None

    def unexplained(self, x: Tensor) -> list[Tensor]:
        """Return what x (n H W, K) leaves of each layer's gradient (C, kh kw, K)."""
        return [layer.unexplained(m, x) for layer, m in zip(self.layers, self.matrices, strict=True)]

    def solve(self, weights: Sequence[Tensor], start: Tensor | None, tolerance: float) -> Tensor | None:
        """Return the weighted solution (n H W, K); None if it leaves numbers open.

        Args:
            weights: of the channels.
            start: a solution that is near, for iterations.
            tolerance: of iterations.
        """
        used = [w > 0 for w in weights]
        a, b = (
            torch.cat([(m[u] * w[u, None, None]).flatten(0, 1) for m, w, u in zip(sides, weights, used, strict=True)])
            for sides in (self.matrices, [layer.right_side() for layer in self.layers])
        )
        known = _known_equations(self.layers, used)
        if self.joint is None:
            return _least_squares(a, b, known)
        layer = self.layers[0]
        share = b.shape[1] ** 0.5  # the error of each equation is then about the same share of one
        gradients = GradientEquations(
            share * a,
            share * b,
            lambda rows: layer.as_images(rows.mT, layer.input_shape),
            lambda images: layer.as_channels(images).mT,
            known,
        )
        return self.joint.solve(gradients, start, tolerance)


def _robust_least_squares(
    systems: _Systems, good: Sequence[Tensor], before: SolvedInput | None
) -> tuple[Tensor, list[Tensor]] | None:
    """Return the numbers of all input channels (n H W, K) and every channel's misfit; None if undetermined.

    Output channels that fit badly are given less and less weight: one wrong bit puts its channel off, and by it all.
    """
    size = systems.size
    weights = [known.to(norm.dtype) / norm for norm, known in zip(size, good, strict=True)]
    solved = None if before is None else systems.layers[0].as_channels(before.values).mT
    misfits: list[Tensor] = []
    last = math.inf, math.inf
    for turn in range(ROBUST_ROUNDS):
        check_time_limit()
        tolerance = TOLERANCES[min(turn, len(TOLERANCES) - 1)]
        now = systems.solve(weights, solved, tolerance)
        if now is None and not misfits:
            return None
        if now is None:
            break  # too few channels are left with weight
        solved = now
        misfits = [_row_norms(residual) / n for residual, n in zip(systems.unexplained(solved), size, strict=True)]
        usual, worst = _usual_misfit(misfits, [w > 0 for w in weights]), float(torch.cat(misfits).max())
        final = systems.joint is None or tolerance == TOLERANCES[-1]
        uneven = worst > EVEN_MISFITS * usual
        settled = abs(usual - last[0]) <= SETTLED * usual and abs(worst - last[1]) <= SETTLED * worst
        if final and (turn == ROBUST_ROUNDS - 1 or not uneven or settled):
            break
        last = usual, worst
        if uneven:
            weights = [
                known / n * usual / m.clamp_min(0.3 * usual) for m, n, known in zip(misfits, size, good, strict=True)
            ]
    assert solved is not None
    return solved, misfits


def _usual_misfit(misfits: Sequence[Tensor], used: Sequence[Tensor]) -> float:
    """Return the largest of the layers' median misfits: one layer may have too few equations to miss any."""
    return max(float(m[u & (m > 0)].median().nan_to_num(0.0)) for m, u in zip(misfits, used, strict=True))


def _least_squares(a: Tensor, b: Tensor, known: Tensor | None = None) -> Tensor | None:
    """Return the solution of normal equations, refined once; None if they leave numbers open.

    Args:
        a: (equations, n).
        b: (equations, K).
        known: bool, like b, which of its numbers are; None where all are.
    """
    if known is not None:
        return masked_least_squares(a, b, known)
    scale = a.norm(dim=0)
    if not bool((scale > 0).all()):
        return None  # positions that no output sees, or that nothing flows back to
    gram = a.mT @ a
    factor, failed = torch.linalg.cholesky_ex(gram / scale / scale[:, None])
    if int(failed):
        return None

    def solve(rest: Tensor) -> Tensor:
        return torch.cholesky_solve((a.mT @ rest) / scale[:, None], factor) / scale[:, None]

    x = solve(b)
    return x + solve(b - a @ x)


def _choose_channels(
    bad: Sequence[Tensor], misfits: Sequence[Tensor], layers: Sequence[LayerEquations]
) -> list[Tensor]:
    """Return the channels that are used next: those that fit, and more in the order of their misfit if they are few."""
    taps = torch.cat(
        [
            torch.full_like(m, layer.sent_share * layer.weight[0, 0].numel())
            for m, layer in zip(misfits, layers, strict=True)
        ]
    )
    good, misfit = ~torch.cat(list(bad)), torch.cat(list(misfits))
    need = MIN_REDUNDANCY * layers[0].unknown_inputs
    if float(taps[good].sum()) < need:
        order = misfit.argsort()
        enough = int((taps[order].cumsum(0) < need).sum()) + 1
        good = good.clone()
        good[order[:enough]] = True
    return list(good.split([len(m) for m in misfits]))


def _correct_bits(known: KnownSignal, values: Tensor, residual: Tensor, wrong: Tensor, allowed: Tensor) -> int:
    """Turn bits of the channels `wrong` so that they fit; return how many were turned."""
    layer = known.layer
    assert known.bits is not None
    kernel = layer.weight[0, 0].numel()
    patches = layer.patches(values)  # (n h w, K kk)
    ordered = patches.reshape(len(patches), -1, kernel).transpose(1, 2).flatten(1)  # (n h w, kk K), as `left` lies
    squares = ordered.square().sum(1)
    sent = layer.sent_equations()
    signal, bits = layer.as_channels(known.signal), layer.as_channels(known.bits).clone()
    doubtful = torch.ones_like(bits) if known.doubtful is None else layer.as_channels(known.doubtful)
    factor: Tensor | None = None
    turned = 0
    for c in torch.nonzero(wrong)[:, 0].tolist():
        rest, row, start = residual[c].flatten(), bits[c].clone(), bits[c].clone()
        heard = ordered if sent is None else ordered * sent[c].flatten()
        squares = squares if sent is None else heard.square().sum(1)
        step = (1 - known.slope) * signal[c]
        for _ in range(MAX_FLIPS):
            if float(rest.norm()) <= float(allowed[c]):
                break
            change = torch.where(row, -step, step) * doubtful[c]
            gain = 2 * change * (heard @ rest) - change.square() * squares
            k = int(gain.argmax())
            if not float(gain[k]) > MIN_GAIN * float(rest.square().sum()):
                break
            rest = rest - change[k] * heard[k]
            row[k] = ~row[k]
        if float(rest.norm()) > float(allowed[c]) and len(ordered) < 0.8 * ordered.shape[1]:
            if factor is None or sent is not None:
                gram = heard @ heard.mT
                ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
                factor = torch.linalg.cholesky_ex(gram + ridge)[0]
            now = torch.where(start, signal[c], known.slope * signal[c])
            fitted = now + torch.cholesky_solve((heard @ residual[c].flatten())[:, None], factor)[:, 0]
            told = doubtful[c] & (signal[c].abs() > MIN_TOLD_SIGNAL * signal[c].abs().max())
            row = torch.where(told, fitted / torch.where(told, signal[c], 1.0) > (1 + known.slope) / 2, start)
        turned += int((row != start).sum())
        bits[c] = row
    known.bits = layer.as_images(bits, layer.output_shape)
    return turned
