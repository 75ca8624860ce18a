"""Reads a client's update with weight decay, step size, the client's defense and its sign accounted for.

With W the weights that the server sent, an update of local training is

    U = sent - returned = D(s * W + C),

where s is the share of W that weight decay takes away whatever the data (`fl.local.weight_decay`), C the change that
the gradients make, and D the client's defense. The server knows W, s and, by its threat model, D. So it has
U - D(s * W), which is D(C) where D adds up as pruning does. `ObservedUpdate.change` is this difference, and everything
else here follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from attacks.result import NotApplicable
from attacks.update.classifier_update import is_update_sign_flipped
from attacks.update.float_rounding import RMS_ROUNDING
from attacks.update.overflow_safe_scaling import rescale_to_unit
from attacks.update.training_phases import adaptive_optimizer_obstacle, deviation_from_loss_gradient, training_phases
from attacks.update.update_rule import SIGNS_ONLY, hides_behind_signs
from fl.defense import Defense, ask_surrogate, overrides
from fl.local.weight_decay import decay_shares, without_decay
from fl.predict import predict
from fl.tensors import Tensors, Value, dense
from fl.types import Candidate, Phase
from fl.view import Part, ServerView

SENT = "sent/"
"""Put before the names of tensors as they were sent, next to the same without decay."""


@dataclass(frozen=True)
class ObservedUpdate:
    """An update as attacks read it.

    How many images of each class it was made of is read off it by `attacks.labels.recovery`.

    Attributes:
        view: what the server saw, of a client or of a group of clients.
    """

    view: ServerView

    # ---- weight decay and the defense --------------------------------------------------------------------------------
    @cached_property
    def decay_shares(self) -> dict[str, float]:
        """The share s of each shared tensor that weight decay takes away; tensors that lose nothing are left out."""
        view = self.view
        if view.parts and view.threat.knows_defense and overrides(view.defense, "surrogate"):
            return {}  # every client's decay went through its own defense: it is left in on both sides
        shares: dict[str, float] = {}
        for part in view.parts or (view,):
            weight = part.weight if isinstance(part, Part) else 1.0
            for name, share in self._shares_of(part).items():
                shares[name] = shares.get(name, 0.0) + weight * share
        return {name: share for name, share in shares.items() if share and name in view.update}

    @cached_property
    def unknown_decay(self) -> tuple[str, ...]:
        """The shared tensors whose decay can't be told: of adaptive optimizers, or of an unknown number of steps."""
        known = self._shares_of(self.view)
        return tuple(name for name in self.view.shared if name not in known)

    def _shares_of(self, part: Part | ServerView) -> dict[str, float]:
        return decay_shares(*training_phases(self.view, part), self.view.shared)

    def without_decay(self, values: Tensors, view: ServerView | None = None) -> Tensors:
        """Return an update without the part that weight decay makes, as far as the defense lets that part through.

        Args:
            values: an observed or predicted update, by name.
            view: which has the weights sent and the update observed; None takes this one's.
        """
        view = view or self.view
        # of a group, predictions go through the defense client by client
        known = self.view.threat.knows_defense and not self.view.parts
        passed = partial(self.view.defense.transmit_known_part, observed=view.update) if known else None
        return without_decay(values, view.shared, self.decay_shares, passed)

    @cached_property
    def change(self) -> Tensors:
        """The update without the part that weight decay makes, by name."""
        return self.without_decay(self.view.update)

    def transmitted(self, name: str) -> Tensor:
        """Return where a known defense let an entry of a tensor through (bool): only there is a zero an observation."""
        passed: Tensors = {name: self._passed(name)}
        return dense(without_unsent_gradient(self.view.client.defense, passed, self.change)[name]) != 0

    def _passed(self, name: str) -> Tensor:
        """Return what a known defense of updates lets through; one of gradients lets decay pass."""
        seen = dense(self.view.update[name])
        probe: Tensors = {name: torch.where(seen != 0, seen, seen.abs().max())}
        for part in self.view.client.defense.members():
            if not overrides(part, "search_gradient"):
                probe = part.transmit_known_part(probe, self.view.update)
        return dense(probe[name])

    def altered(self, *names: str) -> str | None:
        """Say which of the tensors a known defense has cut to a limit or else altered; None if there is none.

        Numbers that it left out are no such: there an observation is missing, and none is wrong.

        Args:
            names: of tensors; without any all of the update are asked.
        """
        defense = self.view.client.defense
        if not overrides(defense, "surrogate") or self.view.parts:
            return None
        for name in names or tuple(self.view.update):
            wrong = (dense(self.view.update[name]) != 0) & (self._passed(name) == 0)
            if bool(wrong.any()):
                count = f"{int(wrong.sum())} of {wrong.numel()} numbers of {name!r}"
                return f"the defense {defense.name} has cut or altered {count}: they are not the gradient's"
        return None

    def is_complete(self, *names: str) -> bool:
        """Return whether a known defense let all numbers of these tensors through, so that no zero is a gap."""
        if not overrides(self.view.client.defense, "surrogate") or self.view.parts:
            return True
        return all(bool(self.transmitted(name).all()) for name in names if name in self.view.update)

    def before_defense(self, name: str, signal: Tensor) -> Tensor:
        """Return a part of the update at the scale that it had before a known defense.

        A search passes its prediction through the defense once more, so that what it compares has to be as long as it
        was before the first time.

        Args:
            name: of the tensor that the part is of.
            signal: the part, in the tensor's shape.
        """
        defense = self.view.client.defense.with_unknown_scale()
        again = dense(defense.transmit_known_part({name: signal}, {name: self.view.update[name]})[name])
        norms = {n: dense(v).norm() for n, v in rescale_to_unit({"sent": signal, "again": again})[0].items()}
        return signal * (norms["sent"] / norms["again"]) if bool(again.any()) else signal

    # ---- gradient and scale ------------------------------------------------------------------------------------------
    @cached_property
    def gradient(self) -> Tensors | NotApplicable:
        """The gradient that one local step was taken along, up to a factor that clipping makes, or why it is not there.

        Where the update is a difference of weights, a tensor no longer than its rounding is zero.
        """
        view = self.view
        phases, schedule = training_phases(view)
        if schedule is None:
            return NotApplicable("the number of local steps is unknown")
        active = [phase for phase, steps in zip(phases, schedule, strict=True) if steps]
        if len(active) != 1:
            return NotApplicable(f"expected one phase of local training, got {len(active)}")
        (phase,) = active
        if (reason := adaptive_optimizer_obstacle([phase])) is not None:
            return NotApplicable(reason)
        if hides_behind_signs(view):
            return NotApplicable(SIGNS_ONLY)
        assigned = {n: g for n, g in phase.assign(view.shared).items() if n in view.update}
        groups = {n: g for n, g in assigned.items() if g.lr != 0}
        if assigned and not groups:
            return NotApplicable("the step size is 0: no image moves what is sent")
        moved = {n: value for n, value in self.change.items() if n in groups}
        if view.rounded:
            moved = {n: _zero_below_rounding(value, view.shared[n]) for n, value in moved.items()}
        return {n: value * (1 / phase.first_step_size(groups[n])) for n, value in moved.items()}

    def scale(self, name: str) -> float | None:
        """Return the length that a gradient of norm 1 has in this update.

        Args:
            name: of a shared tensor that moves in one phase.

        Returns:
            None where clipping, a defense or a rewrite hides it.
        """
        ((phase, _),) = self.moving_phases(name)
        group = phase.assign({name: None})[name]
        changed = any(overrides(self.view.client.defense, hook) for hook in ("surrogate", "gradient"))
        return (
            None if group.max_norm is not None or self.view.scale_unknown or changed else phase.first_step_size(group)
        )

    def steps(self, name: str) -> int | None:
        """Return how many local steps a shared tensor moves in; None if unknown."""
        counts = [count for _, count in self.moving_phases(name)]
        return None if None in counts else sum(count for count in counts if count is not None)

    def moving_phases(self, name: str) -> list[tuple[Phase, int | None]]:
        """Return the phases in which a shared tensor moves, and how many steps each has, as far as that is known."""
        phases, schedule = training_phases(self.view)
        counts = [p.steps for p in phases] if schedule is None else [len(steps) for steps in schedule]
        return [(p, n) for p, n in zip(phases, counts, strict=True) if n != 0 and name in p.assign({name: None})]

    # ---- rounding and sign -------------------------------------------------------------------------------------------
    def in_double(self, values: Tensors) -> dict[str, Tensor]:
        """Return the shared tensors of an observed or predicted update without decay, dense and in double precision."""
        names = [name for name in self.view.update if name in self.view.shared]
        change = self.without_decay({name: values[name] for name in names})
        return {name: dense(value).detach().double() for name, value in change.items()}

    @cached_property
    def relative_rounding(self) -> dict[str, float]:
        """How far each tensor of `change` is off for having been rounded, relative to its norm; 0 where that is 0."""
        view, change = self.view, self.in_double(self.view.update)
        step = RMS_ROUNDING * torch.finfo(view.dtype).eps
        sent = {SENT + name: dense(view.update[name]).double() for name in change}
        even, unit = rescale_to_unit({**change, **sent})
        found = {}
        for name in change:
            size, whole = float(dense(even[name]).norm()), float(dense(even[SENT + name]).norm())
            start = float(dense(view.shared[name]).double().norm()) / unit if view.rounded else 0.0
            found[name] = step * (whole + start) / size if size else 0.0
        return found

    @cached_property
    def sign_flipped(self) -> bool:
        """Whether the update seems to be after - before: then more classes than images are negative in the bias.

        It is told where the classifier's bias is sent after plain steps without a defense. A network that negates its
        logits itself is recognized by the update that it would make of gray images.
        """
        view, count = self.view, self.view.batch_size
        plain = deviation_from_loss_gradient(view) is None and view.method.uses_plain_cross_entropy(
            view.client.task, view.round
        )
        if not plain or type(view.client.defense) is not Defense or view.private or view.parts or count is None:
            return False
        if not is_update_sign_flipped(view, self.change, count):
            return False
        gray = torch.full((count, *view.task.input_shape), 0.5, dtype=view.dtype, device=view.device)
        labels = torch.zeros(count, dtype=torch.int64, device=view.device)
        with torch.no_grad():
            predicted = self.without_decay(predict(view, Candidate(gray, labels)))
        return not is_update_sign_flipped(view, predicted, count)


def without_unsent_gradient(defense: Defense, predicted: Tensors, change: Tensors) -> Tensors:
    """Return a prediction without what a defense takes off gradients, which shows once decay is taken off.

    Args:
        defense: that the attacker knows.
        predicted: by name, without decay.
        change: the observed update without decay.
    """
    for part in defense.members():
        if overrides(part, "search_gradient"):
            predicted = ask_surrogate(part, predicted, change)
    return predicted


def _zero_below_rounding(change: Value, start: Value) -> Value:
    """Return a tensor's change, or zero where it is no longer than the rounding of the weights it starts from."""
    if isinstance(change, Tensor) and change.norm() <= 4 * torch.finfo(change.dtype).eps * dense(start).norm():
        return torch.zeros_like(change)
    return change
