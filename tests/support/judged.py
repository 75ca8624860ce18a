"""Audits made up for tests of what is written of them: every end that an attack can come to, without any attack."""

from __future__ import annotations

from eval.audit.findings import NOT_BEGUN, AttackFinding, AuditReport
from eval.audit.judgment import Judgment
from eval.audit.verdict import has_leaked
from eval.report.sections.inconclusive import Outcome


def row(update=0, image=0, psnr=12.0, guess=11.0, **more):
    """A row of one image, of an update of a user's own model."""
    head = {"attack": "a", "seed": 0, "round": 0, "client": 0, "update": update, "image": image}
    told = {"picture": f"{update}:{image}", "psnr": psnr, "ssim": None, "floor_mean_psnr": guess, "label_correct": None}
    return {**head, **told, "private_errors": {}, "missing": {}, **more}


def finding(attack, rows=(), kinds=(), words="", **more):
    """What an attack found that came to these ends on updates 0, 1, ..."""
    outcomes = [Outcome(attack, number, kind, words) for number, kind in enumerate(kinds)]
    leaked = has_leaked([*rows])
    said = f"{attack} says so"
    return AttackFinding(attack, [*rows], "", **{"verdict": said, "outcomes": outcomes, "leaked": leaked, **more})


def everything(stopped="", limits=None):
    """Updates 0 and 1 under attacks that came to all there is; of update 0 `exact` found the image."""
    found = [
        finding("exact", [row(0, psnr=60.0), row(1)], ("settled", "ran")),
        finding("blindly", kinds=("settled", "searched")),
        finding("behind", [row(1, psnr=13.0)], ("fact",), "there is noise"),
        finding("narrow", kinds=("limit", "gave up"), words="a layer <of> its {own}"),
        finding("peel", [row(0, psnr=None, private_errors={"embedding": 1e-3}), row(1, psnr=None)], ("blind", "blind")),
        AttackFinding.from_failure("crash", "expected rain \x00 got \ud800 sun", "mine.py:3", None),
        AttackFinding.from_skip("idle", "not needed: exact did"),
        AttackFinding.of_not_begun("late"),
    ]
    assert found[-1].cut_short == NOT_BEGUN
    return Judgment(AuditReport("mine:build <&> \x1b", found, ("a note",), stopped=stopped), limits or {})
