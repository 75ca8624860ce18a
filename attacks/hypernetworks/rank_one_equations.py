"""The equations a hypernetwork's update satisfies: every layer that sees one input gives that input away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.hypernetworks.gradient_fusion import SentTwice, lengthened
from fl.models.hypernetworks.hypernetwork import TRUNK_BIAS, TRUNK_WEIGHT, head_bias, head_weight
from fl.tensors import LowRank, Tensors, Value, dense, inner, map_values, matvec, norm, rmatvec


@dataclass(frozen=True)
class HypernetUpdate:
    """A hypernetwork's parameters and its update without decay, in float64.

    With a = relu(z), z = W0 v + b0 and theta_k = W_k a + b_k, one step of SGD on a gradient g_k of theta_k gives, up
    to the common factor of step size and clipping,

        dW_k = g_k a^T,   db_k = g_k,   db0 = relu'(z) * sum_k W_k^T g_k,   dW0 = db0 v^T.

    Several steps add up such terms. All reading goes through products with vectors, and fits leave out what a known
    defence has cut: that is zero in `change`, but not observed.

    A client that sends dW_k sends g_k once for every active unit, and db_k once more. So noise on the update averages
    out: fits take both, each weighted by the inverse variance of its noise, which is what they leave of each other.

    Attributes:
        shared: parameters the server sent.
        change: their update.
        names: the generated tensors.
        bias: whether the heads have biases.
        rounding: relative size of what rounding alone can leave in the update.
        rounded: whether it is a difference of weights, and so off by that share of them, not only of itself.
        single: whether one step made it, so that every head's update is one outer product.
        seen: 1 where an entry was sent, 0 where a known defence cut it, by name; None if nothing is cut.
    """

    shared: Tensors
    change: Tensors
    names: tuple[str, ...]
    bias: bool
    rounding: float
    single: bool = True
    seen: dict[str, Tensor] | None = None
    rounded: bool = True

    @classmethod
    def of(
        cls,
        shared: Tensors,
        change: Tensors,
        names: tuple[str, ...],
        *,
        bias: bool,
        rounding: float,
        single: bool = True,
        rounded: bool = True,
        passed: Callable[[Tensors], Tensors] | None = None,
    ) -> HypernetUpdate:
        """From parameters and update of any floating-point type, and what a known defence lets through."""
        keep = layers(names, bias=bias)
        # the published head weights stay in their own type: they are only multiplied with vectors
        mine, moved = {n: shared[n] for n in keep}, map_values({n: change[n] for n in keep}, torch.Tensor.double)
        seen = None if passed is None else _seen(moved, passed)
        return cls(mine, moved, names, bias, rounding, single, seen, rounded)

    def complete(self, layer: str) -> bool:
        """Whether the fit of the input of `layer` ("trunk" or "heads") finds each of its numbers in the update."""
        seen = self.seen
        if seen is None:
            return True
        if layer == "trunk":
            return bool((seen[TRUNK_WEIGHT].mT @ dense(self.change[TRUNK_BIAS]).square() > 0).all())
        counts = torch.stack([seen[head_weight(n)].sum(0) for n in self.names]).sum(0)
        return bool((counts > 0).all())

    # ---- first layer -------------------------------------------------------------------------------------------------
    @property
    def trunk_silent(self) -> bool:
        """Whether the first layer's update is no more than rounding."""
        return self._silent([TRUNK_WEIGHT]) or self._silent([TRUNK_BIAS])

    def embedding(self) -> Tensor:
        """The embedding as the least-squares fit of dW0 = db0 v^T (embedding,)."""
        back = dense(self.change[TRUNK_BIAS])
        found = rmatvec(self.change[TRUNK_WEIGHT], back) / self._seen_by_columns(TRUNK_WEIGHT, back)
        return lengthened(found, [self._sent(TRUNK_WEIGHT, TRUNK_BIAS)]) if self.single else found

    def trunk_residual(self, embedding: Tensor) -> float:
        """What the fit leaves of dW0, relative to it; 1 if it doesn't reach every number of the embedding."""
        if not self.complete("trunk"):
            return 1.0
        weight, back = dense(self.change[TRUNK_WEIGHT]), dense(self.change[TRUNK_BIAS])
        fitted = back[:, None] * embedding
        if self.seen is not None:
            rows = self.seen[TRUNK_BIAS][:, None]
            weight, fitted = weight * rows, fitted * self.seen[TRUNK_WEIGHT]
        return float((weight - fitted).norm() / weight.norm())

    def hidden(self, embedding: Tensor) -> Tensor:
        """relu(W0 v + b0) (hidden,)."""
        weight, bias = (dense(self.shared[n]).double() for n in (TRUNK_WEIGHT, TRUNK_BIAS))
        return torch.relu(weight @ embedding + bias)

    def reconciled(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and activations moved to where first layer and heads agree, each trusted by its fit's residual.

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
        told = sum(gradient.numel() for gradient in self._biases().values()) if self.bias else 1
        length = self._length_error(hidden) if self.bias else misfit
        of_length = max(length, self.rounding / math.sqrt(told))
        live = self.hidden(embedding) > 0
        system = torch.cat([weight[live], -hidden[live, None]], dim=1)
        gap = (hidden - bias - weight @ embedding)[live]
        trust = torch.full((system.shape[1],), of_hidden / of_embedding, dtype=system.dtype, device=system.device)
        trust[-1] = of_hidden / of_length
        change = torch.linalg.solve(system.mT @ system + torch.diag(trust**2), system.mT @ gap)
        return embedding + change[:-1], hidden * (1 + change[-1])

    def _length_error(self, hidden: Tensor) -> float:
        """Standard error of the length of the activations, from how far head biases and head weights disagree."""
        gradient, raised = self._biases(), self._raised(hidden)
        apart = sum(float((g - raised[n]).square().sum()) for n, g in gradient.items())
        whole = sum(float(g @ g) for g in gradient.values())
        return math.sqrt(apart / whole / sum(g.numel() for g in gradient.values()))

    def _error(self, fitted: Tensor, residual: float, count: int) -> float:
        """Standard error of an entry of a fitted factor, from what the fit leaves of `count` numbers."""
        rounded = self.rounding / math.sqrt(fitted.numel())
        return float(fitted.norm()) * max(residual / math.sqrt(count), rounded)

    # ---- heads -------------------------------------------------------------------------------------------------------
    @property
    def heads_silent(self) -> bool:
        """Whether the head weights' update is no more than rounding."""
        return self._silent([head_weight(n) for n in self.names])

    @property
    def biases_silent(self) -> bool:
        """Whether the head biases' update is no more than rounding."""
        return self._silent([head_bias(n) for n in self.names])

    def unheard(self) -> float:
        """How large, relative to |b|, the part W a of theta = W a + b may be although the head weights seem at rest.

        With |db| = |g|, an activation a moves them by |g| |a|, which can hide below what rounding leaves of W;
        infinite where a defence may have cut it.
        """
        if self.seen is not None:
            return math.inf
        biases = [head_bias(n) for n in self.names]
        weights = [dense(self.shared[head_weight(n)]) for n in self.names]
        start = float(norm({n: self.shared[n] for n in biases}))
        heard = float(norm({n: self.change[n] for n in biases})) - self._rounded(biases)
        if heard <= 0 or start == 0:
            return math.inf
        moved = math.sqrt(sum(float(inner(w, w)) for w in self._head_changes().values()))
        hidden = (moved + self._rounded([head_weight(n) for n in self.names])) / heard
        gram = torch.stack([w.mT @ w for w in weights]).sum(0)
        return math.sqrt(float(torch.linalg.matrix_norm(gram.double(), 2))) * hidden / start

    def gradient(self, hidden: Tensor) -> dict[str, Tensor]:
        """The generated tensors' own gradient times step size and clip factor, by name (n,).

        The heads' biases hold it as it is, and in one step their weights once for every active unit: the mean of both,
        weighted by inverse variances. Without biases it is the least-squares fit of dW_k = g_k a^T.
        """
        if not self.bias:
            return self._raised(hidden)
        if not self.single or not bool(hidden.any()):
            return self._biases()
        return {n: self._sent(head_weight(n), head_bias(n)).gradient(hidden) for n in self.names}

    def hidden_from_heads(self) -> Tensor:
        """The hidden activations from the heads (hidden,); all zero where no length fits, as several steps may do."""
        if self.bias:
            own = self._biases()
            size = sum(self._seen_by_columns(head_weight(n), g) for n, g in own.items())
            hidden = torch.clamp(self._pull(own) / size, min=0)  # activations of a ReLU: what is below 0 is rounding
            if not self.single or not bool(hidden.any()):
                return hidden
            return lengthened(hidden, [self._sent(head_weight(n), head_bias(n)) for n in self.names])
        direction = self._leading()
        # |a| is what is left: G_k = dW_k a/|a| = |a| g_k, and relu'(z) * sum_k W_k^T g_k must be db0
        raised = self._raised(direction)
        shared = {n: self.shared[head_weight(n)] for n in self.names}
        pulled = sum(rmatvec(shared[n], g.to(dense(shared[n]).dtype)).double() for n, g in raised.items())
        back = dense(self.change[TRUNK_BIAS])
        live = back.abs() > self._rounded([TRUNK_BIAS])
        assert isinstance(pulled, Tensor)
        return torch.clamp(direction * ((pulled * live) @ back) / (back @ back), min=0)

    def heads_residual(self, hidden: Tensor) -> float:
        """What the best fit with these activations leaves of all dW_k together, relative to them; 1 if all are zero."""
        if not bool(hidden.any()):
            return 1.0
        changes = self._head_changes()
        whole = sum(float(inner(w, w)) for w in changes.values())
        caught = sum(float(matvec(changes[n], hidden) @ g) for n, g in self._raised(hidden).items())
        return math.sqrt(max(whole - caught, 0.0) / whole)

    def length_residual(self, hidden: Tensor) -> float:
        """What of the dW_k these activations fit at another length than the head biases say, relative to all dW_k."""
        if not self.bias or not bool(hidden.any()):
            return 0.0
        apart, raised = 0.0, self._raised(hidden)
        for n, gradient in self._biases().items():
            squares = (gradient - raised[n]).square() * self._seen_by_rows(head_weight(n), hidden)
            apart += float((squares if self.seen is None else squares * self.seen[head_bias(n)]).sum())
        return math.sqrt(apart / sum(float(inner(w, w)) for w in self._head_changes().values()))

    def extractor(self, hidden: Tensor) -> dict[str, Tensor]:
        """W_k a + b_k by name (n,)."""
        made = {}
        for n in self.names:
            weight = self.shared[head_weight(n)]
            made[n] = matvec(weight, hidden.to(dense(weight).dtype)).double()
            if self.bias:
                made[n] = made[n] + dense(self.shared[head_bias(n)])
        return made

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _biases(self) -> dict[str, Tensor]:
        return {n: dense(self.change[head_bias(n)]) for n in self.names}

    def _sent(self, weight: str, bias: str) -> SentTwice:
        start = [dense(self.shared[n]).double().square().mean() for n in (weight, bias)]
        seen = None if self.seen is None else (self.seen[weight], self.seen[bias])
        return SentTwice(self.change[weight], dense(self.change[bias]), (float(start[0]), float(start[1])), seen)

    def _head_changes(self) -> dict[str, Value]:
        return {n: self.change[head_weight(n)] for n in self.names}

    def _silent(self, names: list[str]) -> bool:
        change = norm({n: self.change[n] for n in names})
        return float(change) <= max(self._rounded(names), torch.finfo(torch.float64).tiny ** 0.5)

    def _rounded(self, names: list[str]) -> float:
        """What rounding can leave of these tensors together; the factors of outer products are exact by themselves."""
        whole = {n: self.shared[n] for n in names if self.rounded and not _bare(self.change[n])}
        return self.rounding * float(norm(whole)) if whole else 0.0

    def _seen_by_columns(self, name: str, left: Tensor) -> Tensor:
        """The sum of squares of `left` (n,) over the rows each column of `name` was sent of, (m,) or one for all."""
        if self.seen is None:
            return left @ left
        return (left.square() @ self.seen[name]).clamp_min(torch.finfo(left.dtype).tiny)

    def _seen_by_rows(self, name: str, right: Tensor) -> Tensor:
        """The same of `right` (m,) over the columns each row was sent of, (n,) or one for all."""
        if self.seen is None:
            return right @ right
        return (self.seen[name] @ right.square()).clamp_min(torch.finfo(right.dtype).tiny)

    def _raised(self, hidden: Tensor) -> dict[str, Tensor]:
        """The least-squares fit of g_k in dW_k = g_k a^T, by name (n,)."""
        changes = self._head_changes()
        return {n: matvec(c, hidden) / self._seen_by_rows(head_weight(n), hidden) for n, c in changes.items()}

    def _pull(self, gradient: dict[str, Tensor]) -> Tensor:
        total = sum(rmatvec(w, gradient[n]) for n, w in self._head_changes().items())
        assert isinstance(total, Tensor)
        return total

    def _leading(self, iterations: int = 100, tolerance: float = 1e-14) -> Tensor:
        """The leading right singular vector of all dW_k stacked, of non-negative sum, by power iteration."""
        changes = self._head_changes()
        direction = torch.ones(next(iter(changes.values())).shape[1], dtype=torch.float64)
        direction = direction.to(dense(self.change[TRUNK_BIAS]).device) / direction.norm()
        for _ in range(iterations):
            raised = self._pull({n: matvec(w, direction) for n, w in changes.items()})
            raised = raised / raised.norm()
            moved = float((raised - direction).norm())
            direction = raised
            if moved < tolerance:
                break
        return direction if float(direction.sum()) >= 0 else -direction


def layers(names: Iterable[str], *, bias: bool) -> list[str]:
    """The parameters of a hypernetwork that generates `names`."""
    names = tuple(names)
    return [TRUNK_WEIGHT, TRUNK_BIAS, *map(head_weight, names), *(map(head_bias, names) if bias else ())]


def _bare(value: Value) -> bool:
    """Whether it is outer products alone."""
    return isinstance(value, LowRank) and (value.base is None or value.scale == 0)


def _seen(change: Tensors, passed: Callable[[Tensors], Tensors]) -> dict[str, Tensor] | None:
    """1 where something passes a known defence, 0 elsewhere; None if it cuts nothing."""
    ones: Tensors = {n: torch.ones_like(c) for n, c in change.items() if isinstance(c, Tensor)}
    seen = {n: (dense(value) != 0).double() for n, value in passed(ones).items()}
    if all(bool(mask.all()) for mask in seen.values()):
        return None
    return {n: seen[n] if n in seen else torch.ones(c.shape).to(dense(change[TRUNK_BIAS])) for n, c in change.items()}
