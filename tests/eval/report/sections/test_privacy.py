"""The part of a report on differential privacy: what is claimed, what bounds it, and errors nobody can miss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import blocks, grid, reasons

from defenses.dp_sgd import DPSGD
from eval.metrics.lineup import BY_UPDATE
from eval.metrics.statistics import rate_lower_bound
from eval.privacy import reconstruction_robustness
from eval.privacy.epsilon_bounds import epsilon_from_identification
from eval.report import render_html, render_markdown
from eval.report.assemble import build_report
from eval.report.blocks import DefinitionList, Paragraph, Report
from eval.report.load import load
from eval.report.sections import privacy
from eval.report.sections.numbered_groups import NumberedGroups
from fl.client import Client
from fl.methods.centaur import Centaur
from fl.methods.dp_fedavg import DPFedAvg
from fl.methods.fedavg import FedAvg
from fl.models import build
from fl.privacy.accounting import Charge, compute_epsilon

SEEN = (Charge(2.0, 1.0, 4),)
PRIVATE = CONFIG.replace(
    "- {name: fedavg, lr: 0.1}", "- {name: dp-fedavg, noise_multiplier: 2.0, clip: 1.0, delta: 1e-5}"
)
DEFENDED = PRIVATE.replace("defense: [{name: none}]", "defense: [{name: none}, {name: prune}]")
AUDIT = {"lower": 1.2, "claimed": 4.0, "ceiling": 24.9, "canaries": 1000, "steps": 8, "delta": 1e-5}


def claim(method: Any = None, label: str = "dp-fedavg", audit: dict[str, Any] | None = None, **more: Any) -> dict:
    """A row of `privacy.jsonl`."""
    said = (method or DPFedAvg(noise_multiplier=2.0, clip=1.0)).privacy([600], 2)
    row = {"method": label, "defense": "none", "seed": 0, **asdict(said), "rounds": 2, "missing": {}}
    return {**row, "audit": None if audit is None else {**AUDIT, "significance": 0.01, **audit}, **more}


def attacked(hits: Sequence[bool], run: FakeRun | None = None, attack: str = "ig", **more: Any) -> FakeRun:
    """A run in which these images were named among 50, and a bound holds for how often they can be."""
    run = run or FakeRun(config=PRIVATE)
    bound, update = (
        reconstruction_robustness.bound_from_charges(0.02, SEEN),
        reconstruction_robustness.bound_from_charges(0.02, (Charge(2.0, 1.0, 1),)),
    )
    figures = {"identified_among": 50, "identified_bound": bound, "identified_bound_update": update}
    run.attack(
        "dp-fedavg", attack, [20.0] * len(hits), identified_epsilon=compute_epsilon(SEEN, 1e-5), **figures, **more
    )
    for row, hit in zip(run.rows[-len(hits) :], hits, strict=True):
        row["identified"] = hit
    return run


def built(run: FakeRun, folder: Path, *claims: dict) -> Report:
    run.write(folder)
    if claims:
        (folder / "privacy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in claims))
    return build_report(folder)


def told(content: Report) -> dict[str, str]:
    return dict(entry for note in content.alarms for entry in note.entries)


def test_claims_bounds_and_audits(tmp_path):
    content = built(attacked([True] + [False] * 7), tmp_path / "run", claim(audit={}))
    table = grid(content, "What is claimed")
    cells = dict(zip(table.column_names, table.rows[0], strict=True))
    epsilon = DPFedAvg(noise_multiplier=2.0, clip=1.0).privacy([600], 2).epsilon
    assert cells["epsilon"] == f"{epsilon:.2f}"
    assert (cells["protects"], cells["mode"]) == ("a record, add-remove", "dp-joint")
    assert (cells["noise / clip"], cells["steps"], cells["rounds"]) == ("2", "120", "2")
    named = dict(
        zip(
            grid(content, "Images named, and what bounds it").column_names,
            grid(content, "Images named, and what bounds it").rows[0],
            strict=True,
        )
    )
    bound, update = (
        reconstruction_robustness.bound_from_charges(0.02, SEEN),
        reconstruction_robustness.bound_from_charges(0.02, (Charge(2.0, 1.0, 1),)),
    )
    assert named["named"] == "1 of 8 [0, 53]\N{NO-BREAK SPACE}%"
    assert named["at most, update"] == f"{100 * update:.1f}\N{NO-BREAK SPACE}%"
    assert named["at most, all seen"] == f"{100 * bound:.1f}\N{NO-BREAK SPACE}%"
    assert named["at least"] == f"{100 * rate_lower_bound(1, 8, 0.05):.1f}\N{NO-BREAK SPACE}%"
    assert named["epsilon of all seen"] == f"{compute_epsilon(SEEN, 1e-5):.2f}"
    assert named["could be shown"] == f"{epsilon_from_identification(8, 8, 0.02, delta=1e-5):.2f}"
    assert named["refuted"] == "no"
    audit = grid(content, "The noisy steps, audited").rows[0]
    assert audit == ["dp-fedavg", "1,000", "8", "1.20", f"{epsilon:.2f}", "24.90", "no"]
    assert dict(content.facts)["Differential privacy"].startswith(f"dp-fedavg: epsilon {epsilon:.2f} at delta")
    assert not content.alarms


def test_a_violated_bound_is_an_error_above_everything_else(tmp_path):
    content = built(attacked([True] * 7 + [False]), tmp_path / "run", claim(audit={}))
    (name, words), *_ = told(content).items()
    assert name == "dp-fedavg under ig"
    assert "7 of 8 images were named" in words
    page, (text, _) = render_html.render_html(content), render_markdown.render_markdown(content)
    for written in (page, text):
        assert 0 < written.index(privacy.ALARM) < written.index(content.lead)
        assert "noise, clipping, sampling or accounting is at fault" in written
    assert 'class="note alarm" role="alert"' in page
    assert text.splitlines()[2] == f"> **{privacy.ALARM}**"


def test_a_violated_audit_is_an_error(tmp_path):
    content = built(attacked([False] * 8), tmp_path / "run", claim(audit={"lower": 9.5}))
    assert "an epsilon of at least 9.50" in told(content)["dp-fedavg"]
    assert grid(content, "The noisy steps, audited").rows[0][-1] == "yes"


def test_several_attacks_hold_together(tmp_path):
    """Two of eight would be too many for one attack; with twenty, one such is to be expected."""
    once = NumberedGroups.from_run(load(attacked([True] * 2 + [False] * 6).write(tmp_path / "a")))
    few = privacy.bounded_identification(once.run, once.by_number[1])
    assert few is None  # without a claim there is nothing to violate
    run = FakeRun(config=PRIVATE)
    bound = {"identified_bound": 0.045}
    for i in range(20):
        attacked([True] * 2 + [False] * 6 if i == 0 else [False] * 8, run, attack=f"a{i}")
    for row in run.rows:
        row.update(bound)
    assert not built(run, tmp_path / "many", claim()).alarms
    alone = attacked([True] * 2 + [False] * 6)
    for row in alone.rows:
        row.update(bound)
    assert built(alone, tmp_path / "one", claim()).alarms


def test_an_image_under_several_seeds_counts_once(tmp_path):
    run = attacked([True] + [False] * 7)
    attacked([True] * 8, run, seed=1)
    content = built(run, tmp_path / "run", claim(), claim(seed=1))
    assert grid(content, "Images named, and what bounds it").rows[0][4].startswith("1 of 8")


def test_no_epsilon_no_bound_and_the_reason_once(tmp_path):
    published = Centaur(noise_multiplier=2.0, mode="as-published")
    reason = published.privacy([600], 2).reason
    run = FakeRun(config=PRIVATE)
    run.attack("centaur", "ig", [20.0] * 4, identified=True, identified_among=50, identified_bound=None)
    for row in run.rows:
        row["missing"]["identified_bound"] = reason
    content = built(run, tmp_path / "run", claim(published, "centaur"))
    assert grid(content, "What is claimed").rows[0][1] == "none"
    assert reason in dict(entry for block in blocks(content, DefinitionList) for entry in block.entries)["centaur"]
    assert "nothing bounds how often images are named" in " ".join(block.text for block in blocks(content, Paragraph))
    assert reason not in reasons(content)
    assert dict(content.facts)["Differential privacy"] == "none claimed"
    assert not content.alarms


def test_reasons_of_a_method_with_an_epsilon_are_given(tmp_path):
    run = FakeRun(config=PRIVATE)
    run.attack("dp-fedavg", "ig", [20.0] * 4, identified=True, identified_among=50, identified_bound=None)
    for row in run.rows:
        row["missing"]["identified_bound"] = "images are held by several clients"
    content = built(run, tmp_path / "run", claim(missing={"audit": "too old"}))
    assert "images of dp-fedavg are named: images are held by several clients" in reasons(content)
    assert "an audit of dp-fedavg: too old" in reasons(content)


def test_without_private_methods_it_is_said_in_one_place(tmp_path):
    content = built(FakeRun().attack("fedavg", "ig", [20.0] * 4), tmp_path / "run")
    assert dict(content.facts)["Differential privacy"] == "none claimed"
    assert "privacy" not in [section.name for section in content.sections]


@pytest.mark.parametrize("chained", [False, True])
def test_the_claim_of_a_defense_stands_beside_those_of_methods(chained, tmp_path):
    spec = "{name: dp-sgd, clip: 1.0, noise_multiplier: 2.0, delta: 1e-5}"
    spec = f"{{name: chain, as: dp-sgd, parts: [{spec}, {{name: prune}}]}}" if chained else spec
    run = FakeRun(config=CONFIG.replace("defense: [{name: none}]", f"defense: [{spec}]"))
    run.attack("fedavg", "ig", [20.0] * 4, defense="dp-sgd")
    client = Client(build("tiny", num_classes=3, seed=0), FedAvg(epochs=2), DPSGD(clip=1.0, noise_multiplier=2.0))
    row = {
        **claim(),
        **asdict(client.defense.privacy(client.method, client.task, [600], 2)),
        "method": "fedavg",
        "defense": "dp-sgd",
    }
    content = built(run, tmp_path / "run", row)
    (line,) = grid(content, "What is claimed").rows
    assert line[:3] == ["fedavg", "dp-sgd", f"{compute_epsilon([Charge(2.0, 1.0, 4)], 1e-5):.2f}"]
    assert "fedavg with dp-sgd: epsilon" in dict(content.facts)["Differential privacy"]
    content = built(run, tmp_path / "older")
    assert "start the run again in its folder" in reasons(content)


def test_an_older_run_says_what_to_do(tmp_path):
    content = built(attacked([True] * 8), tmp_path / "run")
    assert "start the run again in its folder" in reasons(content)
    assert "Differential privacy" not in dict(content.facts)
    assert not content.alarms


def test_the_table_gets_errors_first_and_then_the_claims(tmp_path):
    folder = tmp_path / "run"
    built(attacked([True] * 8, FakeRun(config=DEFENDED)), folder, claim(), claim(defense="prune"))
    notes = privacy.legend_notes(NumberedGroups.from_run(load(folder)))
    assert notes[0].startswith(f"{privacy.ALARM}. dp-fedavg under ig: 8 of 8")
    assert [note.partition(":")[0] for note in notes[1:]] == [
        "Privacy of dp-fedavg",
        "Privacy of dp-fedavg with prune",
    ]


@pytest.mark.parametrize("word", ["<script>", "|`"])
def test_labels_that_are_markup_are_refused(word, tmp_path):
    label = f"dp{word}"
    run = FakeRun(config=PRIVATE)
    run.attack(label, "ig", [20.0] * 4)
    with pytest.raises(ValueError, match="expected method of at most 200 letters"):
        built(run, tmp_path / "run", claim(label=label, audit={"lower": 99.0}))


def test_naming_by_the_update_is_held_against_the_bound_once(tmp_path: Path) -> None:
    run = attacked([False] * 8, **{BY_UPDATE: True})
    attacked([False] * 8, run, attack="joint", **{BY_UPDATE: True})
    content = built(run, tmp_path / "run", claim())
    found = grid(content, "Images named, and what bounds it")
    by = found.column_names.index("by")
    assert [row[by] for row in found.rows] == ["picture", "update", "picture"]
    assert [row[-1] for row in found.rows] == ["no", "yes", "no"]
    (note,) = privacy.alarms(NumberedGroups.from_run(load(tmp_path / "run")))
    assert "8 of 8 images were named among others of their class by the update itself" in note.entries[0][1]


@pytest.mark.parametrize("order", [("few", "all"), ("all", "few")])
def test_naming_by_the_update_counts_the_images_of_all_attacks(order: tuple[str, str], tmp_path: Path) -> None:
    """Whichever comes first, and under each image's first seed."""
    run = FakeRun(config=PRIVATE.replace("{name: ig}", "{name: ig, as: few, with: {observe.images: 1}}, {as: all}"))
    for attack in order:
        hits = [False] * (1 if attack == "few" else 8)
        attacked(hits, run, attack=attack, seed=1 if attack == "few" else 0, **{BY_UPDATE: attack == "all"})
    found = grid(built(run, tmp_path / "run", claim()), "Images named, and what bounds it")
    lines = [dict(zip(found.column_names, row, strict=True)) for row in found.rows]
    assert [(line["attack"], line["by"]) for line in lines] == [
        (order[0], "picture"),
        (order[0], "update"),
        (order[1], "picture"),
    ]
    assert lines[1]["named"].startswith("8 of 8")
    assert lines[1]["refuted"] == "yes"


@pytest.mark.parametrize("change", ["batch_size: 8", "method.steps: 2", "augment: true"])
def test_updates_that_are_made_in_another_way_are_counted_apart(change: str, tmp_path: Path) -> None:
    attacks = f"{{name: ig}}, {{name: ig, as: other, with: {{observe.{change}}}}}"
    run = FakeRun(config=PRIVATE.replace("{name: ig}", attacks))
    attacked([False] * 8, run, attack="other", images=8 if "batch" in change else 1, **{BY_UPDATE: False})
    attacked([False] * 8, run, **{BY_UPDATE: True})
    found = grid(built(run, tmp_path / "run", claim()), "Images named, and what bounds it")
    lines = [dict(zip(found.column_names, row, strict=True)) for row in found.rows]
    named = {line["attack"]: line["named"].partition(" [")[0] for line in lines if line["by"] == "update"}
    assert named == {"ig": "8 of 8"} | ({} if "batch" in change else {"other": "0 of 8"})


def test_images_of_one_update_are_no_trials_of_their_own(tmp_path: Path) -> None:
    run = attacked([False] * 8, images=8, **{BY_UPDATE: True})
    found = grid(built(run, tmp_path / "run", claim()), "Images named, and what bounds it")
    assert [row[found.column_names.index("by")] for row in found.rows] == ["picture"]
