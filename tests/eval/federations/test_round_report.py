"""Every round has a page that names the clients whose updates leak."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from support import recorded as support

from eval.audit.recorded_update import RecordedUpdate
from eval.federations.round_report import PAGE, ROWS, RoundReports
from eval.federations.screening import Exposure, Screening
from eval.io import jsonl

LEAKED = Screening(
    verdict="leaked",
    reason="an image is recovered (analytic)",
    exposures=(Exposure("images", "analytic", "an image is recovered"),),
    tried={"analytic": "images, confirmed"},
    seconds=0.1,
)
QUIET = Screening(verdict="not shown to leak", reason="nothing is shown", tried={"analytic": "not applicable: <steps>"})


def test_the_page_names_who_leaks_and_escapes_the_rest(tmp_path: Path) -> None:
    reports = RoundReports(folder=tmp_path)
    for client, screening in (("alice", LEAKED), ("bob", QUIET)):
        page = reports.add(support.recorded(support.network(), client=client), screening, "withheld")
    text = page.read_text()
    assert page == tmp_path / "round-3" / PAGE
    assert "Shown to leak: alice." in text
    assert "not applicable: &lt;steps&gt;" in text
    rows = jsonl.read_rows(tmp_path / "round-3" / ROWS)
    assert [(row["client"], row["verdict"], row["schema_version"]) for row in rows] == [
        ("alice", "leaked", 1),
        ("bob", "not shown to leak", 1),
    ]


def test_names_from_outside_make_no_paths(tmp_path: Path) -> None:
    update = support.recorded(support.network(), client="../../x")
    outside = RecordedUpdate(before=update.before, after=update.after, origin={"round": "../..", "client": "../../x"})
    page = RoundReports(folder=tmp_path / "in", record=True).add(outside, QUIET, "sent")
    assert page.parent.parent == tmp_path / "in"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    kept = next(page.parent.glob("client-*.npz"))
    assert RecordedUpdate.load(kept).origin["client"] == "../../x"


def test_clients_whose_names_look_alike_keep_a_file_each(tmp_path: Path) -> None:
    names = ["a/b", "a-b", "a.b", "A-B", "x" * 5000, "x" * 5001]
    reports = RoundReports(folder=tmp_path, record=True)
    for name in (*names, "a-b"):
        reports.add(support.recorded(support.network(), client=name), QUIET, "sent")
    rows = jsonl.read_rows(tmp_path / "round-3" / ROWS)
    assert [row["client"] for row in rows] == [*names, "a-b"]
    assert len({row["update"].casefold() for row in rows}) == len(rows)
    for row in rows:
        assert RecordedUpdate.load(tmp_path / "round-3" / row["update"]).origin["client"] == row["client"]


def test_a_reply_that_could_not_be_read_leaves_no_file(tmp_path: Path) -> None:
    RoundReports(folder=tmp_path, record=True).add(RecordedUpdate(before={}, after={}), QUIET, "withheld")
    assert not list(tmp_path.rglob("*.npz"))


def test_a_long_name_and_a_long_reason_leave_the_table_narrow(tmp_path: Path) -> None:
    name, reason = f"ward 4 of {'x' * 200}", f"the screening failed: {'y' * 600}"
    update = support.recorded(support.network(), client=name)
    failed = Screening(verdict="failed", reason=reason)
    page = RoundReports(folder=tmp_path).add(update, failed, f"sent with a warning: {reason}").read_text()
    table = page[page.index("<table") : page.index("</table>")]
    assert "<td>sent with a warning</td>" in table
    assert f"<td>{name[:27]}…</td>" in table
    assert page.count(name) == 1
    assert page.count(reason) == 1


def test_what_is_of_one_update_stands_with_it(tmp_path: Path) -> None:
    reports = RoundReports(folder=tmp_path)
    for client, weight in (("a", "3"), ("b", "4")):
        update = support.recorded(support.network(), client=client)
        origin = {**update.origin, "facts": "metrics: examples", "weight in the mean": weight}
        page = reports.add(replace(update, origin=origin), QUIET, "sent: nothing is shown")
    first, second = page.read_text().split('id="client-0"')[1].split('id="client-1"')
    for part, weight in ((first, "3"), (second, "4")):
        words = re.sub(r"<[^>]*>|\s+", " ", part)
        assert re.search(rf"weight in the mean +{weight} ", words)
        assert re.search("Known from +metrics: examples", words)
        assert re.search("Training, as far as known +optimizer sgd, lr 0.1, steps 1, examples 1", words)
        assert re.search("Tried: analytic +not applicable: &lt;steps&gt;", words)


def test_the_page_says_that_a_client_trained_in_evaluation_mode(tmp_path: Path) -> None:
    update = support.recorded(support.network())
    update = replace(update, training=replace(update.training, train_mode=False))
    page = RoundReports(folder=tmp_path).add(update, QUIET, "sent: nothing is shown").read_text()
    assert "train_mode False" in page


def test_what_is_not_decided_is_named_by_itself(tmp_path: Path) -> None:
    reports, update = RoundReports(folder=tmp_path), support.recorded(support.network(), client="carol")
    undecided = Screening(verdict="not decided", reason="nobody can say what it shows")
    assert undecided.must_not_leave
    page = reports.add(update, undecided, "withheld: nobody can say what it shows").read_text()
    assert "No update was shown to leak. Not decided: carol." in page
    assert "Could not be screened" not in page
