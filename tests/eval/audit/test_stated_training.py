"""An audit of a captured update that shows nothing says what this rests on."""

from __future__ import annotations

from support import recorded as support

import hyperleak
from eval.audit.findings import AuditReport
from eval.audit.stated_training import describe_training
from fl.methods.fedavg import FedAvg
from fl.tensors import dense

RESTS = "that no more is shown rests on optimizer sgd, lr 0.1, momentum 0, weight_decay 0, steps 1, examples "


def audited(examples: int, stated: int, *, known: bool = False) -> AuditReport:
    model = support.dense_network()
    sent = support.recorded(model, examples)
    update = {name: dense(value) - dense(sent.after[name]) for name, value in sent.before.items()}
    method, truth = FedAvg(lr=0.1, steps=1, batch_size=None), support.examples(examples) if known else ()
    settings = {"update": update, "method": method, "batch_size": stated, "attacks": ["analytic"]}
    if not known:
        settings["input_shape"] = support.SHAPE
    return hyperleak.audit(model, *truth, **settings)


def test_what_nothing_being_shown_rests_on_is_said() -> None:
    (rests,) = audited(2, 8).notes[-1:]
    assert rests.startswith(f"{RESTS}8")
    assert "a wrong one can hide what leaks" in rests


def test_nothing_is_said_of_facts_where_pictures_are_shown_or_known() -> None:
    assert not any("rests on" in note for note in audited(1, 1).notes)
    assert not any("rests on" in note for note in audited(8, 8, known=True).notes)


def test_batches_are_no_larger_than_what_there_is_and_an_unknown_step_size_is_called_so() -> None:
    usual = describe_training(FedAvg(lr=0.1, steps=1), loss="", examples=4)
    assert "examples 4, batch_size 4:" in usual
    assert "lr not known" in describe_training(FedAvg(lr=1.0, steps=1), loss="", examples=4, scale_unknown=True)
    assert "normalization" not in usual
    normalized = describe_training(FedAvg(lr=0.1, steps=1), loss="", examples=4, mode="training")
    assert "batch normalization in training mode:" in normalized
    assert "batch_size 2:" in describe_training(FedAvg(lr=0.1, epochs=3, batch_size=2), loss="", examples=4)
