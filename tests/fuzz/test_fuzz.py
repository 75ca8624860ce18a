"""Configs, rows, updates and images made up by hypothesis: each is read, or refused in a line.

What was found once stands as an `@example`. A minute or so of it runs by default; `make nightly` goes on for an hour.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.fakerun import CONFIG, FakeRun

from eval.audit import captured_files
from eval.experiment import yaml_config
from eval.io.jsonl import parse
from eval.io.yaml12 import parse as parse_yaml
from eval.report.writer import write_report
from fl.data.sources.folders import decode_images

REFUSALS = (ValueError, FileNotFoundError)


@contextmanager
def read_or_refused(*refusals: type[Exception]) -> Iterator[None]:
    """What happens inside ends well, or by a refusal in one line."""
    said = "read"
    try:
        yield
    except refusals as error:
        said = str(error)
    assert len(said.splitlines()) == 1, said


FEW = settings.default.max_examples if settings.default.max_examples > 1000 else 60
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data."""
    if isinstance(value, dict):
        return [path, *(place for key, item in value.items() for place in places(item, (*path, key)))]
    if isinstance(value, list):
        return [path, *(place for key, item in enumerate(value) for place in places(item, (*path, key)))]
    return [path]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Plain data with another value in a place."""
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


SETTINGS = yaml.safe_load(CONFIG) | {"attack": ["ig", {"name": "peel+ig", "against": ["hyperfl"]}]}


@settings(max_examples=FEW)
@given(st.sampled_from(places(SETTINGS)), PLAIN)
@example(("method", 0, "lr"), {"a": 1})
@example(("method",), [])
@example(("seeds",), float("inf"))
def test_configs_of_any_values_are_built_or_refused_by_key(place, value):
    with read_or_refused(*REFUSALS):
        yaml_config.read(put(SETTINGS, place, value))


@settings(max_examples=4 * FEW)
@given(st.text(alphabet="ab01: -?[]{}&*!|>'\"%@`,#\n\t<=.~\\x", max_size=40))
@example("lr: {{ lr }}")
@example("&a [*a]")
@example("!!int ''")
def test_any_text_is_read_as_yaml_or_refused(text):
    with read_or_refused(ValueError):
        parse_yaml(text)


@settings(max_examples=4 * FEW)
@given(st.binary(max_size=40))
@example(b"[" * 100_000)
def test_any_bytes_are_read_as_json_or_refused(content):
    with read_or_refused(ValueError):
        parse(content)


RUN = FakeRun().attack("fedavg", "ig", [20.0, 21.0, 22.0]).train("fedavg", [0.1, 0.5])


@settings(max_examples=FEW)
@given(
    st.sampled_from([*RUN.rows[0]]), PLAIN.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value))
)
@example("attack", "../../../secret")
@example("psnr", {"a": 1})
@example("images", None)
def test_rows(column, value):
    run = copy.deepcopy(RUN)
    run.rows[1][column] = value
    with read_or_refused(*REFUSALS), tempfile.TemporaryDirectory() as folder:
        write_report(run.write(Path(folder) / "out"))


def png() -> bytes:
    """A picture."""
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, "PNG")
    return file.getvalue()


def npz() -> bytes:
    """An update."""
    file = io.BytesIO()
    np.savez(file, **{"0.weight": np.ones((2, 3), np.float32)})
    return file.getvalue()


def pt() -> bytes:
    """The same as torch has it."""
    file = io.BytesIO()
    torch.save({"0.weight": torch.ones(2, 3)}, file)
    return file.getvalue()


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """A file with a byte changed, bytes put in, or its end cut off."""
    places = st.integers(0, len(content) - 1)
    return st.one_of(
        st.builds(lambda i, b: content[:i] + bytes([b]) + content[i + 1 :], places, st.integers(0, 255)),
        st.builds(lambda i, b: content[:i] + b + content[i:], places, st.binary(min_size=1, max_size=8)),
        st.builds(lambda i: content[:i], places),
    )


@settings(max_examples=4 * FEW)
@given(st.sampled_from(["png", "jpg", "tif"]), changed(png()) | st.binary(max_size=64))
def test_image_files_of_any_content_are_read_or_refused(ending, content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{ending}"
        path.write_bytes(content)
        with read_or_refused(*REFUSALS):
            decode_images([path], 8, "color")


@settings(max_examples=2 * FEW)
@given(st.tuples(st.just("npz"), changed(npz())) | st.tuples(st.just("pt"), changed(pt())))
def test_update_files_of_any_content_are_read_or_refused(file):
    ending, content = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"u.{ending}"
        path.write_bytes(content)
        with read_or_refused(*REFUSALS):
            captured_files.load_update(path)
