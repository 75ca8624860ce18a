"""Defaults are measured by sweeps; what papers published comes out by name, whatever the defaults are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

import attacks
from attacks.gradient_matching.dlg import DLG
from attacks.gradient_matching.joint import JointGradientMatching
from attacks.gradient_matching.rog import ROG
from attacks.hypernetworks.bilevel import Bilevel
from benchmarks.leakage import settings
from benchmarks.leakage.sweeps import SWEEPS

IG = {"objective": "cosine", "optimizer": "adam", "lr": 0.1, "signed": True, "schedule": "step", "clamp_pixels": True}
"""Of the authors' code, but for what a preset says (Geiping et al. 2020)."""
GRADINVERSION = {
    "iterations": 20_000,
    "objective": "l2",
    "signed": False,
    "first_layer_factor": 10.0,
    "tv_weight": 1e-4,
}


@pytest.mark.parametrize(
    ("name", "preset", "published"),
    [
        (
            "dlg",
            "published",
            {"iterations": 6000, "objective": "l2", "optimizer": "lbfgs", "lr": 1.0, "max_step": 1e6, "restarts": 1},
        ),
        ("idlg", "published", {"iterations": 6000, "objective": "l2", "labels": "auto", "max_step": 1e6}),
        ("ig", "untrained", {**IG, "iterations": 4800, "tv_weight": 1e-2}),
        ("ig", "command", {**IG, "iterations": 4000, "tv_weight": 1e-4}),
        ("ig", "tables", {**IG, "iterations": 4800, "tv_weight": 1e-4}),
        ("ig", "library", {**IG, "iterations": 4800, "tv_weight": 0.1, "signed": False}),
        ("ig", "hyperfl", {**IG, "iterations": 10_000, "tv_weight": 1e-6}),
        ("ig", "breaching", {**IG, "iterations": 24_000, "tv_weight": 0.2}),
        ("gradinversion", "published", {**GRADINVERSION, "langevin": 0.2}),
        ("gradinversion", "breaching", {**GRADINVERSION, "restarts": 1}),
        (
            "rog",
            "published",
            {"iterations": 100, "factor": 4, "tv_weight": 0.0, "lr": 0.05, "objective": "l2", "signed": False},
        ),
        (
            "joint",
            "published",
            {"iterations": 10_000, "tv_weight": 1e-6, "lr": 0.1, "signed": True, "objective": "cosine"},
        ),
        ("bilevel", "published", {"iterations": 10_000, "tv_weight": 1e-6, "head_lr": 1e-3, "lr": 0.1}),
        (
            "lti",
            "published",
            {"iterations": 39_200, "batch_size": 256, "width": 3000, "hash_size": 100_000, "lr": 1e-4},
        ),
    ],
)
def test_what_was_published_stays_by_name(name: str, preset: str, published: dict[str, Any]) -> None:
    needed = {"auxiliary": "photos"} if name == "lti" else {}
    found = asdict(attacks.build({"name": name, "preset": preset, **needed}))  # type: ignore[call-overload]
    assert {key: found[key] for key in published} == published


@pytest.mark.parametrize(
    ("attack", "key"),
    [
        (DLG, "objective"),
        (ROG, "tv_weight"),
        (ROG, "factor"),
        (JointGradientMatching, "tv_weight"),
        (Bilevel, "head_lr"),
    ],
)
def test_a_preset_says_what_the_default_differs_in(attack: type, key: str) -> None:
    preset = attack.presets["published"].settings  # type: ignore[attr-defined]
    assert getattr(attack(), key) != preset[key]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_every_default_was_swept_and_measured_on_other_images(sweep: Any) -> None:
    found = settings.sweeps_measured_before()[sweep.name]
    assert settings.whole(sweep, found)
    assert all(len(point["psnr"]) == sweep.images for point in found["others"])
