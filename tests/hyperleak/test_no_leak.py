"""`assert_no_leak`: what fails it, what it says, and the pytest plugin that brings it without importing anything."""

import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from support.judged import everything, finding
from support.tiny import Registered

import hyperleak
import pytest_hyperleak
from eval.audit.findings import AuditReport
from hyperleak import no_leak as module

ROOT = Path(__file__).parents[2]
SUITE = """
import sys
import types

def test_nothing_is_imported_at_the_start():
    assert "pytest_hyperleak" in sys.modules
    assert not {"hyperleak", "fl", "attacks", "eval", "torch", "numpy"} & {*sys.modules}

def test_the_fixture_is_known(request, monkeypatch):
    stub = types.ModuleType("hyperleak")
    stub.no_leak, stub.shadowed_package = types.SimpleNamespace(assert_no_leak=3), lambda: ""
    monkeypatch.setitem(sys.modules, "hyperleak", stub)
    assert request.getfixturevalue("assert_no_leak") == 3

def test_a_leak_fails_the_test_that_asserts_none(assert_no_leak):
    import torch
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 3))
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_no_leak(model, images, [2], max_psnr=20, minutes=1)
"""
fixture = pytest_hyperleak.assert_no_leak
"""Registered here under this name, whether or not the plugin is installed."""


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3)
    )
    for weights in network.parameters():
        weights.data = torch.rand(weights.shape, generator=generator) - 0.5
    with Registered():
        yield network


IMAGES, LABELS = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)), [0, 1]


def failure(check, *given, **settings):
    with pytest.raises(AssertionError) as caught:
        check(*given, **settings)
    return str(caught.value).splitlines()


def test_a_leak_is_told_with_its_attack_and_its_figures(model, fixture):
    lines = failure(fixture, model, IMAGES, LABELS, attacks=["refuse", "analytic"])
    assert lines[0] == "Sequential: something leaked"
    assert len(lines) == 3
    for number, line in enumerate(lines[1:]):
        said = f"  leaked: analytic on update {number}: image content leaked: image 0 at 100 dB (best guess "
        assert line.startswith(said)


def test_a_limit_is_what_an_image_may_not_exceed(model, fixture):
    words = {"attacks": "analytic", "minutes": 1}
    lines = failure(fixture, model, IMAGES, LABELS, max_psnr=20, **words)
    assert "PSNR above 20: image 0 at 100 dB (best guess " in lines[1]
    report = fixture(model, IMAGES, LABELS, max_psnr=100, **words)
    assert report.best("psnr") == 100
    assert isinstance(report, AuditReport)


def test_what_is_not_decided_fails_unless_that_is_allowed(model, fixture):
    lines = failure(fixture, model, IMAGES, LABELS, attacks="refuse", max_psnr=20)
    assert lines[0] == "Sequential: not decided"
    assert any(line.startswith("  not decided: no PSNR could be taken: ") for line in lines)
    assert "To decide it: " in lines[1]
    assert 'undecided="pass"' in lines[-1]
    assert fixture(model, IMAGES, LABELS, attacks="refuse", max_psnr=20, undecided="pass").findings


def test_a_failed_attack_fails_whatever_is_allowed(model, fixture):
    lines = failure(fixture, model, IMAGES, LABELS, attacks="crash", undecided="pass")
    assert lines[0] == "Sequential: an attack failed"
    assert lines[1].startswith("  failed: crash: ValueError: expected the sky to hold, got rain (tests/support/tiny.py")
    assert len(lines) == 2


def test_all_that_leaked_is_listed(monkeypatch):
    monkeypatch.setattr(module, "audit", lambda *_, **__: everything().report)
    lines = failure(hyperleak.assert_no_leak, None)
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["leaked"] * 3 + ["failed"]
    assert "blindly on update 0: the attack confirms what it recovered" in lines[2]
    assert "private embedding (relative error 1e-03) recovered" in lines[3]
    many = AuditReport("mine", [finding(str(number), kinds=("settled",)) for number in range(50)])
    monkeypatch.setattr(module, "audit", lambda *_, **__: many)
    lines = failure(hyperleak.assert_no_leak, None)
    assert len(lines) == module.MOST_LINES + 2
    assert lines[-1] == f"  and {50 - module.MOST_LINES} more"


def test_a_key_that_was_pressed_stops_the_tests(monkeypatch):
    monkeypatch.setattr(module, "audit", lambda *_, **__: AuditReport("mine", [], stopped="ig"))
    with pytest.raises(KeyboardInterrupt, match="stopped at ig"):
        hyperleak.assert_no_leak(None)


def test_warnings_of_others_are_no_errors(monkeypatch):
    def audit(*_, **__):
        warnings.warn("old keyword", DeprecationWarning, stacklevel=1)
        return AuditReport("mine", [finding("exact", kinds=("blind",))])

    monkeypatch.setattr(module, "audit", audit)
    with pytest.warns(DeprecationWarning, match="old keyword"):
        assert hyperleak.assert_no_leak(None, undecided="pass")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_psnr": "20"}, "max_psnr: expected a finite number, got '20'"),
        ({"max_psnr": True}, "max_psnr: expected a finite number, got True"),
        ({"max_psnr": float("nan")}, "max_psnr: expected a finite number, got nan"),
        ({"max_ssim": 2}, r"max_ssim: expected a number in \[-1, 1\], got 2"),
        ({"undecided": "maybe"}, "undecided: expected 'fail' or 'pass', got 'maybe'"),
        ({"max_psnr": 20, "images": None, "update": "no.npz"}, "expected images and labels beside max_psnr"),
        ({"minutes": 0}, "expected minutes > 0"),
    ],
)
def test_what_can_not_be_is_said(model, settings, said):
    given = {"images": IMAGES, "labels": LABELS, **settings}
    with pytest.raises(ValueError, match=said):
        hyperleak.assert_no_leak(model, **given)


def test_an_unknown_setting_is_named(model):
    with pytest.raises(TypeError, match="max_pnsr"):
        hyperleak.assert_no_leak(model, IMAGES, LABELS, max_pnsr=20)


@pytest.fixture
def installed(tmp_path):
    """A suite beside a distribution that has the entry point of ours, and how to run it."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    about = tmp_path / "site" / "planted-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    lines = [f"{name} = {place}\n" for name, place in points.items()]
    (about / "entry_points.txt").write_text("[pytest11]\n" + "".join(lines))
    (tmp_path / "test_suite.py").write_text(SUITE)

    def run(*words):
        # site-packages of this environment stay; what autoloads there beside ours is not of this test
        places = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "COLUMNS": "200"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-W", "error"]
        return subprocess.run([*command, *words], cwd=tmp_path, env=places, capture_output=True, text=True, check=False)

    return run


def test_pytest_starts_light_and_knows_the_fixture(installed):
    done = installed("-k", "imported or known")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_a_leak_fails_a_suite_that_makes_errors_of_warnings(installed):
    done = installed("-k", "imported or leak")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "AssertionError: Sequential: something leaked" in done.stdout
    assert "on update 0: PSNR above 20: image 0 at " in done.stdout
    assert "no_leak.py:" not in done.stdout  # the frames of ours are left out: the test's own line is shown
    assert "> " in done.stdout
    assert "assert_no_leak(model, images, [2], max_psnr=20, minutes=1)" in done.stdout
