"""The equations a hypernetwork's update satisfies: every layer that sees one input gives that input away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl.defense import overrides
from fl.models.hypernetwork import TRUNK_BIAS, TRUNK_WEIGHT, head_bias, head_weight
from fl.tensors import LowRank, Tensors, Value, add, dense, each, inner, matvec, norm, rmatvec
from fl.types import ServerView


def without_decay(view: ServerView, shares: Mapping[str, float]) -> Tensors:
    """The view's update without the share of each parameter that weight decay alone takes off.

    Args:
        view: the server's.
        shares: by name, as `fl.decay.decay_shares` gives them; other tensors stay as they are.
    """
    parts: Tensors = {}
    for name, share in shares.items():
        if share and name in view.update:
            base, lowrank = view.shared[name], isinstance(view.update[name], LowRank)
            parts[name] = (LowRank.of(dense(base)) if lowrank else base) * share  # equal bases cancel
    if view.threat.knows_defense and overrides(view.defense, "surrogate"):
        parts = view.defense.surrogate(parts, view.update)
    return {name: add(value, parts[name], -1.0) if name in parts else value for name, value in view.update.items()}


@dataclass(frozen=True)
class HypernetUpdate:
    """A hypernetwork's parameters and its update without decay, in float64.

    With a = relu(z), z = W0 v + b0 and theta_k = W_k a + b_k, one step of SGD on a gradient g_k of theta_k gives, up
    to the common factor of step size and clipping,

        dW_k = g_k a^T,   db_k = g_k,   db0 = relu'(z) * sum_k W_k^T g_k,   dW0 = db0 v^T.

    Several steps add up such terms. All reading goes through products with vectors.

    Attributes:
        shared: parameters the server sent.
        change: their update.
        names: the generated tensors.
        bias: whether the heads have biases.
        rounding: relative size of what rounding alone can leave in the update.
    """

    shared: Tensors
    change: Tensors
    names: tuple[str, ...]
    bias: bool
    rounding: float

    @classmethod
    def of(
        cls, shared: Tensors, change: Tensors, names: tuple[str, ...], *, bias: bool, rounding: float
    ) -> HypernetUpdate:
        """From parameters and update of any floating-point type."""
        keep = [TRUNK_WEIGHT, TRUNK_BIAS, *map(head_weight, names), *(map(head_bias, names) if bias else ())]
        # the published head weights stay in their own type: they are only multiplied with vectors
        return cls(
            {n: shared[n] for n in keep},
            each({n: change[n] for n in keep}, torch.Tensor.double),
            names,
            bias,
            rounding,
        )

    # ---- first layer -------------------------------------------------------------------------------------------------
    @property
    def trunk_silent(self) -> bool:
        """Whether the first layer's update is no more than rounding."""
        return self._silent([TRUNK_WEIGHT, TRUNK_BIAS])

    def embedding(self) -> Tensor:
        """The embedding as the least-squares fit of dW0 = db0 v^T (embedding,)."""
        back = dense(self.change[TRUNK_BIAS])
        return rmatvec(self.change[TRUNK_WEIGHT], back) / (back @ back)

    def trunk_residual(self, embedding: Tensor) -> float:
        """What the fit leaves of dW0, relative to it."""
        weight, back = dense(self.change[TRUNK_WEIGHT]), dense(self.change[TRUNK_BIAS])
        return float((weight - back[:, None] * embedding).norm() / weight.norm())

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
        of_length = max(self._length_error(hidden) if self.bias else misfit, self.rounding)
        live = self.hidden(embedding) > 0
        system = torch.cat([weight[live], -hidden[live, None]], dim=1)
        gap = (hidden - bias - weight @ embedding)[live]
        trust = torch.full((system.shape[1],), of_hidden / of_embedding, dtype=system.dtype, device=system.device)
        trust[-1] = of_hidden / of_length
        change = torch.linalg.solve(system.mT @ system + torch.diag(trust**2), system.mT @ gap)
        return embedding + change[:-1], hidden * (1 + change[-1])

    def _length_error(self, hidden: Tensor) -> float:
        """Standard error of the length of the activations, from how far head biases and head weights disagree."""
        gradient = self.gradient(hidden)
        raised = {n: matvec(c, hidden) / (hidden @ hidden) for n, c in self._head_changes().items()}
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

    def gradient(self, hidden: Tensor) -> dict[str, Tensor]:
        """The generated tensors' own gradient times step size and clip factor, by name (n,).

        The heads' biases hold it as it is; without them it is the least-squares fit of dW_k = g_k a^T.
        """
        if self.bias:
            return {n: dense(self.change[head_bias(n)]) for n in self.names}
        return {n: matvec(self.change[head_weight(n)], hidden) / (hidden @ hidden) for n in self.names}

    def hidden_from_heads(self) -> Tensor:
        """The hidden activations from the heads (hidden,); all zero where no length fits, as several steps may do."""
        if self.bias:
            gradient = self.gradient(torch.empty(0))
            hidden = self._pull(gradient) / sum(g @ g for g in gradient.values())
            return torch.clamp(hidden, min=0)  # activations of a ReLU: what is below 0 is rounding
        direction = self._leading()
        # |a| is what is left: G_k = dW_k a/|a| = |a| g_k, and relu'(z) * sum_k W_k^T g_k must be db0
        raised = {n: matvec(self.change[head_weight(n)], direction) for n in self.names}
        shared = {n: self.shared[head_weight(n)] for n in self.names}
        pulled = sum(rmatvec(shared[n], g.to(dense(shared[n]).dtype)).double() for n, g in raised.items())
        back = dense(self.change[TRUNK_BIAS])
        live = back.abs() > self.rounding * dense(self.shared[TRUNK_BIAS]).double().norm()
        assert isinstance(pulled, Tensor)
        return torch.clamp(direction * ((pulled * live) @ back) / (back @ back), min=0)

    def heads_residual(self, hidden: Tensor) -> float:
        """What the best fit with these activations leaves of all dW_k together, relative to them; 1 if all are zero."""
        if not bool(hidden.any()):
            return 1.0
        direction = hidden / hidden.norm()
        whole = sum(float(inner(w, w)) for w in self._head_changes().values())
        caught = sum(float(matvec(w, direction).square().sum()) for w in self._head_changes().values())
        return math.sqrt(max(whole - caught, 0.0) / whole)

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
    def _head_changes(self) -> dict[str, Value]:
        return {n: self.change[head_weight(n)] for n in self.names}

    def _silent(self, names: list[str]) -> bool:
        change = norm({n: self.change[n] for n in names})
        return bool(change <= self.rounding * norm({n: self.shared[n] for n in names}))

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
