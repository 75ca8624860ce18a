"""What is said of a solution's end is about the layers below what was solved for."""

from attacks.analytic.graph.evaluation_mode import _explain_end
from attacks.analytic.graph.solver import GraphSolver, SolvedTensor
from tests.attacks.analytic.graph.test_output_equations import World


def test_the_end_named_is_below_what_was_solved_for() -> None:
    world = World(1)
    solver = GraphSolver(world.network, 1, world.known, waiting={"head.weight": "unknown"})
    assert _explain_end(solver) == "head.weight: unknown"
    solver.solved.append(SolvedTensor(world.start, world.true, 0.0, True, ("one.weight", "short.weight")))
    assert _explain_end(solver) == "one.weight: there is no layer below"
    solver.ends["one.weight and short.weight"] = "of another tensor"
    solver.ends["stem.weight"] = "too few equations"
    assert _explain_end(solver) == "stem.weight: too few equations"
