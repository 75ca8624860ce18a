"""What a report says of rounds, and of parts of a run that are missing, damaged or of other code."""

import pytest
from support.fakerun import CONFIG, FakeRun
from support.reports import blocks, grid, reasons

from eval.report.assemble import build_report
from eval.report.blocks import FigureBlock, FindingBlock, GalleryBlock, Note


def test_rounds_and_defenses(tmp_path):
    config = CONFIG.replace("[{name: none}]", "[{name: none}, {name: noise, as: loud}]")
    run = FakeRun(config=config)
    for defense in ("none", "loud"):
        for number in (0, 10):
            run.attack(
                "fedavg",
                "ig",
                [12.0, 14.0, 16.0 + number],
                round=number,
                defense=defense,
                accuracy=0.6,
                accuracy_last=0.65,
            )
        for seed in (0, 1):
            run.train("fedavg", [0.1, 0.5, 0.6 + 0.1 * seed], defense=defense, seed=seed)
    content = build_report(run.write(tmp_path / "out"))
    names = [figure.name for figure in blocks(content, FigureBlock)]
    assert names == ["tradeoff", "tradeoff-ssim", "images", "accuracy", "accuracy-local", "leakage-rounds"]
    assert grid(content, "Accuracy").rows[0][2].startswith("65.0")
    assert [block.subject for block in blocks(content, FindingBlock)] == ["fedavg", "fedavg with loud"]
    assert grid(content, "How close the pictures are").columns[:5] == [">no.", "method", "defense", "attack", ">round"]
    communication = grid(content, "Communication").rows[0]
    assert communication[2:4] == ["1,000", "2,000"]
    assert any("defense-known" in term for note in blocks(content, Note) for term, _ in note.entries)


def test_what_travels_is_counted_each_way_in_numbers_and_in_mebibytes(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [12.0]).train("fedavg", [0.1, 0.6])
    run.rounds = [{**row, "numbers_up": 2**18, "numbers_down": 3 * 2**19} for row in run.rounds]
    communication = grid(build_report(run.write(tmp_path / "out")), "Communication")
    assert communication.columns[2:6] == [">numbers up", ">numbers down", ">MiB up", ">MiB down"]
    assert communication.rows[0][2:6] == ["262,144", "1,572,864", "1.00", "6.00"]  # four bytes each


def test_each_point_has_the_accuracy_of_its_own_round(tmp_path):
    run = FakeRun().train("fedavg", [0.1, 0.5, 0.6])
    for number, accuracy, psnr in ((0, 0.1, 30.0), (10, 0.6, 12.0)):
        run.attack("fedavg", "ig", [psnr, psnr + 1], round=number, accuracy=accuracy, accuracy_last=0.6)
    content = build_report(run.write(tmp_path / "out"))
    scatter = next(figure for figure in blocks(content, FigureBlock) if figure.name == "tradeoff")
    assert [row[3] for row in scatter.legend.rows] == ["0"]  # where it leaked most
    assert scatter.legend.rows[0][4].startswith("10.0\N{NO-BREAK SPACE}% [")  # of round 0
    close = grid(content, "How close the pictures are")
    assert [row[4][:4] for row in close.rows] == ["10.0", "60.0"]
    assert grid(content, "Accuracy").rows[0][2].startswith("60.0\N{NO-BREAK SPACE}% [")


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1])
def test_report_takes_every_seed_that_a_config_may_have(tmp_path, seed):
    run = FakeRun().train("fedavg", [0.1, 0.6], seed=seed).attack("fedavg", "ig", [20.0, 22.0], seed=seed)
    content = build_report(run.write(tmp_path / "out"))
    assert grid(content, "How close the pictures are").rows[0][4].startswith("21.0")


def test_rounds_without_an_accuracy_are_no_points(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0, 22.0], round=5, accuracy=None, accuracy_last=0.6)
    content = build_report(run.write(tmp_path / "out"))
    assert "no accuracy of its round is on file" in reasons(content)
    assert grid(content, "Accuracy").rows[0][2] == "60.0\N{NO-BREAK SPACE}%"


@pytest.mark.parametrize("codes", [["a", "a"], ["a", "b"], ["b", "b"], ["a", None]])
def test_cells_of_other_code_are_said_first(tmp_path, codes):
    run = FakeRun().attack("fedavg", "ig", [24.0, 21.0, 23.0])
    run.about["code"] = "a"
    run.about["cells"] = [
        {"id": str(i), "name": "one", "status": "finished", **({"code": code} if code else {})}
        for i, code in enumerate(codes)
    ]
    content = build_report(run.write(tmp_path / "out"))
    notes = [note for note in blocks(content, Note) if note.title == "Computed by different source code"]
    assert bool(notes) == ("b" in codes)
    if notes:
        assert content.sections[0].blocks[0] is notes[0]
        assert f"{codes.count('b')} of 2 finished cells" in notes[0].entries[0][1]


def test_a_run_that_is_not_finished_says_so(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [24.0, 21.0, 23.0])
    run.about["cells"] = [
        {"name": "fedavg: ig", "status": "finished"},
        {"name": "fedavg: dlg", "status": "failed", "reason": "ValueError: too cold"},
    ]
    content = build_report(run.write(tmp_path / "out"))
    note = blocks(content, Note)[0]
    assert note.title == "Incomplete: 1 of 2 parts of this run are not finished"
    assert note.entries == [("fedavg: dlg", "ValueError: too cold.")]


def test_what_is_not_on_file_is_left_out_with_the_reason(tmp_path):
    run = FakeRun(environment={}).attack("fedavg", "ig", [20.0, 21.0]).attack("hyperfl", "ig", [20.0, 21.0])
    del run.pictures["hyperfl-none-ig-round10-seed0"]
    content = build_report(run.write(tmp_path / "out"))
    said = reasons(content)
    for part in ("rounds.jsonl", "run.json", "env.json", "no images/hyperfl-none-ig-round10-seed0.npz"):
        assert part in said
    (gallery,) = blocks(content, GalleryBlock)
    assert [case.rule for case in gallery.pairs] == ["best", "worst"]
    assert not any("LPIPS" in column for column in grid(content, "How close the pictures are").columns)


def test_pictures_of_other_rows_are_not_shown(tmp_path):
    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0])
    original, found = run.pictures["fedavg-none-ig-round10-seed0"]
    run.pictures["fedavg-none-ig-round10-seed0"] = (original, found[::-1])
    content = build_report(run.write(tmp_path / "out"))
    assert not blocks(content, GalleryBlock)
    assert "its PSNR differs" in reasons(content)


def broken(kind: str, whole: bytes) -> bytes:
    data = bytearray(whole)
    entry = data.index(b"PK\x01\x02")  # of the first array, in the list of contents
    if kind == "encrypted":
        data[entry + 8] |= 1
        data[6] |= 1
    if kind == "packed otherwise":
        data[entry + 10] = data[8] = 99
    if kind == "flipped":
        data[60:90] = bytes(byte ^ 255 for byte in data[60:90])
    return {"empty": b"", "text": b"not a zip file", "cut off": bytes(data[:40])}.get(kind, bytes(data))


@pytest.mark.parametrize("kind", ["empty", "text", "cut off", "encrypted", "packed otherwise", "flipped"])
def test_damaged_pictures_are_a_reason(tmp_path, kind):
    folder = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0]).write(tmp_path / "out")
    path = folder / "images" / "fedavg-none-ig-round10-seed0.npz"
    path.write_bytes(broken(kind, path.read_bytes()))
    assert "can't be read" in reasons(build_report(folder))
