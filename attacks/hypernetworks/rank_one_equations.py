"""The equations of a hypernetwork's update: a layer that sees one input gives that input away.

Symbols. v the client's embedding; W0, b0 the first layer (the trunk), z = W0 v + b0, a = relu(z) its activations;
W_k, b_k the head that makes tensor k of the network, theta_k = W_k a + b_k; g_k the gradient of the loss by theta_k;
dX what the client's update holds for X. One step of SGD gives, up to the common factor of step size and clipping,

    (1)  dW_k = g_k a^T        (2)  db_k = g_k
    (3)  db0 = relu'(z) * sum_k W_k^T g_k        (4)  dW0 = db0 v^T.

Several steps add up such terms. Each of (1) and (4) has rank one, so its right factor is a least-squares fit:

    v = dW0^T db0 / |db0|^2,        a = sum_k dW_k^T db_k / sum_k |db_k|^2.

Without head biases (2) is missing: a's direction is the leading right singular vector of the dW_k stacked, g_k follows
from (1), and (3) gives the length.

A defense that cuts entries. Fits take the entries that were sent (a mask of ones): with left factor l and mask S, the
fit of an input is sum_i S_ij l_i dW_ij / sum_i S_ij l_i^2. The denominators are called energies here.

Noise (rounding, or a defense's). (1) and (2) hold g_k twice: in the bias with variance s_b^2, and as the fit
r = dW a / |a|^2 with variance s_w^2 / |a|^2, where the residuals of the fits tell s_w and s_b. The mean weighted by
inverse variances is better than both (`LayerGradientFusion.gradient`). A fit to a noisy bias is too short, as noise
adds to its square; it gets the length at which <r, r> without its noise equals <r, db> (`rescale_to_bias`).

Agreement of both ways in one step. v and a are of the same instant: W0 v + b0 = s a on the active units. With the
trunk's v and s = 1 as further equations, each weighted by its standard error, they are a least-squares problem in v
and s (`HypernetUpdate.fuse_trunk_and_heads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl.models.hypernetworks.hyperfl_hypernetwork import TRUNK_BIAS, TRUNK_WEIGHT, head_bias, head_weight
from fl.tensors import LowRank, Tensors, Value, dense, inner, map_values, matvec, norm, rmatvec


@dataclass(frozen=True)
class Precision:
    """How exactly an update says what one step made.

    Attributes:
        rounding: relative size of what rounding alone can leave in the update.
        one_step: whether one step made it, so that every head's update is one outer product.
        rounded: whether it is a difference of weights, and so off by that share of them, not only of itself.
    """

    rounding: float
    one_step: bool = True
    rounded: bool = True


@dataclass(frozen=True)
class HypernetUpdate:
    """A hypernetwork's parameters and its update without decay, in double precision.

    All reading goes through products with vectors, so that outer products stay factored.

    Attributes:
        shared: parameters the server sent.
        change: their update; zero where a known defense has cut it.
        names: the generated tensors.
        bias: whether the heads have biases.
        precision: how exactly the update is known.
        sent: 1 where an entry was sent, 0 where a known defense cut it, by name; None if nothing is cut.
    """

    shared: Tensors
    change: Tensors
    names: tuple[str, ...]
    bias: bool
    precision: Precision
    sent: dict[str, Tensor] | None = None

    @classmethod
    def of(
        cls,
        shared: Tensors,
        change: Tensors,
        names: tuple[str, ...],
        *,
        bias: bool,
        precision: Precision,
        passed: Callable[[Tensors], Tensors] | None = None,
    ) -> HypernetUpdate:
        """Return the equations of an update of any floating-point type.

        Args:
            shared: parameters the server sent, by name.
            change: their update without decay, likewise.
            names: the generated tensors.
            bias: whether the heads have biases.
            precision: how exactly the update is known.
            passed: what a known defense lets through of an update; None is all of it.
        """
        keep = parameter_names(names, bias=bias)
        # the published head weights stay in their own type: they are only multiplied with vectors
        mine, moved = {n: shared[n] for n in keep}, map_values({n: change[n] for n in keep}, torch.Tensor.double)
        sent = None if passed is None else _sent_masks(moved, passed)
        if sent is not None:  # what a defense has cut to a limit is no zero
            moved = {n: value * sent[n] if isinstance(value, torch.Tensor) else value for n, value in moved.items()}
        return cls(mine, moved, names, bias, precision, sent)

    def is_complete(self, layer: str) -> bool:
        """Return whether the fit of the input of `layer` ("trunk" or "heads") finds all its numbers in the update."""
        seen = self.sent
        if seen is None:
            return True
        if layer == "trunk":
            return bool((seen[TRUNK_WEIGHT].mT @ dense(self.change[TRUNK_BIAS]).square() > 0).all())
        counts = torch.stack([seen[head_weight(n)].sum(0) for n in self.names]).sum(0)
        return bool((counts > 0).all())

    # ---- first layer -------------------------------------------------------------------------------------------------
    @property
    def is_trunk_inactive(self) -> bool:
        """Whether the first layer's update is no more than rounding."""
        return self._is_inactive([TRUNK_WEIGHT]) or self._is_inactive([TRUNK_BIAS])

    def embedding(self) -> Tensor:
        """Return the embedding as the least-squares fit of dW0 = db0 v^T (embedding,)."""
        back = dense(self.change[TRUNK_BIAS])
        found = rmatvec(self.change[TRUNK_WEIGHT], back) / self._energy_by_columns(TRUNK_WEIGHT, back)
        return rescale_to_bias(found, [self._fusion(TRUNK_WEIGHT, TRUNK_BIAS)]) if self.precision.one_step else found

    def trunk_residual(self, embedding: Tensor) -> float:
        """Return what the fit leaves of dW0, relative to it; 1 if it doesn't reach every number of the embedding."""
        if not self.is_complete("trunk"):
            return 1.0
        weight, back = dense(self.change[TRUNK_WEIGHT]), dense(self.change[TRUNK_BIAS])
        fitted = back[:, None] * embedding
        if self.sent is not None:
            rows = self.sent[TRUNK_BIAS][:, None]
            weight, fitted = weight * rows, fitted * self.sent[TRUNK_WEIGHT]
        return float((weight - fitted).norm() / weight.norm())

    def trunk_rows(self) -> float:
        """Return from how many rows each number of the embedding is read, at the least, counted by their weight.

        Of one row a product v is had whatever it holds.
        """
        weight = dense(self.change[TRUNK_BIAS]).square()
        seen = weight[:, None] if self.sent is None else self.sent[TRUNK_WEIGHT] * weight[:, None]
        return float(effective_count(seen).min())

    def hidden(self, embedding: Tensor) -> Tensor:
        """Return relu(W0 v + b0) (hidden,)."""
        weight, bias = (dense(self.shared[n]).double() for n in (TRUNK_WEIGHT, TRUNK_BIAS))
        return torch.relu(weight @ embedding + bias)

    def fuse_trunk_and_heads(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return embedding and activations on which first layer and heads agree, weighed by their fits' residuals.

        In an update of one step both are of the same instant: W0 v + b0 = s a on active units. These equations, the
        first layer's own v, and s = 1 (loosely so without head biases, where the length of a comes from db0) make a
        least-squares problem in v and s.
        """
        weight, bias = (dense(self.shared[n]).double() for n in (TRUNK_WEIGHT, TRUNK_BIAS))
        count = sum(change.numel() for change in self._head_changes().values())
        misfit = self.trunk_residual(embedding)
        of_embedding = self._error(embedding, misfit, weight.numel())
        of_hidden = self._error(hidden, self.heads_residual(hidden), count)
        # over thousands of entries rounding averages out: a length is known far better than any of them
        told = sum(gradient.numel() for gradient in self._bias_changes().values()) if self.bias else 1
        length = self._length_error(hidden) if self.bias else misfit
        of_length = max(length, self.precision.rounding / math.sqrt(told))
        live = self.hidden(embedding) > 0
        system = torch.cat([weight[live], -hidden[live, None]], dim=1)
        gap = (hidden - bias - weight @ embedding)[live]
        trust = torch.full((system.shape[1],), of_hidden / of_embedding, dtype=system.dtype, device=system.device)
        trust[-1] = of_hidden / of_length
        change = torch.linalg.solve(system.mT @ system + torch.diag(trust**2), system.mT @ gap)
        return embedding + change[:-1], hidden * (1 + change[-1])

    def _length_error(self, hidden: Tensor) -> float:
        """Return the standard error of the activations' length, from how far head biases and head weights differ."""
        gradient, raised = self._bias_changes(), self._head_gradients(hidden)
        apart = sum(float((g - raised[n]).square().sum()) for n, g in gradient.items())
        whole = sum(float(g @ g) for g in gradient.values())
        return math.sqrt(apart / whole / sum(g.numel() for g in gradient.values()))

    def _error(self, fitted: Tensor, residual: float, count: int) -> float:
        """Return the standard error of an entry of a fitted factor, from what the fit leaves of `count` numbers."""
        rounded = self.precision.rounding / math.sqrt(fitted.numel())
        return float(fitted.norm()) * max(residual / math.sqrt(count), rounded)

    # ---- heads -------------------------------------------------------------------------------------------------------
    @property
    def are_heads_inactive(self) -> bool:
        """Whether the head weights' update is no more than rounding."""
        return self._is_inactive([head_weight(n) for n in self.names])

    @property
    def are_biases_inactive(self) -> bool:
        """Whether the head biases' update is no more than rounding."""
        return self._is_inactive([head_bias(n) for n in self.names])

    def rounding_bound(self) -> float:
        """Bound the part W a of theta = W a + b, relative to |b|, although the head weights seem at rest.

        With |db| = |g|, an activation a moves them by |g| |a|, which can hide below what rounding leaves of W;
        infinite where a defense may have cut it.
        """
        if self.sent is not None:
            return math.inf
        biases = [head_bias(n) for n in self.names]
        weights = [dense(self.shared[head_weight(n)]) for n in self.names]
        start = float(norm({n: self.shared[n] for n in biases}))
        heard = float(norm({n: self.change[n] for n in biases})) - self._max_rounding(biases)
        if heard <= 0 or start == 0:
            return math.inf
        moved = math.sqrt(sum(float(inner(w, w)) for w in self._head_changes().values()))
        hidden = (moved + self._max_rounding([head_weight(n) for n in self.names])) / heard
        gram = torch.stack([w.mT @ w for w in weights]).sum(0)
        return math.sqrt(float(torch.linalg.matrix_norm(gram.double(), 2))) * hidden / start

    def gradient(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the generated tensors' own gradient times step size and clip factor, by name (n,).

        The heads' biases hold it as it is, and in one step their weights once for every active unit: the mean of both,
        weighted by inverse variances. Without biases it is the least-squares fit of dW_k = g_k a^T.
        """
        if not self.bias:
            return self._head_gradients(hidden)
        if not self.precision.one_step or not bool(hidden.any()):
            return self._bias_changes()
        return {n: self._fusion(head_weight(n), head_bias(n)).gradient(hidden) for n in self.names}

    def hidden_from_head_gradients(self) -> Tensor:
        """Return the hidden activations from the heads (hidden,).

        They are all zero where no length fits, as several steps may make it.
        """
        if self.bias:
            own = self._bias_changes()
            size = sum(self._energy_by_columns(head_weight(n), g) for n, g in own.items())
            hidden = torch.clamp(
                self._pull_back(own) / size, min=0
            )  # activations of a ReLU: what is below 0 is rounding
            if not self.precision.one_step or not bool(hidden.any()):
                return hidden
            return rescale_to_bias(hidden, [self._fusion(head_weight(n), head_bias(n)) for n in self.names])
        if self.are_heads_inactive:
            return torch.zeros_like(dense(self.change[TRUNK_BIAS]))
        direction = self.leading_direction()
        # |a| is what is left: G_k = dW_k a/|a| = |a| g_k, and relu'(z) * sum_k W_k^T g_k must be db0
        back = dense(self.change[TRUNK_BIAS])
        return torch.clamp(direction * (self._pulled_back(direction) @ back) / (back @ back), min=0)

    def back_rows(self) -> float:
        """Return how many numbers of db0 there are, counted by their weight: of one alone a length follows always."""
        return float(effective_count(dense(self.change[TRUNK_BIAS]).square()[:, None]))

    def back_residual(self, hidden: Tensor) -> float:
        """Return what db0 leaves of relu'(z) * sum_k W_k^T g_k, relative to it; 1 if all activations are zero."""
        if not bool(hidden.any()):
            return 1.0
        back = dense(self.change[TRUNK_BIAS])
        return float((self._pulled_back(hidden) - back).norm() / back.norm())

    def heads_residual(self, hidden: Tensor) -> float:
        """Return the norm of all dW_k that the best fit with these activations leaves, relative to their own norm.

        It is 1 if all are zero.
        """
        if not bool(hidden.any()):
            return 1.0
        changes = self._head_changes()
        whole = sum(float(inner(w, w)) for w in changes.values())
        caught = sum(float(matvec(changes[n], hidden) @ g) for n, g in self._head_gradients(hidden).items())
        return math.sqrt(max(whole - caught, 0.0) / whole)

    def length_residual(self, hidden: Tensor) -> float:
        """Return the share of all dW_k that these activations fit at another length than the head biases say."""
        if not self.bias or not bool(hidden.any()):
            return 0.0
        apart, raised = 0.0, self._head_gradients(hidden)
        for n, gradient in self._bias_changes().items():
            squares = (gradient - raised[n]).square() * self._energy_by_rows(head_weight(n), hidden)
            apart += float((squares if self.sent is None else squares * self.sent[head_bias(n)]).sum())
        return math.sqrt(apart / sum(float(inner(w, w)) for w in self._head_changes().values()))

    def extractor(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return W_k a + b_k by name (n,)."""
        made = {}
        for n in self.names:
            weight = self.shared[head_weight(n)]
            made[n] = matvec(weight, hidden.to(dense(weight).dtype)).double()
            if self.bias:
                made[n] = made[n] + dense(self.shared[head_bias(n)])
        return made

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _pulled_back(self, hidden: Tensor) -> Tensor:
        """Return relu'(z) * sum_k W_k^T g_k (hidden,) of the g_k that fit dW_k = g_k a^T with these activations."""
        shared = {n: self.shared[head_weight(n)] for n in self.names}
        raised = self._head_gradients(hidden)
        pulled = sum(rmatvec(shared[n], g.to(dense(shared[n]).dtype)).double() for n, g in raised.items())
        assert isinstance(pulled, Tensor)
        return pulled * (dense(self.change[TRUNK_BIAS]).abs() > self._max_rounding([TRUNK_BIAS]))

    def _bias_changes(self) -> dict[str, Tensor]:
        return {n: dense(self.change[head_bias(n)]) for n in self.names}

    def _fusion(self, weight: str, bias: str) -> LayerGradientFusion:
        start = [dense(self.shared[n]).double().square().mean() for n in (weight, bias)]
        seen = None if self.sent is None else (self.sent[weight], self.sent[bias])
        return LayerGradientFusion(
            self.change[weight], dense(self.change[bias]), (float(start[0]), float(start[1])), seen
        )

    def _head_changes(self) -> dict[str, Value]:
        return {n: self.change[head_weight(n)] for n in self.names}

    def _is_inactive(self, names: list[str]) -> bool:
        change = norm({n: self.change[n] for n in names})
        return float(change) <= max(self._max_rounding(names), torch.finfo(torch.float64).tiny ** 0.5)

    def _max_rounding(self, names: list[str]) -> float:
        """Return what rounding can leave of these tensors together.

        The factors of outer products are exact by themselves.
        """
        whole = {n: self.shared[n] for n in names if self.precision.rounded and not _is_outer_products(self.change[n])}
        return self.precision.rounding * float(norm(whole)) if whole else 0.0

    def _energy_by_columns(self, name: str, left: Tensor) -> Tensor:
        """Return sums of squares of `left` (n,) over the rows sent of each column of `name`, (m,) or one for all."""
        if self.sent is None:
            return left @ left
        return (left.square() @ self.sent[name]).clamp_min(torch.finfo(left.dtype).tiny)

    def _energy_by_rows(self, name: str, right: Tensor) -> Tensor:
        """Return sums of squares of `right` (m,) over the columns sent of each row, (n,) or one for all."""
        if self.sent is None:
            return right @ right
        return (self.sent[name] @ right.square()).clamp_min(torch.finfo(right.dtype).tiny)

    def _head_gradients(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the least-squares fit of g_k in dW_k = g_k a^T, by name (n,)."""
        changes = self._head_changes()
        return {n: matvec(c, hidden) / self._energy_by_rows(head_weight(n), hidden) for n, c in changes.items()}

    def _pull_back(self, gradient: dict[str, Tensor]) -> Tensor:
        total = sum(rmatvec(w, gradient[n]) for n, w in self._head_changes().items())
        assert isinstance(total, Tensor)
        return total

    def leading_direction(self, iterations: int = 100, tolerance: float = 1e-14) -> Tensor:
        """Return the leading right singular vector of all dW_k stacked, of non-negative sum, by power iteration."""
        changes = self._head_changes()
        direction = torch.ones(next(iter(changes.values())).shape[1], dtype=torch.float64)
        direction = direction.to(dense(self.change[TRUNK_BIAS]).device) / direction.norm()
        for _ in range(iterations):
            raised = self._pull_back({n: matvec(w, direction) for n, w in changes.items()})
            if not bool(raised.any()):
                break
            raised = raised / raised.norm()
            moved = float((raised - direction).norm())
            direction = raised
            if moved < tolerance:
                break
        return direction if float(direction.sum()) >= 0 else -direction


@dataclass(frozen=True)
class LayerGradientFusion:
    """The update of one layer that saw one input, whose weight and bias both hold the gradient g (see the module).

    Attributes:
        weight: dW (n, m).
        bias: db (n,).
        start: mean square of an entry of the layer's weight and of its bias, which rounding is relative to. An exact
            outer product counts as rounded like the bias, since no update is exact that is sent as numbers.
        sent: 1 where an entry was sent, 0 where a known defense cut it: of the weight (n, m), of the bias (n,); None if
            nothing is cut.
    """

    weight: Value
    bias: Tensor
    start: tuple[float, float]
    sent: tuple[Tensor, Tensor] | None = None

    def gradient(self, x: Tensor) -> Tensor:
        """Return the gradient g (n,): the mean of both, weighted by inverse variances; zero where neither was sent."""
        raised = self._gradient_from_weight(x)
        of_raised, of_bias = self._noise_variances(x, raised)
        weight, bias = self.start
        if isinstance(self.weight, LowRank) and bias > 0:
            of_raised = of_raised.maximum(of_bias * weight / bias / self._input_energy(x))
        ours, mine = 1 / (of_raised + self._quantization_variance(x)), self._bias_sent / of_bias
        return torch.where(mine + ours > 0, (self.bias * mine + raised * ours) / (mine + ours), 0.0)

    def length_products(self, x: Tensor) -> tuple[float, float]:
        """Return |g|^2, as the weight's update gives it if x has this length, less noise, and the product of g with db.

        Both in units of the bias's noise, so that layers can be added up.
        """
        raised = self._gradient_from_weight(x)
        of_raised, of_bias = self._noise_variances(x, raised)
        both = self._bias_sent * of_raised.isfinite() / of_bias
        own = (raised.square() - of_raised.nan_to_num(posinf=0.0)) * both
        return float(own.sum()), float((raised * self.bias * both).sum())

    def _gradient_from_weight(self, x: Tensor) -> Tensor:
        """Return the least-squares fit of g in dW = g x^T (n,)."""
        return matvec(self.weight, x) / self._input_energy(x).clamp_min(torch.finfo(x.dtype).tiny)

    def _noise_variances(self, x: Tensor, raised: Tensor) -> tuple[Tensor, float]:
        """Estimate the noise variances of the gradient by the weight and by the bias from the update; never zero.

        Those of `raised` (n,) are infinite where nothing was sent; the other is the bias's.
        """
        rows = self._input_energy(x)
        known = self.weight.numel() if self.sent is None else float(self.sent[0].sum())
        squares = inner(self.weight, self.weight)
        residual = float(squares) - float((raised.square() * rows).sum())
        noise = max(residual, 0.0) / max(known - raised.numel(), 1.0) + _min_variance(squares, known)
        of_raised = torch.where(rows > 0, noise / rows, math.inf).expand_as(raised)
        both = (self._bias_sent * (rows > 0)).expand_as(raised)
        apart = torch.where(both > 0, (self.bias - raised).square() - of_raised - self._quantization_variance(x), 0.0)
        least = _min_variance(self.bias @ self.bias, self.bias.numel())
        return of_raised, max(float(apart.sum() / both.sum().clamp_min(1.0)), least)

    def _quantization_variance(self, x: Tensor) -> Tensor:
        """Return the variance that no averaging takes off `raised` (n,): of rows too small to be sent.

        Where numbers are sent in coarse steps, a row whose entries are all below one is sent as zeros: no noise is seen
        in it, and all of it is lost.
        """
        lost = self._quantization_step**2 / 12 * (x.abs().sum() / (x @ x)) ** 2
        return torch.where(self.bias.abs() * x.abs().max() < 2 * self._quantization_step, lost, 0.0)

    @cached_property
    def _quantization_step(self) -> float:
        """The smallest number sent of the weight, 0 where it is none of coarse steps."""
        if self.sent is not None or not isinstance(self.weight, Tensor) or not bool(self.weight.any()):
            return 0.0
        return float(torch.where(self.weight == 0, math.inf, self.weight.abs()).min())

    def _input_energy(self, x: Tensor) -> Tensor:
        """Return the sum of squares of x over the entries sent of each row, (n,) or one for all."""
        return x @ x if self.sent is None else self.sent[0] @ x.square()

    @property
    def _bias_sent(self) -> Tensor:
        """1 where the bias was sent, (n,) or one for all."""
        return self.bias.new_ones(()) if self.sent is None else self.sent[1]


def effective_count(weights: Tensor) -> Tensor:
    """Return how many rows of each column there are (m,), counted by what they weigh (n, m): 1 where one has it all."""
    shares = weights / weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return shares.sum(0) / shares.square().sum(0).clamp_min(torch.finfo(weights.dtype).tiny)


def _min_variance(squares: Tensor, count: float) -> float:
    """Return the variance that double precision leaves on numbers of which there are `count`; in their own unit."""
    least = torch.finfo(torch.float64).tiny ** 0.5  # whose inverse is no infinity
    return torch.finfo(torch.float64).eps ** 2 * float(squares) / max(count, 1.0) + least


def rescale_to_bias(x: Tensor, layers: Sequence[LayerGradientFusion]) -> Tensor:
    """Return `x` (m,) at the length that weights and biases agree on.

    A least-squares fit to a noisy bias comes out too short, as its noise adds to its square.
    """
    whole = common = 0.0
    for layer in layers:
        square, product = layer.length_products(x)
        whole, common = whole + square, common + product
    return x * (whole / common) if whole > 0 and common > 0 else x


def parameter_names(names: Iterable[str], *, bias: bool) -> list[str]:
    """Return the parameters of a hypernetwork that generates `names`."""
    names = tuple(names)
    return [TRUNK_WEIGHT, TRUNK_BIAS, *map(head_weight, names), *(map(head_bias, names) if bias else ())]


def _is_outer_products(value: Value) -> bool:
    """Return whether it is outer products alone."""
    return isinstance(value, LowRank) and (value.base is None or value.scale == 0)


def _sent_masks(change: Tensors, passed: Callable[[Tensors], Tensors]) -> dict[str, Tensor] | None:
    """Return 1 where something passes a known defense, 0 elsewhere; None if it cuts nothing."""
    ones: Tensors = {n: torch.ones_like(c) for n, c in change.items() if isinstance(c, Tensor)}
    seen = {n: (dense(value) != 0).double() for n, value in passed(ones).items()}
    if all(bool(mask.all()) for mask in seen.values()):
        return None
    return {n: seen[n] if n in seen else torch.ones(c.shape).to(dense(change[TRUNK_BIAS])) for n, c in change.items()}
