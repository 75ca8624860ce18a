"""Result files: all rows or none, and clear words about broken ones."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eval.io import jsonl
from eval.io.jsonl import read_rows, replace_rows, write_rows, write_text


def test_round_trip_and_append(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    first = [{"image": 0, "psnr": 12.5, "missing": {"lpips": "no weights"}}, {"image": 1, "psnr": None}]
    write_rows(path, first)
    write_rows(str(path), iter([{"image": 2, "name": "Grün\nzwei"}]))
    assert read_rows(path) == [*first, {"image": 2, "name": "Grün\nzwei"}]
    assert path.read_bytes().count(b"\n") == 3
    assert os.listdir(path.parent) == ["rows.jsonl"]


def test_floats_come_back_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 1e-300, 5e-324, 1.7976931348623157e308, -0.0]
    write_rows(tmp_path / "rows.jsonl", [{"v": v} for v in values])
    assert [row["v"].hex() for row in read_rows(tmp_path / "rows.jsonl")] == [v.hex() for v in values]


def test_replacing_leaves_nothing_of_before(tmp_path):
    path = tmp_path / "rows.jsonl"
    replace_rows(path, [{"image": 0}, {"image": 1}])
    replace_rows(path, [{"image": 2}])
    assert read_rows(path) == [{"image": 2}]
    with pytest.raises(ValueError, match="not JSON"):
        replace_rows(path, [{"psnr": float("nan")}])
    assert read_rows(path) == [{"image": 2}]
    write_text(path, "gr\u00fcn\n")
    assert path.read_text(encoding="utf-8") == "gr\u00fcn\n"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def interrupted():
    yield {"image": 1}
    raise KeyboardInterrupt


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (interrupted, KeyboardInterrupt),
        (lambda: [{"image": 1}, {"psnr": float("nan")}], ValueError),
        (lambda: [{"image": 1}, {"psnr": float("inf")}], ValueError),
        (lambda: [{"image": 1}, {"psnr": object()}], TypeError),
    ],
)
def test_bad_rows_leave_the_file_as_it_was(tmp_path, existing, rows, error):
    path = tmp_path / "rows.jsonl"
    if existing:
        write_rows(path, [{"image": 0}])
    with pytest.raises(error):
        write_rows(path, rows())
    assert os.listdir(tmp_path) == (["rows.jsonl"] if existing else [])
    assert not existing or read_rows(path) == [{"image": 0}]


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace", "shutil.copyfileobj", "os.fchmod"])
def test_a_failing_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, step):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"image": 0}])

    def fail(*_args, **_kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="no space left"):
            write_rows(path, [{"image": 1}])
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    assert read_rows(path) == [{"image": 0}]
    write_rows(path, [{"image": 1}])
    assert read_rows(path) == [{"image": 0}, {"image": 1}]


def test_what_a_killed_writer_left_is_not_read_and_goes_away(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"image": 0}])
    (tmp_path / ".rows.jsonl.0123456789abcdef.part").write_text('{"image": 0}\n{"ima')
    assert read_rows(path) == [{"image": 0}]
    write_rows(path, [{"image": 1}])
    assert read_rows(path) == [{"image": 0}, {"image": 1}]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_rows(path, [{"image": i}, {"image": i}]), range(24)))
    images = [row["image"] for row in read_rows(path)]
    assert sorted(images) == sorted([*range(24), *range(24)])
    assert images[::2] == images[1::2]


def test_permissions_follow_the_umask_and_then_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"image": 0}])
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    write_rows(path, [{"image": 1}])
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", ['{"image": 1', '{"psnr": NaN}', '{"psnr": -Infinity}', "[1, 2]", "3", "", "\xff{}"])
def test_broken_lines_are_named(tmp_path, line):
    path = Path(tmp_path) / "rows.jsonl"
    path.write_bytes(json.dumps({"image": 0}).encode() + b"\n" + line.encode("latin-1") + b"\n" + b'{"image": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: "):
        read_rows(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "none.jsonl")


def test_numbers_too_large_for_a_float_are_no_figures(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"psnr": 1.5}\n{"psnr": 1e999}\n')
    with pytest.raises(ValueError, match=r"line 2: not valid JSON \(1e999 is no JSON number\)"):
        jsonl.read_rows(tmp_path / "rows.jsonl")
    assert jsonl.parse("[1.5, 1e-3, 3]") == [1.5, 1e-3, 3]


def test_a_json_file_of_many_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="expected at most 268435456 bytes, got 1099511627776"):
        jsonl.read_json(tmp_path / "run.json")
