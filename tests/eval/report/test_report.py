import json
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import numpy as np
import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import blocks, grid, reasons

from eval.metrics import statistics
from eval.report.assemble import build_report
from eval.report.blocks import DefinitionList, FigureBlock, FindingBlock, GalleryBlock, Note, TableBlock
from eval.report.charts.svg import to_element
from eval.report.formatting import format_error, format_interval
from eval.report.sections.overview import attacker_knowledge
from eval.report.writer import write_figures, write_report

FIGURES = {"tradeoff", "tradeoff-ssim", "images", "accuracy", "accuracy-local", "diagnostic-1"}
VOID = {"meta", "img", "br"}
NASTY = "<script>alert('x')</script>|`*"


class Page(HTMLParser):
    """What a page holds; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def full() -> FakeRun:
    run = FakeRun()
    run.attack("fedavg", "ig", [24.0, 21.0, 23.0, 22.0, 25.0, 20.5], accuracy=0.62)
    run.attack("hyperfl", "ig", [4.0, 5.0, 3.0, 6.0, 5.0, 4.0], accuracy=0.71, label_correct=None)
    run.attack(
        "hyperfl", "peel+ig", [35.0, 9.0, 4.0, 40.0, 7.0, 5.0], accuracy=0.71, label_correct=None, extractor_error=2e-7
    )
    run.train("fedavg", [0.1, 0.5, 0.62]).train("hyperfl", [0.1, 0.6, 0.71])
    run.about = {"title": "x", "command": "hyperleak run made-up --seeds 1"}
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = full().write(tmp_path_factory.mktemp("run") / "out")
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page((folder / "report.html").read_text())


def test_the_page_stands_alone_and_is_accessible(folder, page):
    html = (folder / "report.html").read_text()
    assert "http" not in html
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    assert "url(" not in html
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert pictures
    assert all(attributes.get("alt") and str(attributes["src"]).startswith("data:image/png") for attributes in pictures)
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in drawings)
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert heads
    assert all("scope" in attributes for attributes in heads)
    names = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(names) == len(set(names))
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag == "a"]
    assert links
    assert all(link.removeprefix("#") in names for link in links)
    assert any(attributes.get("name") == "viewport" for tag, attributes in page.tags if tag == "meta")


def test_figures_are_those_of_the_rows(folder, page):
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    text = (folder / "report.md").read_text().replace("\\", "")
    for method, attack in (("fedavg", "ig"), ("hyperfl", "ig"), ("hyperfl", "peel+ig")):
        own = [row for row in rows if (row["method"], row["attack"]) == (method, attack)]
        floor = max(("mean", "grey", "noise", "nearest"), key=lambda g: fmean(row[f"floor_{g}_psnr"] for row in own))
        gains = [row["psnr"] - row[f"floor_{floor}_psnr"] for row in own]
        psnr = statistics.mean_interval([row["psnr"] for row in own])
        gain = statistics.mean_interval(gains, "gain")
        assert psnr.value == pytest.approx(fmean(row["psnr"] for row in own))
        for words in (format_interval(psnr), format_interval(gain, sign=True)):
            assert words in page.text
            assert words in text


def test_the_same_folder_gives_the_same_bytes(folder, tmp_path):
    other = full().write(tmp_path / "elsewhere")
    write_report(other)
    names = sorted(
        str(path.relative_to(other)) for path in other.rglob("*") if path.is_file() and path.suffix != ".npz"
    )
    assert any(name.startswith("report/") for name in names)
    assert [(folder / name).read_bytes() for name in names] == [(other / name).read_bytes() for name in names]


def test_a_report_says_what_leaks_of_each_method(folder):
    content = build_report(folder)
    found = {block.subject: block for block in blocks(content, FindingBlock)}
    assert found["fedavg"].leaks
    assert found["fedavg"].leaked == ["pictures", "labels"]
    assert found["hyperfl"].leaked == ["pictures", "private values"]
    lines = " ".join(found["hyperfl"].lines)
    assert "2 of 6 reconstructions to 20 dB or more" in lines  # a mean near the baseline hides them
    assert f"peel+ig recovered the extractor for 6 of 6 updates (relative error {format_error(2e-7)} at best)" in lines
    assert content.lead == "Shown to leak: fedavg (pictures and labels) and hyperfl (pictures and private values)."


@pytest.mark.parametrize("psnr", [[4.0, 5.0, 3.0, 6.0], [5.0]])
def test_what_is_not_shown_to_leak_is_not_called_safe(tmp_path, psnr):
    run = FakeRun().attack("fedavg", "ig", psnr, label_correct=None)
    content = build_report(run.write(tmp_path / "out"))
    (found,) = blocks(content, FindingBlock)
    assert found.leaks is False
    assert found.verdict == "not shown to leak beyond what was known before"
    assert "no proof of safety" in found.lines[-1]
    if len(psnr) == 1:
        assert "one image has no interval" in found.lines[0]
        assert any("single-image" in term for note in blocks(content, Note) for term, _ in note.entries)
        assert "[" not in grid(content, "How close the pictures are").rows[0][4]


@pytest.mark.parametrize(("images", "leaks"), [(5, False), (6, True)])
def test_few_images_prove_nothing(tmp_path, images, leaks):
    run = FakeRun().attack("fedavg", "ig", [18.0] * images, label_correct=None)
    (found,) = blocks(build_report(run.write(tmp_path / "out")), FindingBlock)
    assert found.leaks is leaks
    assert ("too few to count" in found.lines[0]) is not leaks


def test_labels_count_only_beyond_the_commonest_class(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [4.0, 5.0, 3.0, 6.0], label=0)
    (found,) = blocks(build_report(run.write(tmp_path / "out")), FindingBlock)
    assert found.leaks is False
    assert any("100" in line and "not shown to leak" in line for line in found.lines)


@pytest.mark.parametrize(("hits", "leaks"), [(2, True), (1, False), (0, False)])
def test_images_told_from_others_of_their_class_leaked_whatever_their_psnr(tmp_path, hits, leaks):
    run = FakeRun().attack("fedavg", "ig", [9.0, 8.0, 9.0, 7.0, 8.0, 9.0], label_correct=None, identified_among=50)
    for number, row in enumerate(run.rows):
        row["identified"] = number < hits
    (found,) = blocks(build_report(run.write(tmp_path / "out")), FindingBlock)
    assert found.leaks is leaks
    (line,) = [line for line in found.lines if line.startswith("Named: ")]
    assert f"for {hits} of 6 images" in line
    assert "chance is 2\N{NO-BREAK SPACE}%" in line
    assert ("not told apart" in line) is not leaks


def _naming(hits: dict[str, tuple[int, int]], **more) -> FakeRun:
    """Attacks by name, that name so many of so many images among 50."""
    run = FakeRun()
    for attack, (named, images) in hits.items():
        run.attack("fedavg", attack, [9.0] * images, label_correct=None, identified_among=50, identified=False, **more)
        for row in run.rows[len(run.rows) - images :][:named]:
            row["identified"] = True
    return run


def test_of_many_attacks_one_names_images_by_chance(tmp_path):
    several = {f"ig@tv_weight={number}": (0, 2) for number in range(79)}
    run = _naming({"lucky": (2, 2), **several})  # 1 in 2500 by itself, but one of eighty attacks
    (found,) = blocks(build_report(run.write(tmp_path / "lucky")), FindingBlock)
    assert any("for 2 of 2 images" in line for line in found.lines)
    assert found.leaks is False
    run = _naming({"lucky": (2, 2), "ig": (10, 50), **dict(list(several.items())[1:])})
    (found,) = blocks(build_report(run.write(tmp_path / "both")), FindingBlock)
    assert any("what ig brought" in line and "for 10 of 50 images" in line for line in found.lines)
    assert found.leaks is True


def test_the_closest_of_several_reconstructions_is_as_many_guesses(tmp_path):
    for candidates, leaks in ((1, True), (8, False), (100, False)):
        run = _naming({"ig": (4, 16)}, candidates=candidates)
        (found,) = blocks(build_report(run.write(tmp_path / str(candidates))), FindingBlock)
        assert found.leaks is leaks
        assert f"chance is {min(100, 2 * candidates)}\N{NO-BREAK SPACE}%" in " ".join(found.lines)


def test_seeds_name_the_same_images_once(tmp_path):
    run = FakeRun()
    for seed in range(3):
        run.attack("fedavg", "ig", [9.0] * 2, seed=seed, label_correct=None, identified_among=50, identified=True)
    content = build_report(run.write(tmp_path / "out"))
    assert any("for 2 of 2 images" in line for line in blocks(content, FindingBlock)[0].lines)
    assert grid(content, "Images named among others of their class").rows[0][-5].endswith("[16, 100]")


def test_labels_that_were_given_say_nothing(tmp_path):
    run = FakeRun(config=CONFIG.replace("knows_labels: false", "knows_labels: true"))
    content = build_report(run.attack("fedavg", "ig", [4.0, 5.0, 3.0]).write(tmp_path / "out"))
    assert blocks(content, FindingBlock)[0].leaks is False
    assert [term for note in blocks(content, Note) for term, _ in note.entries] == ["below-floor", "labels-given"]


def test_words_from_files_are_escaped(tmp_path):
    config = CONFIG.replace("A made-up run", f'"{NASTY}"').replace("faces", "<b>")
    run = FakeRun(config=config).attack("fedavg", "ig", [20.0, 21.0, 22.0]).refuse("fedavg", "dlg", NASTY)
    run.train("fedavg", [0.1, 0.5])
    run.rounds[0]["diagnostics"] = run.rounds[1]["diagnostics"] = {NASTY: 1.0}
    run.about, run.environment = {"command": NASTY, "cells": [{"name": NASTY, "status": "failed"}]}, {NASTY: NASTY}
    folder = run.write(tmp_path / "out")
    write_report(folder)
    page = Page((folder / "report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "b"}
    assert NASTY in page.text
    text = (folder / "report.md").read_text()
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<(script|b>)", outside)
    for drawing in (folder / "report").glob("*.svg"):
        assert "<script" not in drawing.read_text()
        assert "<b>" not in drawing.read_text()


def test_cases_are_chosen_by_rule(folder):
    content = build_report(folder)
    shown = {gallery.title: gallery for gallery in blocks(content, GalleryBlock)}
    cases = shown["3  hyperfl under peel+ig"].pairs
    assert [case.rule for case in cases] == ["best", "median", "worst"]
    assert [case.score for case in cases[:2]] == ["40.0 dB", "7.0 dB"]
    assert float(cases[2].score.removesuffix(" dB")) < 9
    assert cases[0].original.startswith(b"\x89PNG")
    assert cases[0].size == (120, 120)


@pytest.mark.parametrize(("channels", "shown"), [(3, True), (2, False)])
def test_color_and_other_channels(tmp_path, channels, shown):
    run = FakeRun(shape=(channels, 12, 12)).attack("fedavg", "ig", [20.0, 21.0, 22.0])
    content = build_report(run.write(tmp_path / "out"))
    assert bool(blocks(content, GalleryBlock)) is shown
    assert ("2 channels" in reasons(content)) is not shown


def test_pictures_can_be_left_out(folder, tmp_path):
    run = full().write(tmp_path / "out")
    write_report(run)
    assert list((run / "report").glob("*.png"))
    (run / "report" / "mine.txt").write_text("kept")
    write_report(run, show=False)
    assert not list((run / "report").glob("*.png"))
    assert (run / "report" / "mine.txt").exists()
    html = (run / "report.html").read_text()
    assert "data:image" not in html
    assert "left out on request" in html


def test_markdown_shows_files_that_are_there(folder):
    text = (folder / "report.md").read_text()
    shown = re.findall(r"\]\((report/[^)]*)\)", text)
    assert sorted(set(shown)) == sorted(f"report/{path.name}" for path in (folder / "report").iterdir())
    for line in text.splitlines():
        if line.startswith("| no."):
            width = line.count("|")
    assert width


def test_all_rows_of_a_table_have_a_cell_for_each_column(folder):
    content = build_report(folder)
    found = [*blocks(content, TableBlock), *(figure.legend for figure in blocks(content, FigureBlock) if figure.legend)]
    assert len(found) > 6
    for table in found:
        assert all(len(row) == len(table.columns) for row in (*table.rows, *table.comparison_rows)), table.caption
        assert len(table.markers) in (0, len(table.rows))


def test_an_attacker_knows_no_more_rounds_than_there_are():
    known, _ = attacker_knowledge({"history_rounds": 3})
    assert known == ["up to 3 earlier rounds of the same client, as many as there are"]


def test_seeds_batches_and_failures(tmp_path):
    run = FakeRun()
    for seed in (0, 1):
        run.attack("fedavg", "ig", [12.0, 14.0, 16.0], seed=seed, accuracy=0.5 + 0.1 * seed, images=3, candidates=2)
    lost = run.rows[2]
    lost |= {"failure": "unmatched", "matched": None, "psnr": 0.0, "mse": 1.0, "ssim": 0.0}
    content = build_report(run.write(tmp_path / "out"))
    row = grid(content, "How close the pictures are").rows[0]
    assert row[3] == "55.0\N{NO-BREAK SPACE}%"
    assert row[-1] == "3"
    assert any("unmatched" in term for note in blocks(content, Note) for term, _ in note.entries)
    (gallery,) = blocks(content, GalleryBlock)
    assert gallery.pairs[-1].score == "0.0 dB (failed: no picture)"


def test_what_outsiders_can_not_be_scored_by_is_said(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [22.0] * 6, accuracy_unseen_last=0.3).train("fedavg", [0.1, 0.5])
    run.refuse("local", "-", "no attack was asked for", accuracy=0.4).train("local", [0.1, 0.4])
    run.rounds = [{**row, "numbers_down": 2000 * (row["method"] != "local")} for row in run.rounds]
    notes = []
    for number in (0, 1):
        run.config = CONFIG.replace("rounds: 10}", f"rounds: 10, held_out_clients: {number}}}")
        content = build_report(run.write(tmp_path / f"{number}"))
        notes.append(
            [entry for block in blocks(content, DefinitionList) for entry in block.entries if "Missing" in entry[0]]
        )
    (words,) = [words for term, words in notes[1] if term == "Missing for local"]
    assert "the server sends nothing" in words
    assert not any(term == "Missing for local" for term, _ in notes[0])


def test_methods_without_attacks(tmp_path):
    run = FakeRun().refuse("local", "-", "no attack was asked for", accuracy=0.4)
    run.attack("fedavg", "ig", [22.0] * 6)
    content = build_report(run.write(tmp_path / "out"))
    found, _ = blocks(content, FindingBlock)
    assert (found.leaks, found.verdict) == (None, "not examined")
    assert content.lead == "Shown to leak: fedavg (pictures and labels)."
    assert grid(content, "Where no attack applied").rows[0][-1] == "no attack was asked for"
    assert grid(content, "Accuracy").rows[0][:3] == ["local", "none", "40.0\N{NO-BREAK SPACE}%"]
    write_report(tmp_path / "out")


def test_attacks_that_recover_no_pictures(tmp_path):
    run = FakeRun().attack("hyperfl", "peel", [1.0, 2.0], extractor_error=1e-8)
    run.pictures.clear()
    for row in run.rows:
        row |= {
            "psnr": None,
            "ssim": None,
            "mse": None,
            "label_correct": None,
            "missing": {"psnr": "the attack recovers no images"},
        }
    content = build_report(run.write(tmp_path / "out"))
    (found,) = blocks(content, FindingBlock)
    assert found.leaked == ["private values"]
    assert "it recovers no pictures" in reasons(content)
    write_report(tmp_path / "out")


def test_papers_and_commands(page):
    for part in ("McMahan et al., AISTATS 2017", "Guo et al., AAAI 2025", "Geiping et al., NeurIPS 2020"):
        assert part in page.text
    assert "hyperleak run made-up --seeds 1" in page.text
    assert "hyperleak report ." in page.text
    assert "name: fedavg, lr: 0.1" in page.text


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.yaml in .*hyperleak run"):
        build_report(tmp_path)
    folder = FakeRun().write(tmp_path / "empty")
    with pytest.raises(ValueError, match="expected at least one row"):
        build_report(folder)
    folder = full().write(tmp_path / "odd")
    (folder / "images.jsonl").write_text('{"method": "fedavg"}\n')
    with pytest.raises(ValueError, match="line 1: expected a value for defense"):
        build_report(folder)
    (folder / "images.jsonl").write_text('{"psnr": NaN}\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        build_report(folder)
    folder = full().write(tmp_path / "env")
    (folder / "env.json").write_text("[]")
    with pytest.raises(ValueError, match=r"env.json: expected a JSON object"):
        build_report(folder)


def test_drawings_hold_finite_coordinates_inside_their_frame(folder):
    figures = blocks(build_report(folder), FigureBlock)
    assert {figure.name for figure in figures} == FIGURES
    for figure in figures:
        for drawing in (figure.wide, figure.narrow):
            root = ElementTree.fromstring(to_element(drawing, name="a", alt="A"))
            width, height = (float(root.attrib[size]) for size in ("width", "height"))
            marks = [e for e in root.iter() if e.tag in {"use", "text"}]
            assert {e.tag for e in marks} == {"use", "text"}
            places = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in marks if "x" in e.attrib]
            assert places
            assert np.isfinite(places).all()
            assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def test_every_value_on_file_is_in_a_chart(folder):
    rows = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    charts = {figure.name: figure.chart for figure in blocks(build_report(folder), FigureBlock)}
    for strip in charts["images"].strips:
        method, attack = strip.label.split(" under ")
        own = [row["psnr"] for row in rows if (row["method"], row["attack"]) == (method, attack)]
        assert list(strip.values) == own
        assert strip.mean == pytest.approx(fmean(own))
        (point,) = [point for point in charts["tradeoff"].points if point.label == strip.label]
        assert (point.x, point.x_interval, point.number) == (strip.mean, strip.interval, strip.number)
        assert point.y == pytest.approx({"fedavg": 62.0, "hyperfl": 71.0}[method])
    curves = {curve.label: [y for _, y in curve.points] for curve in charts["accuracy"].curves}
    assert curves == {"fedavg": pytest.approx([10, 50, 62]), "hyperfl": pytest.approx([10, 60, 71])}


def test_figures_for_papers_are_written_on_request(folder):
    (folder / "figures").mkdir()
    (folder / "figures" / "old.pdf").write_bytes(b"")
    (folder / "figures" / "mine.txt").write_bytes(b"")
    paths = write_figures(folder, "pdf")
    assert {path.name for path in paths} == {f"{name}{suffix}.pdf" for name in FIGURES for suffix in ("", "-column")}
    assert set((folder / "figures").iterdir()) == {*paths, folder / "figures" / "mine.txt"}
    assert all(path.read_bytes().startswith(b"%PDF-") for path in paths)
