"""Callers in Python are told arguments, not options of the command."""

import re

import pytest
import torch
from support.captured import SHAPE, after, batch, change, network

import hyperleak
from eval.audit.python_words import in_python
from fl.methods.fedavg import FedAvg

OPTION = re.compile(r"(?<!\w)--[a-z]")


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (
            "give weights before - after, or this file as --after FILE, --before FILE beside it",
            "update=(before, after)",
        ),
        ("or give two files by --before and --after", "or give two files or states as update=(before, after)"),
        ("give --batch-size 3", "give batch_size=3"),
        ("as many as --batch-size (times --clients) says", "as many as batch_size (times clients) says"),
        ("state it (method, --method)", "state it"),
        ("audit one example in an update (--batch-size 1), or", "audit one example in an update, or"),
        (
            "give --method '{name: fedavg, train_mode: true, ...}', or no --method and",
            "give method={'name': 'fedavg', 'train_mode': True, ...}, or no method and",
        ),
        ("such as --defense '{name: prune, ratio: 0.9}'", "such as defense={'name': 'prune', 'ratio': 0.9}"),
        ("(--targets free or --targets binary)", "(targets='free' or targets='binary')"),
        ("(threat, --threat '{knows_labels: true}')", "(threat={'knows_labels': True})"),
        ("(hyperleak audit --method, fl.federation)", "(fl.federation)"),
        ("give --images '{name: emnist, size: 28}', or an .npz file of such images (see --help)", "give such images"),
        ("no file out/--b/c.npz beside a--b", "no file out/--b/c.npz beside a--b"),
    ],
)
def test_options_are_arguments(said, instead):
    assert in_python(said).endswith(instead)


def test_nothing_that_python_is_told_names_an_option():
    model, data, new = network(), batch(), after(network(), batch())
    update = change(model, data)
    settings = {"input_shape": SHAPE, "attacks": ["analytic"], "method": FedAvg(lr=0.1, steps=1)}
    for given in (new, {name: -value for name, value in update.items()}, {n: 7 * v for n, v in update.items()}):
        report = hyperleak.audit(model, data, update=given, **settings)
        assert report.mismatch
        assert not OPTION.search(str(report.plain()))
    for given, more in (
        ({"x": update, "y": update}, {}),
        (update, {"batch_size": 2}),
        (update, {"defense": "secagg"}),
        (update, {"input_shape": (3, 9, 9)}),
    ):
        with pytest.raises(ValueError, match=r"expected|a single client's") as caught:
            hyperleak.audit(model, data, update=given, **{**settings, **more})
        assert not OPTION.search(str(caught.value))


def test_weights_before_and_after_come_by_these_words(tmp_path):
    model, data, new = network(), batch(), after(network(), batch())
    torch.save(new, tmp_path / "after.pt")
    vectors = {"old": list(model.parameters()), "new": [new[name] for name, _ in model.named_parameters()]}
    flat = {word: torch.nn.utils.parameters_to_vector(each).detach() for word, each in vectors.items()}
    torch.save(flat, tmp_path / "flat.pt")
    torch.save({"before": {"state_dict": dict(model.state_dict()), "epoch": 1}, "after": new}, tmp_path / "both.pt")
    for given in (
        {"before": dict(model.state_dict()), "after": new},
        {"before": model, "after": tmp_path / "after.pt"},
        {"global": None, "local": new},
        flat,
        tmp_path / "flat.pt",
        tmp_path / "both.pt",
    ):
        report = hyperleak.audit(
            model, data, update=given, input_shape=SHAPE, attacks=["analytic"], method=FedAvg(lr=0.1, steps=1)
        )
        assert report.mismatch == ""


def test_what_is_no_tensor_among_tensors_is_named():
    update = change(network(), batch())
    with pytest.raises(ValueError, match="got a dict under 'update': in it is a float under 'lr'; leave that out"):
        hyperleak.audit(network(), update={"update": {**update, "lr": 0.1}}, input_shape=SHAPE)
