from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same
from support.frameworks import nvflare_filtered, updates
from torch import nn

import attacks
from attacks.base import Reconstruction
from defenses.nvflare_svt import MAX_PASSES, NVFlareSVT
from fl.capture import from_batch
from fl.privacy.accounting import gaussian_epsilon
from fl.seeds import stream
from fl.tensors import Tensors, dense, dot, norm

CLEAR: dict[str, Any] = {"epsilon": 1e9, "noise_var": 1e9, "gamma": 0.5, "tau": 0.1, "replace": False}
"""So little noise that what is sent follows from the update alone."""


def sent(update: Tensors, seed: int = 0, **settings: Any) -> Tensors:
    return NVFlareSVT(**settings).transform_update(update, stream(seed, "svt"))


def test_without_noise_the_large_numbers_are_sent_and_cut() -> None:
    update: Tensors = {"a": torch.tensor([0.05, -0.2, 3.0, 0.0]), "b": torch.tensor([[-0.01, -7.0]])}
    found = sent(update, fraction=0.5, **CLEAR)
    np.testing.assert_allclose(dense(found["a"]).numpy(), [0, -0.2, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(dense(found["b"]).numpy(), [[0, -0.5]], atol=1e-6)
    found = sent({"a": torch.tensor([0.4, -2.0, 80.0, 0.0])}, fraction=0.75, steps=10, **{**CLEAR, "tau": 0.01})
    np.testing.assert_allclose(dense(found["a"]).numpy(), [0.4, -2.0, 5.0, 0.0], atol=1e-5)


def test_numbers_and_noise_at_nvflares_defaults() -> None:
    """A tenth is drawn, and with replacement a twentieth of these twice or more; noise has the scale 2 gamma / 0.1."""
    update: Tensors = {"a": torch.randn(300, 200, generator=stream(1)) * 1e-3}
    found = dense(sent(update)["a"])
    there = found[found != 0]
    accepted = 0.55  # about half of all numbers pass a threshold drowned in noise, and these are drawn from
    few, many = (6000 * (1 - 6000 / 60000 / 2 / share) for share in (0.45, accepted + 0.4))
    assert few - 150 < len(there) < many + 50
    assert float(there.abs().mean()) == pytest.approx(2e-4, rel=0.05)
    assert NVFlareSVT().noise_std(update)["a"] == pytest.approx(2**0.5 * 2e-4)
    cosine = float(dot(update, {"a": found}) / norm(update) / norm({"a": found}))
    assert abs(cosine) < 0.02


def test_chance_follows_from_the_seed_but_not_in_a_release() -> None:
    update: Tensors = {"a": torch.randn(500, generator=stream(1))}
    assert_same(sent(update), sent(update))
    assert not torch.equal(dense(sent(update)["a"]), dense(sent(update, seed=1)["a"]))
    one, other = (dense(NVFlareSVT().release(update)["a"]) for _ in range(2))
    assert not torch.equal(one, other)


def test_the_budget_grows_with_the_network() -> None:
    defense = NVFlareSVT()
    assert defense.stated_epsilon(62_006) == pytest.approx(0.1 + 6201 * 0.1)
    assert defense.stated_epsilon(7_033_290) == pytest.approx(70_333, abs=0.5)  # FLIP issue 1145, a DenseNet
    first, second, release = defense.budgets(6201)
    assert first + second == pytest.approx(0.1)
    assert second / first == pytest.approx((2 * 6201) ** (2 / 3))
    assert release == pytest.approx(620.1)
    assert NVFlareSVT(epsilon_threshold=0.03).budgets(5)[:2] == pytest.approx((0.03, 0.07))
    assert NVFlareSVT(epsilon_query=0.03, epsilon_release=2.0).budgets(5) == pytest.approx((0.07, 0.03, 2.0))


def test_many_laplace_numbers_cost_about_what_gaussian_noise_does() -> None:
    """Of so many, each of epsilon 0.1, the loss is normal: the root of their count times 0.1 is its mu."""
    found = NVFlareSVT().release_epsilon(62_006, 1e-5)
    assert (
        gaussian_epsilon(math.sqrt(6201) * 0.1, 1e-5) * 0.95
        < found
        < 1.15 * gaussian_epsilon(math.sqrt(6201) * 0.1, 1e-5)
    )
    assert NVFlareSVT(fraction=1e-6).release_epsilon(10, 1e-5) == pytest.approx(0.1)
    assert NVFlareSVT(fraction=0.0).release_epsilon(10, 1e-5) == 0.0


@pytest.mark.parametrize(
    "settings", [{"fraction": 1.1}, {"epsilon": 0.0}, {"gamma": 0.0}, {"noise_var": -1.0}, {"steps": 0}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
        NVFlareSVT(**settings)
    with pytest.raises(ValueError, match="add up to epsilon"):
        NVFlareSVT(epsilon_threshold=0.03, epsilon_query=0.03)


def test_a_threshold_that_is_never_met_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defenses.nvflare_svt.MAX_PASSES", 3)
    assert MAX_PASSES > 3
    with pytest.raises(ValueError, match="for ever"):
        sent({"a": torch.zeros(4)}, fraction=0.5, **CLEAR)


def test_a_search_compares_what_was_sent() -> None:
    observed: Tensors = {"a": torch.tensor([0.0, 0.3, -0.2])}
    predicted = torch.tensor([5.0, 5.0, -0.1], requires_grad=True)
    found = dense(NVFlareSVT(gamma=0.5).surrogate({"a": predicted}, observed)["a"])
    assert found.tolist() == pytest.approx([0.0, 0.5, -0.1])
    (grad,) = torch.autograd.grad(found.sum(), predicted)
    assert grad.tolist() == [0.0, 1.0, 1.0]


def test_a_fraction_of_nothing_sends_nothing() -> None:
    found = sent({"a": torch.ones(4), "b": torch.tensor(2.0)}, fraction=0.0)
    assert not dense(found["a"]).any()
    assert float(dense(found["b"])) == 2.0


@pytest.mark.parametrize("steps", [None, 5])
def test_it_sends_what_nvflare_sends_without_noise(steps: int | None) -> None:
    """With next to no noise both send the numbers above the threshold, cut."""
    filters = pytest.importorskip("nvflare.app_common.filters.svt_privacy")
    for update in updates(25):
        sizes = torch.cat([value.flatten() for value in update.values()]).abs() / (steps or 1)
        tau, gamma = float(sizes.quantile(0.7)), float(sizes.quantile(0.9))
        above = int((sizes.clamp(max=gamma) >= tau).sum())
        settings = {**CLEAR, "tau": tau * 0.999999, "gamma": gamma, "fraction": above / len(sizes) - 1e-9}
        settings |= {"epsilon": 1e13, "noise_var": 1e13}
        theirs = nvflare_filtered(filters.SVTPrivacy(**settings), update, steps)
        found = sent(dict(update), steps=steps or 1, **settings)
        for name, value in theirs.items():
            np.testing.assert_allclose(dense(found[name]).numpy(), value, rtol=1e-5, atol=1e-7 * gamma)


def test_it_sends_what_nvflare_sends_with_noise() -> None:
    """Counts and sizes of what is sent agree, and so does the budget that NVFlare's accountant adds up."""
    filters = pytest.importorskip("nvflare.app_common.filters.svt_privacy")
    update = {"a": torch.randn(40, 500, generator=stream(1)) * 3e-4, "b": torch.randn(100, generator=stream(2))}
    for settings in ({}, {"gamma": 1e-3, "tau": 1e-4, "epsilon": 1e4, "noise_var": 50.0}, {"replace": False}):
        own = filters.SVTPrivacy(**settings)
        theirs = [np.concatenate([v.ravel() for v in nvflare_filtered(own, update).values()]) for _ in range(4)]
        ours = [
            torch.cat([dense(v).flatten() for v in sent(dict(update), seed, **settings).values()]).numpy()
            for seed in range(4)
        ]
        for measure in (lambda v: (v != 0).sum(), lambda v: np.abs(v[v != 0]).mean(), lambda v: v[v != 0].std()):
            assert np.mean([measure(v) for v in ours]) == pytest.approx(np.mean([measure(v) for v in theirs]), rel=0.1)
        each = own.get_privacy_spent() / 4
        assert NVFlareSVT(**settings).stated_epsilon(20_100) == pytest.approx(each)


def test_nvflares_defaults_are_ours() -> None:
    own = pytest.importorskip("nvflare.app_common.filters.svt_privacy").SVTPrivacy()
    for name in ("fraction", "epsilon", "noise_var", "gamma", "tau", "replace", "epsilon_release", "epsilon_query"):
        assert getattr(own, name) == getattr(NVFlareSVT(), name), name


ALL: dict[str, Any] = {"fraction": 1.0, "epsilon": 1e12, "noise_var": 1e9, "tau": 0.0, "replace": False}
"""All numbers are sent, with next to no noise."""


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        ({**ALL, "gamma": 10.0}, True),
        ({**ALL, "gamma": 10.0, "replace": True}, True),
        ({**ALL, "gamma": 0.05}, False),
        ({**ALL, "gamma": 10.0, "noise_var": 1e5}, False),
    ],
)
def test_a_filter_that_hides_nothing_is_attacked_and_no_wrong_picture_confirmed(
    settings: dict[str, Any], exact: bool
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 5))
    for value in net.parameters():
        nn.init.uniform_(value, -0.1, 0.1, generator=stream(0, str(tuple(value.shape))))
    pixels = (255 * torch.rand(1, 3, 8, 8, generator=stream(0, "pixels"))).round() / 255
    view, _ = from_batch(net, pixels, torch.tensor([3]), defense=NVFlareSVT(**settings))
    result = attacks.build("analytic")(view)
    assert isinstance(result, Reconstruction)
    right = bool(((result.inputs - pixels).abs() < 0.25 / 255).all())
    assert result.verified is True if exact else right or not result.verified
    assert right or not exact


def test_attacks_that_solve_refuse_where_noise_hides_the_numbers_sent() -> None:
    assert not NVFlareSVT().preserves_norm_ratios()
    assert not NVFlareSVT(noise_var=2.0).preserves_norm_ratios()
    assert not NVFlareSVT(**ALL, epsilon_release=1e9).preserves_norm_ratios()
    observed: Tensors = {"a": torch.tensor([0.0, 0.3, -0.5, 0.499])}
    passed = NVFlareSVT(**{**ALL, "gamma": 0.5, "noise_var": 1e3}).transmit_known_part(observed, observed)
    assert dense(passed["a"]).tolist() == [0.0, pytest.approx(0.3), 0.0, 0.0]
