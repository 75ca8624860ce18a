from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import worlds
from support.compare import assert_same
from support.probes import PROBES

from defenses import defenses
from defenses.clip import Clip, ClipOfUnknownNorm
from defenses.compose import Chain
from defenses.noise import Noise
from defenses.precode import Precode
from defenses.prune import Prune
from defenses.signsgd import SignSGD
from fl.defense import Defense, overrides
from fl.methods.fedavg import FedAvg
from fl.methods.hyperfl import HyperFL
from fl.predict import predict
from fl.seeds import stream
from fl.tensors import Tensors, dense

UPDATE: Tensors = {
    "a": torch.randn(20, 5, generator=stream(0), dtype=torch.float64),
    "b": torch.randn(30, generator=stream(1), dtype=torch.float64) * 10,
}


def test_the_first_comes_first() -> None:
    prune, noise = Prune(ratio=0.5), Noise(std=0.1)
    silent = Chain(parts=(noise, prune)).transform_update(UPDATE, stream(0))
    assert_same(silent, prune.transform_update(noise.transform_update(UPDATE, stream(0)), stream(0)))
    assert int((dense(silent["a"]) == 0).sum()) == 50
    loud = Chain(parts=(prune, noise)).transform_update(UPDATE, stream(0))
    assert dense(loud["a"]).all()


@pytest.mark.parametrize(
    "parts", [(Prune(ratio=0.5), SignSGD()), (Clip(max_norm=1e-3), Prune(ratio=0.5), Clip(max_norm=1e-4))], ids=str
)
@pytest.mark.parametrize("method", [FedAvg.example(), HyperFL.example()], ids=lambda m: m.name)
def test_the_truth_predicts_the_update(method: Any, parts: Any) -> None:
    view, truth = worlds.federation(method, Chain(parts=parts)).observe(1)
    assert_same(predict(view, truth.candidate()), view.update)


def test_an_attacker_reads_the_mask_off_pruned_signs() -> None:
    chain = Chain(parts=(Prune(ratio=0.5), SignSGD()))
    observed = chain.transform_update(UPDATE, None)
    guess: Tensors = {name: torch.ones_like(dense(value)) for name, value in UPDATE.items()}
    compared = chain.surrogate(guess, observed)
    for name, value in observed.items():
        assert torch.equal(dense(compared[name]) == 0, dense(value) == 0)


def test_what_it_is_made_of_decides_what_it_changes() -> None:
    inner = Chain(parts=(Clip(), Noise()))
    chain = Chain(parts=(inner, Prune()))
    assert chain.members() == (Clip(), Noise(), Prune())
    assert overrides(chain, "noise_std")
    assert not overrides(chain, "tensor_trust")
    assert not overrides(chain, "wrap_model")
    assert not overrides(chain, "gradient")
    assert chain.preserves_norm_ratios()
    assert not Chain(parts=(inner, Clip(scope="tensor"))).preserves_norm_ratios()
    left = Chain(parts=(Clip(), Prune())).with_unknown_scale()
    assert left.members() == (ClipOfUnknownNorm(scope="global"), Prune())


def test_noise_is_that_of_all() -> None:
    noise, more = Noise(std=0.3), Noise(std=0.4, unit="absolute")
    assert Chain(parts=(Prune(), noise)).noise_std(UPDATE) == noise.noise_std(UPDATE)
    both = Chain(parts=(noise, more)).noise_std(UPDATE)
    assert both == pytest.approx({name: math.hypot(x, 0.4) for name, x in noise.noise_std(UPDATE).items()})


def test_trust_is_that_of_all() -> None:
    observed = {"body.0.weight": torch.ones(2), "body.bottleneck.encoder.weight": torch.ones(2)}
    trust = Precode().tensor_trust(observed)
    assert min(trust.values()) < 1
    assert Chain(parts=(Precode(), Prune())).tensor_trust(observed) == trust


def test_it_does_not_call_itself_no_defense() -> None:
    assert Chain.plain != Defense.plain


def test_chains_are_built_from_settings_and_written_back() -> None:
    built = defenses.build({"name": "chain", "parts": ["clip", {"name": "noise", "std": 0.2}]})
    assert built == Chain(parts=(Clip(), Noise(std=0.2)))
    assert defenses.build(defenses.spec(built)) == built
    with pytest.raises(ValueError, match="at least 1 defense"):
        defenses.build({"name": "chain", "parts": []})
    private = PROBES["dp-sgd"].defense
    assert overrides(Chain(parts=(private, Defense())), "gradient")
    with pytest.raises(ValueError, match="at most 1 defense that changes the gradient, got"):
        Chain(parts=(private, private))
