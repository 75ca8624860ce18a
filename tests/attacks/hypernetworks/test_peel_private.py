"""The peel of a hypernetwork whose noise is added before the pull-back: exact up to the noisy gradient."""

from dataclasses import fields, replace
from typing import Literal

import pytest
import torch
from support import worlds
from support.compare import assert_near

from attacks import NotApplicable, Reconstruction
from attacks.base import build
from attacks.hypernetworks.hypernet_view import parse_hypernet_view
from attacks.hypernetworks.peel import HypernetPeel
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.method import Method
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.dp_hyperfl import DPHyperFL
from fl.methods.ppsgd import PPSGD
from fl.models.hypernetworks.hyperfl_hypernetwork import EMBEDDING, Hypernetwork
from fl.predict import predict
from fl.privacy.private_method import NOISE_KEY, PrivateMethod
from fl.tensors import Tensors, dense
from fl.types import Truth
from fl.view import ServerView, ThreatModel

TINY = Hypernetwork(embedding=8, hidden=16, init="scaled")
STEP = DPHyperFL(
    noise_multiplier=3.5,
    clip=0.5,
    images=40,
    batch_size=4,
    rate=0.5,
    steps=1,
    head_epochs=0,
    parametrization=TINY,
)


def victim(method: Method, n: int = 4, rounds: int = 0, **threat: bool) -> tuple[ServerView, Truth]:
    data = worlds.images(n, "private")
    run = Federation(Client(worlds.task(), method), [ClientData(data, data)], seed=1)
    for _ in range(rounds):
        run.run_round()
    return run.observe(0, threat=ThreatModel(**threat))


def flat(values: Tensors) -> torch.Tensor:
    return torch.cat([dense(values[n]).flatten() for n in sorted(values)])


def off(found: Reconstruction, truth: Truth) -> tuple[float, float]:
    """Relative errors of extractor and embedding."""
    mine = flat({n: found.private[f"extractor/{n}"] for n in truth.extractor})
    true, v, w = flat({**truth.extractor}), dense(found.private[EMBEDDING]), dense(truth.private[EMBEDDING])
    return float((mine - true).norm() / true.norm()), float((v - w).norm() / w.norm())


def guess(plain: ServerView, truth: Truth, *, noise: bool) -> Tensors:
    """What the rewritten view predicts of the truth, with the noise's keys or without."""
    private = {n: truth.private[n] for n in plain.private}
    view = plain if noise else replace(plain, draws=None)
    return predict(view, replace(truth.candidate(), private=private, draws=None, order=plain.order))


@pytest.mark.parametrize("mode", ["dp-joint", "as-published"])
@pytest.mark.parametrize("n", [1, 4])
def test_noise_before_the_pull_back_hides_neither_embedding_nor_extractor(
    n: int, mode: Literal["dp-joint", "as-published"]
) -> None:
    view, truth = victim(replace(STEP, mode=mode), n, rounds=1)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert found.verified
    assert max(off(found, truth)) < 1e-13


def test_of_a_noisy_gradient_no_layer_s_input_is_said_to_be_read() -> None:
    plain, noisy = (replace(STEP, noise_multiplier=1e-6, mode=mode) for mode in ("client-level", "dp-joint"))
    found = [HypernetPeel()(victim(method, 1)[0]) for method in (plain, noisy)]
    named = [[n for n in one.private if n.startswith("features")] for one in found if isinstance(one, Reconstruction)]
    assert named == [["features/body.fc1"], []]


@pytest.mark.parametrize("n", [1, 4])
def test_the_gradient_that_comes_out_is_clipped_and_has_the_noise(n: int) -> None:
    view, truth = victim(STEP, n, knows_randomness=True, knows_order=True)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert isinstance(plain.method, Centaur)
    assert set(plain.private) == {"head.weight", "head.bias"}
    assert_near(guess(plain, truth, noise=True), plain.update, 1e-12)  # to the bit of its noise
    quiet = flat(guess(plain, truth, noise=False))
    assert float(quiet.norm()) <= 0.5 * n / 4 + 1e-12  # every image's is clipped, and divided by the public number
    noise = (flat(plain.update) - quiet) * 4 / 0.5
    assert 3.0 < float(noise.std()) < 4.0  # the noise multiplier, of more than 800 numbers


def test_nobody_is_told_the_noise_who_did_not_know_it() -> None:
    plain = HypernetPeel().rewrite(victim(STEP)[0])
    assert isinstance(plain, ServerView)
    assert plain.draws is None
    known = HypernetPeel().rewrite(victim(STEP, knows_randomness=True)[0])
    assert isinstance(known, ServerView)
    assert known.draws is not None
    assert [NOISE_KEY in step for step in known.draws[0]] == [True]


def test_the_rewritten_method_keeps_the_noise_of_a_budget() -> None:
    settings = {"epsilon": 4.0, "delta": 1e-3, "accountant": "rdp", "noise_multiplier": None, "rounds": 3}
    method = replace(STEP, **settings, local_steps=None, head_epochs=1, epochs=5, steps=None)  # type: ignore[arg-type]
    watched = replace(method, steps=1, head_epochs=0)
    view, _ = victim(watched)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert isinstance(plain.method, PrivateMethod)
    assert plain.method.sigma == method.sigma > 0
    assert plain.method.denominator() == 4


def test_several_steps_are_as_close_as_their_weights_are() -> None:
    slow = replace(STEP, steps=3, lr=1e-4, momentum=0.5, weight_decay=5e-4)
    view, truth = victim(slow, knows_randomness=True, knows_order=True)
    found, plain = HypernetPeel()(view), HypernetPeel().rewrite(view)
    assert isinstance(found, Reconstruction)
    assert max(off(found, truth)) < 1e-3
    assert isinstance(plain, ServerView)
    made = flat(guess(plain, truth, noise=True))
    assert float((made - flat(plain.update)).norm() / flat(plain.update).norm()) < 1e-3


def test_with_a_shared_classifier_it_is_a_step_of_dp_fedavg() -> None:
    method = DPFedAvg(
        noise_multiplier=2.0, clip=0.5, images=40, batch_size=4, rate=0.5, steps=1, parametrization=TINY, lr=0.1
    )
    view, truth = victim(method, knows_randomness=True, knows_order=True)
    plain = HypernetPeel().rewrite(view)
    assert isinstance(plain, ServerView)
    assert isinstance(plain.method, DPFedAvg)
    assert not plain.private
    quiet = flat(guess(plain, truth, noise=False))
    assert float(quiet.norm()) <= 0.5 + 1e-12


@pytest.mark.parametrize("then", ["ig", "joint", "dlg"])
def test_searches_run_on_what_is_peeled(then: str) -> None:
    view, truth = victim(STEP, 1)
    found = build({"name": f"peel+{then}", "iterations": 3})(view)
    assert isinstance(found, Reconstruction)
    assert found.inputs is not None
    assert bool(found.inputs.isfinite().all())
    assert found.verified is not True
    assert max(off(found, truth)) < 1e-13


@pytest.mark.parametrize("then", ["headless", "cascade", "analytic", "spear"])
def test_equations_of_the_network_itself_stay_refused(then: str) -> None:
    answer = build(f"peel+{then}")(victim(STEP, 1)[0])
    assert isinstance(answer, NotApplicable)
    assert "noise" in answer.reason


def test_noise_on_the_hypernetwork_itself_leaves_nothing_to_solve() -> None:
    answer = HypernetPeel()(victim(replace(STEP, noise_on="hypernetwork"))[0])
    assert isinstance(answer, NotApplicable)
    assert "no outer product" in answer.reason


def test_a_method_with_a_gradient_of_its_own_is_refused() -> None:
    class Bent(DPHyperFL):
        def follows_loss_gradient(self, steps: int | None) -> bool:
            return False

    view, _ = victim(STEP)
    bent = Bent(**{field.name: getattr(STEP, field.name) for field in fields(STEP)})
    answer = parse_hypernet_view(replace(view, method=bent))
    assert isinstance(answer, NotApplicable)


def test_a_classifier_that_shares_its_clip_is_not_left_out() -> None:
    method = PPSGD(
        noise_multiplier=1.0, clip=0.5, images=40, batch_size=4, rate=0.5, steps=1, lr=0.1, parametrization=TINY
    )
    view, truth = victim(method)
    found = HypernetPeel()(view)
    assert isinstance(found, Reconstruction)
    assert max(off(found, truth)) < 1e-13
    answer = HypernetPeel().rewrite(view)
    assert isinstance(answer, NotApplicable)
    assert "private classifier" in answer.reason
