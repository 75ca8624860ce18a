"""With the batch's statistics held fast, each picture has by itself the features that it had in the batch."""

import torch

from attacks.analytic.graph.batch_normalization import find_normalizations, read_statistics
from attacks.analytic.graph.picture_search import FeaturePath
from attacks.analytic.graph.training_mode import _FixedStatistics
from attacks.network.operation_trace import IMAGE, Ref
from tests.attacks.analytic.graph.test_residual_blocks import Network, traced


def test_features_are_those_of_the_batch_picture_by_picture() -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    view, network = traced(Network().train())
    norms, statistics = find_normalizations(network), read_statistics(view, network.graph.image)
    end = list(network.activations)[-1]
    nodes = network.operations_to([Ref(end)])
    true = network.graph.replay_values(nodes, {Ref(IMAGE): images})
    known = {}
    for number in norms:
        moments = statistics.moments(network.graph.value(Ref(number)))
        assert moments is not None
        known[Ref(number)] = moments
        assert torch.allclose(moments[0], true[Ref(number)].mean((0, 2, 3)), atol=1e-5)
    fixed = _FixedStatistics.of(network, nodes, norms, known)
    assert fixed is not None
    (made,) = fixed.features([FeaturePath(Ref(end), Ref(end), (), Ref(end))], torch.float64)(images)
    assert torch.allclose(made, true[Ref(end)], atol=1e-3)
    for number in range(2):
        (alone,) = fixed.features([FeaturePath(Ref(end), Ref(end), (), Ref(end))], torch.float64)(images[[number]])
        assert torch.allclose(alone, made[[number]], atol=1e-12)
    known.pop(Ref(next(iter(norms))))
    assert _FixedStatistics.of(network, nodes, norms, known) is None
