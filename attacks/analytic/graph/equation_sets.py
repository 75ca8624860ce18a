"""Which equations are put together to solve for what layers take, from the least to all there are.

Gradients alone come first where they have equations to spare: nothing else is cheaper. They may leave numbers open all
the same, where what flows back has fewer independent directions than counts allow, or contradict each other, where a
bit of an activation above is wrong and there are too few equations to show which. So then outputs that are known
above are put beside them, and then single numbers that are known outright, and signs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attacks.analytic.graph.joint_equations import KnownEntries, LinearEquations
from attacks.analytic.graph.layer_solves import KnownSignal, have_redundancy
from attacks.analytic.graph.output_equations import OutputEquations

HELD_BACK = 0.05
"""Share of known outputs by which an input that was solved for with the others is judged."""


@dataclass(frozen=True)
class EquationSet:
    """What an input is solved for by, beside the gradients of the layers that take it.

    Attributes:
        others: known outputs; None where none is asked.
        entries: single numbers and signs; None where none is asked.
        judges: known outputs that were not asked, by which the solution is judged; None where there are none.
    """

    others: LinearEquations | None = None
    entries: KnownEntries | None = None
    judges: OutputEquations | None = None

    @property
    def count(self) -> int:
        """Number of equations beside those of gradients and single numbers."""
        return 0 if self.others is None else self.others.count

    @property
    def is_of_gradients_alone(self) -> bool:
        """Whether nothing beside gradients is asked, nor judges the solution."""
        return self.others is None and self.entries is None and self.judges is None


def equation_sets(
    signals: Sequence[KnownSignal], outputs: OutputEquations | None, *, rectified: bool, precise: bool
) -> Iterator[EquationSet]:
    """Yield the sets of equations to try for an input, one after the other.

    Args:
        signals: of the layers that take it.
        outputs: known ones above; None where there are none.
        rectified: whether a ReLU made the input, so that no number is below zero.
        precise: whether what is known above is so precise that zeros can be told from small numbers.
    """
    if outputs is None or have_redundancy(signals):
        yield EquationSet(judges=outputs)
    asked, held = (None, None) if outputs is None else outputs.hold_back(HELD_BACK)
    if asked is not None:
        yield EquationSet(asked, None, held)
    if not precise:
        return
    if asked is not None:
        entries, mixed = asked.split_entries(rectified)
        if entries is not None:
            yield EquationSet(mixed if mixed.count else None, entries, held)
    elif rectified:
        values = signals[0].signal.new_zeros(signals[0].layer.input_shape)
        yield EquationSet(entries=KnownEntries(values.bool(), values, nonnegative=True))
