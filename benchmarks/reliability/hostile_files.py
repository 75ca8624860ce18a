"""Files and names made to harm whoever reads them, each with the command line that is given it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
LABELS = [
    *(
        "../secret",
        "../../secret",
        "../../../secret",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "a\\b",
        "~/x",
        "%2e%2e/x",
        "./x",
    ),
    *("x/../../secret", "//x", "x/", "\n", "\x1b[31m", "\u202ex", "<b>", "|x|", "`x`", "$(touch ran)", ";x", "nul*"),
    *("x\0y", "x" * 300, "x" * 10**6, "", " ", "\ud800"),
]
WORDS = [
    *("\x1b]0;owned\x07", "\x1b[2J\x1b[31m", "\r\rerror: none", "\x9b31m", "\u202eevil", "\u2066a\u2069"),
    *("[link=http://e.test]x[/link]", "[paper]", "[/b]", "[bold]x", "<script>touch()</script>", ":smile:"),
    *("<img src=x onerror=alert(1)>", "![x](http://e.test/x.png)", "[x](javascript:alert(1))", "a|b|c", "`code`"),
    *("\n# title\n", "</title><script>", "&lt;b&gt;", "x" * 100_000, "\u200b\ufeff"),
]
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghij")
)
DOCUMENTS = [
    BOMB,
    "a: " + "[" * 9000, "a: " + "{" * 9000, "- " * 9000, "? " * 9000, "&a [*a]", "&a {a: *a}", "lr: {{ lr }}", "[a]: b",
    "x" * 2_000_000, "!!python/object/apply:os.system ['touch ran']", "!!python/object/new:os.system ['touch ran']",
    "!!int ''", "!!bool x", "!!timestamp x", "1" * 9999, '"\\ud800"', "a: \0", "'" * 10**5, "a: !!binary '####'",
    "task: &t {dataset: faces, model: mlp}\nmethod: *t", "title: {a: 1}", "seeds: [1e400]", "method: " + "x" * 10**5,
    "task: {dataset: faces, model: mlp}\nmethod: fedavg\nsweep: {method.lr: [" + "1," * 9000 + "]}",
    "imports: [../spy.py]\ntask: 1", "imports: [spy]", "imports: {a: b}", "imports: [spy.py]\ntitle: x",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A hostile file: its name, what makes it in a folder, and the command line that is given it."""

    name: str
    make: Callable[[Path], object]
    words: list[str]


def kinds() -> dict[str, Callable[[], Iterator[Case]]]:
    """What makes the cases, by kind."""
    return {
        "rows": _rows,
        "words": _words,
        "documents": _documents,
        "places": _places,
        "data": _data,
        "updates": _updates,
    }


def _fake(folder: Path, change: Callable[[Any], object] = lambda _run: None) -> Path:
    sys.path.append(str(ROOT / "tests"))
    from support.fakerun import FakeRun  # type: ignore[import-not-found]

    run = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0]).train("fedavg", [0.1, 0.5])
    run.about = {"name": "x", "cells": []}
    change(run)
    return Path(run.write(folder / "out"))


def _changed(folder: Path, key: str, value: object) -> None:
    _fake(folder, lambda run: run.rows[1].update({key: value}))


def _content(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _rows() -> Iterator[Case]:
    """Labels and numbers of rows that are paths, or of other types."""
    for key in ("method", "defense", "attack"):
        for label in LABELS:
            yield Case(
                f"{key} {label[:20]!r}",
                partial(_changed, key=key, value=label),
                ["report", "out"],
            )
    values: list[Any] = [{"a": 1}, [1], "x", -1, 2**70, 1e308, True, None]
    for key in ("round", "seed", "psnr", "picture", "missing", "history"):
        for value in values[: 4 if key in {"round", "seed"} else 8]:
            yield Case(
                f"{key} {value!r}",
                partial(_changed, key=key, value=value),
                ["report", "out"],
            )


def _words() -> Iterator[Case]:
    """Titles, reasons and names with escapes and markup."""

    def spoilt(folder: Path, words: str) -> None:
        _fake(folder, lambda run: spoil(run, words))

    def spoil(run: Any, words: str) -> None:
        run.config = run.config.replace("A made-up run", json.dumps(words))
        run.refuse("fedavg", "dlg", words)
        run.about |= {"name": words, "command": words}

    for words in WORDS:
        yield Case(f"report of {words[:20]!r}", partial(spoilt, words=words), ["report", "out"])
        text = f"title: {json.dumps(words)}\ntask: {{dataset: faces, model: mlp}}\nmethod: fedavg\n"
        yield Case(
            f"show of {words[:20]!r}", partial(_content, name="c.yaml", content=text.encode()), ["show", "c.yaml"]
        )


def _documents() -> Iterator[Case]:
    """YAML that expands, overflows, or names code."""

    def make(folder: Path, text: str) -> None:
        (folder / "spy.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
        (folder / "c.yaml").write_text(text)

    for number, text in enumerate(DOCUMENTS):
        yield Case(f"show of document {number}", partial(make, text=text), ["show", "c.yaml"])

        def changed(folder: Path, text: str = text) -> None:
            make(folder, "")
            (_fake(folder) / "config.yaml").write_text(text)

        yield Case(f"report of document {number}", changed, ["report", "out"])


def _places() -> Iterator[Case]:
    """Files of a run that are links, pipes, huge or deep."""
    names = ("config.yaml", "images.jsonl", "rounds.jsonl", "run.json", "env.json", "images")

    def replaced(folder: Path, name: str, how: Callable[[Path], object]) -> None:
        path = _fake(folder) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        how(path)

    ways: dict[str, Callable[[Path], object]] = {
        "a link out": lambda path: path.symlink_to("../../secret/secret.txt"),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": lambda path: os.mkfifo(path),
        "deep": lambda path: path.write_text('{"a": ' + "[" * 10**5),
        "huge": _huge,
    }
    for name in names:
        for way, how in ways.items():
            yield Case(f"{name}: {way}", partial(replaced, name=name, how=how), ["report", "out"])


def _data() -> Iterator[Case]:
    """Folders of images and annotations."""

    def pictures(folder: Path, spoil: Callable[[Path], object]) -> None:
        from PIL import Image

        for name in ("a", "b"):
            (folder / "p" / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "p" / name / f"{number}.png")
        spoil(folder / "p" / "a")

    def png(width: int, height: int) -> bytes:
        head = b"IHDR" + pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = b"IDAT" + zlib.compress(bytes(10**6))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            pack(">I", len(x) - 4) + x + pack(">I", zlib.crc32(x)) for x in (head, data)
        )

    spoils: dict[str, Callable[[Path], object]] = {
        f"{w} x {h}": partial(_content, name="x.png", content=png(w, h))
        for w, h in ((13_000, 13_000), (10**5, 10**5), (2**31 - 1, 1), (1, 2**26 + 1), (9_000, 9_000), (0, 0))
    }
    spoils |= {
        "a pipe": lambda a: os.mkfifo(a / "x.png"),
        "a device": lambda a: (a / "x.png").symlink_to("/dev/zero"),
        "a link out": lambda a: (a / "x.png").symlink_to("../../../secret/secret.png"),
        "a class out": lambda a: (a.parent / "c").symlink_to("../../secret"),
        "PostScript": lambda a: (a / "x.png").write_text(
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file\n"
        ),
        "no bytes": lambda a: (a / "x.png").touch(),
        "a folder": lambda a: (a / "x.png").mkdir(),
        "not UTF-8": lambda a: (a.parent / os.fsdecode(b"caf\xe9")).mkdir(),
    }
    for number in range(12):
        junk = np.random.default_rng(number).bytes(999)
        ending = ("png", "jpg", "tif", "webp", "bmp", "ppm")[number % 6]
        heads = (
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff\xe0",
            b"II*\0",
            b"RIFF\xff\xff\0\0WEBP",
            b"BM",
            b"P6 9999999 99999999 255\n",
        )
        content = heads[number % 6] + junk
        spoils[f"junk {number}"] = partial(_content, name=f"x.{ending}", content=content)
    words = [
        "audit",
        "--method",
        "fedavg",
        "--dataset",
        "{name: folder, path: p, size: 8}",
        "--model",
        "{name: mlp, input_shape: [3, 8, 8]}",
        "--attack",
        "analytic",
        "--workers",
        "1",
    ]
    for name, spoil in spoils.items():
        yield Case(f"folder: {name}", partial(pictures, spoil=spoil), words)

    def annotated(folder: Path, line: str) -> None:
        from PIL import Image

        for kind in ("train/n1", "val/images"):
            (folder / "t" / kind).mkdir(parents=True)
            Image.new("RGB", (64, 64)).save(folder / "t" / kind / "0.png")
        (folder / "t" / "words.txt").write_text("n1\tx\n")
        (folder / "t" / "val" / "val_annotations.txt").write_text(f"{line}\tn1\n", encoding="utf-8", errors="replace")

    for line in (
        "../../../secret/secret.png",
        "/etc/passwd",
        "..",
        "",
        "0.png\0",
        "a/b",
        "x" * 300,
        "\x1b[31m",
        "../images/0.png",
    ):
        yield Case(
            f"annotation {line[:20]!r}",
            partial(annotated, line=line),
            ["doctor", "--download", "tiny-imagenet", "--source", "t"],
        )


def _updates() -> Iterator[Case]:
    """Updates and data sets that are programs, bombs, or lie about their sizes."""
    pickled = b"cos\nsystem\n(S'touch ran'\ntR."
    header = b"\x93NUMPY\x01\x00"

    def lying(shape: str, kind: str = "<f4") -> bytes:
        words = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        return header + pack("<H", len(words)) + words

    def zipped(members: dict[str, bytes], repeat: int = 1) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                with archive.open(name, "w", force_zip64=True) as member:
                    for _ in range(repeat):
                        member.write(content)
        return file.getvalue()

    keys = ("0.weight", "images", "labels")
    files: dict[str, bytes] = {"a program": pickled, "nothing": b"", "text": b"hello", "html": b"<html><script>"}
    for shape in ("(1099511627776,)", "(-1,)", "(2, 2)", "(0,)", "(9,) * 9", "()", "(99999999999999999999,)"):
        files[f"lying {shape}"] = zipped({f"{key}.npy": lying(shape) for key in keys})
    for kind in ("|O", "<M8[s]", "|S9", "<f16", "|V8"):
        files[f"kind {kind}"] = zipped({f"{key}.npy": lying("(1,)", kind) + pickled.ljust(64) for key in keys})
    files["a bomb"] = zipped({f"{key}.npy": b"\0" * 2**20 for key in keys}, 64)
    files["a program in an archive"] = zipped({"archive/data.pkl": pickled, "archive/version": b"3"})
    files["paths in an archive"] = zipped({f"../../{key}.npy": lying("(1,)") for key in keys})
    model = "import torch\nf = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))\n"
    for name, content in files.items():
        for ending in ("npz", "pt"):
            words = [
                "audit",
                "--update",
                f"u.{ending}",
                "--model",
                "hostile_model:f",
                "--input-shape",
                "1,8,8",
                "--attack",
                "analytic",
            ]

            def make(folder: Path, end: str = ending, what: bytes = content) -> None:
                (folder / "hostile_model.py").write_text(model)
                (folder / f"u.{end}").write_bytes(what)

            yield Case(f"update .{ending}: {name}", make, words)
        data = ["audit", "hostile_model:f", "--images", "u.npz", "--attack", "analytic"]
        yield Case(
            f"data: {name}",
            partial(make, end="npz", what=content),
            data,
        )
