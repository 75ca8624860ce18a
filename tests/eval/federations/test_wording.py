"""Reasons of a screening name arguments, whatever part of the packages they come from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.federations.wording import in_arguments

ROOT = Path(__file__).parents[3]
SPEAKING = ["attacks", "fl", *(f"eval/audit/{name}.py" for name in (
    "captured_files", "captured_update", "true_images", "input_shape", "tensor_names", "update_sanity", "user_model"
))]  # fmt: skip
"""What an audit in a federation calls."""
OTHERS = re.compile(r"python -m|the authors'|hyperleak doctor")
"""Commands that an audit does not speak of."""
LEFT = re.compile(r"--[a-z]|[Cc]ommand line|hyperleak audit --")


def sentences() -> Iterator[str]:
    """All texts in these files that name an option, parts that are filled in as they come."""
    for place in SPEAKING:
        found = ROOT / place
        for path in [found] if found.suffix else sorted(found.rglob("*.py")):
            if not LEFT.search(path.read_text()):
                continue
            tree = ast.parse(path.read_text())
            docs = {id(node.body[0].value) for node in ast.walk(tree) if hasattr(node, "body") and _has_docstring(node)}
            inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if id(node) in docs | inner:
                    continue
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(p.value) if isinstance(p, ast.Constant) else "fedavg" for p in node.values)
                else:
                    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if LEFT.search(text) and not OTHERS.search(text):
                    yield text


def _has_docstring(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return isinstance(body, list) and bool(body) and isinstance(body[0], ast.Expr)


def test_no_option_of_the_command_is_left_of_what_can_be_said() -> None:
    found = list(sentences())
    assert len(found) >= 15, "this looks for nothing any more"
    assert not {text: said for text in found if LEFT.search(said := in_arguments(text))}


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (
            "state it (method, --method) to rely on that",
            "state it (optimizer, steps and lr in `training`) to rely on that",
        ),
        ("check --batch-size and --method", "check `batch_size` and `training`"),
        (
            "let your function return model.train(), or give --method '{name: fedavg, train_mode: true, ...}'",
            "let your function return model.train(), or state train_mode: true in `training`",
        ),
        (
            "it can't run. On the command line: --method '{name: fedavg, train_mode: false}'",
            "it can't run",
        ),
        ("give head='its.prefix.' (--head)", "give head='its.prefix.'"),
        ("expected --input-shape of images that fit", "expected `input_shape` of images that fit"),
        ("a network of 2 -- or 3 -- layers", "a network of 2 -- or 3 -- layers"),
        ("no file a--b.npz or out/--b/c.npz", "no file a--b.npz or out/--b/c.npz"),
        ("'x--method'.weight beside x--y.bias", "'x--method'.weight beside x--y.bias"),
        ("give --head, or --loss.", "give `head`, or `loss`."),
    ],
)
def test_what_it_says_instead(said: str, instead: str) -> None:
    assert in_arguments(said) == instead
