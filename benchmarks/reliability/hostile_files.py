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
    """Return what makes the cases, by kind."""
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


FOLDER_AUDIT = [
    *("audit", "--method", "fedavg", "--dataset", "{name: folder, path: p, size: 8}"),
    *("--model", "{name: mlp, input_shape: [3, 8, 8]}", "--attack", "analytic", "--workers", "1"),
]
SIDES = ((13_000, 13_000), (10**5, 10**5), (2**31 - 1, 1), (1, 2**26 + 1), (9_000, 9_000), (0, 0))
"""What the head of an image says of its width and height."""
HEADS = {
    "png": b"\x89PNG\r\n\x1a\n",
    "jpg": b"\xff\xd8\xff\xe0",
    "tif": b"II*\0",
    "webp": b"RIFF\xff\xff\0\0WEBP",
    "bmp": b"BM",
    "ppm": b"P6 9999999 99999999 255\n",
}
"""How a file begins, by its ending."""
LINES = (
    *("../../../secret/secret.png", "/etc/passwd", "..", "", "0.png\0", "a/b", "x" * 300),
    *("\x1b[31m", "../images/0.png"),
)
"""Names of images in Tiny ImageNet's annotations."""


def _data() -> Iterator[Case]:
    """Folders of images and annotations."""
    for name, spoil in (_lying_images() | _odd_entries() | _junk_images()).items():
        yield Case(f"folder: {name}", partial(_spoilt_pictures, spoil=spoil), FOLDER_AUDIT)
    for line in LINES:
        words = ["doctor", "--download", "tiny-imagenet", "--source", "t"]
        yield Case(f"annotation {line[:20]!r}", partial(_annotated, line=line), words)


def _spoilt_pictures(folder: Path, spoil: Callable[[Path], object]) -> None:
    """Write two classes of four images into `p`, and spoil the first."""
    from PIL import Image

    for name in ("a", "b"):
        (folder / "p" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "p" / name / f"{number}.png")
    spoil(folder / "p" / "a")


def _annotated(folder: Path, line: str) -> None:
    """Write a folder of Tiny ImageNet whose annotations name an image so."""
    from PIL import Image

    for kind in ("train/n1", "val/images"):
        (folder / "t" / kind).mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(folder / "t" / kind / "0.png")
    (folder / "t" / "words.txt").write_text("n1\tx\n")
    (folder / "t" / "val" / "val_annotations.txt").write_text(f"{line}\tn1\n", encoding="utf-8", errors="replace")


def _lying_images() -> dict[str, Callable[[Path], object]]:
    """Return the images whose heads say that they are large."""

    def png(width: int, height: int) -> bytes:
        head = b"IHDR" + pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        data = b"IDAT" + zlib.compress(bytes(10**6))
        parts = (pack(">I", len(x) - 4) + x + pack(">I", zlib.crc32(x)) for x in (head, data))
        return HEADS["png"] + b"".join(parts)

    return {f"{w} x {h}": partial(_content, name="x.png", content=png(w, h)) for w, h in SIDES}


def _odd_entries() -> dict[str, Callable[[Path], object]]:
    """Links, pipes and others in place of an image or a class."""
    return {
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


def _junk_images() -> dict[str, Callable[[Path], object]]:
    """Return the files that begin as images and go on with noise."""
    spoils: dict[str, Callable[[Path], object]] = {}
    for number in range(2 * len(HEADS)):
        ending = [*HEADS][number % len(HEADS)]
        content = HEADS[ending] + np.random.default_rng(number).bytes(999)
        spoils[f"junk {number}"] = partial(_content, name=f"x.{ending}", content=content)
    return spoils


NETWORK = "import torch\nf = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))\n"
UPDATE_AUDIT = ["--model", "hostile_model:f", "--input-shape", "1,8,8", "--attack", "analytic"]


def _updates() -> Iterator[Case]:
    """Updates and data sets that are programs, bombs, or lie about their sizes."""
    for name, content in _archives().items():
        for ending in ("npz", "pt"):
            words = ["audit", "--update", f"u.{ending}", *UPDATE_AUDIT]
            yield Case(f"update .{ending}: {name}", partial(_beside_network, end=ending, content=content), words)
        data = ["audit", "hostile_model:f", "--images", "u.npz", "--attack", "analytic"]
        yield Case(f"data: {name}", partial(_beside_network, end="npz", content=content), data)


def _beside_network(folder: Path, end: str, content: bytes) -> None:
    """Write a file `u` with its ending, and the module of a network."""
    (folder / "hostile_model.py").write_text(NETWORK)
    (folder / f"u.{end}").write_bytes(content)


def _archives() -> dict[str, bytes]:
    """Return what stands in place of an update or of images, by what it is."""
    pickled = b"cos\nsystem\n(S'touch ran'\ntR."
    keys = ("0.weight", "images", "labels")
    files: dict[str, bytes] = {"a program": pickled, "nothing": b"", "text": b"hello", "html": b"<html><script>"}
    for shape in ("(1099511627776,)", "(-1,)", "(2, 2)", "(0,)", "(9,) * 9", "()", "(99999999999999999999,)"):
        files[f"lying {shape}"] = _zipped({f"{key}.npy": _array_head(shape) for key in keys})
    for kind in ("|O", "<M8[s]", "|S9", "<f16", "|V8"):
        files[f"kind {kind}"] = _zipped({f"{key}.npy": _array_head("(1,)", kind) + pickled.ljust(64) for key in keys})
    files["a bomb"] = _zipped({f"{key}.npy": b"\0" * 2**20 for key in keys}, 64)
    files["a program in an archive"] = _zipped({"archive/data.pkl": pickled, "archive/version": b"3"})
    files["paths in an archive"] = _zipped({f"../../{key}.npy": _array_head("(1,)") for key in keys})
    return files


def _array_head(shape: str, kind: str = "<f4") -> bytes:
    """Return the head of an `.npy` file without the numbers that it tells of."""
    words = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + pack("<H", len(words)) + words


def _zipped(members: dict[str, bytes], repeat: int = 1) -> bytes:
    """Return an archive of members, the content of each repeated."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as member:
                for _ in range(repeat):
                    member.write(content)
    return file.getvalue()
