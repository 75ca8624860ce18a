"""What the README tells a new user to type works as it stands, and it stays short."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
WORDS = 600


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():  # user code may draw from the global generator
        names: dict[str, object] = {}
        exec(compile(snippet, "README.md", "exec"), names)
    assert "dB" in str(names["message"])
    assert (tmp_path / "audit" / "report.html").is_file()


def test_snippets_are_short() -> None:
    assert len(SNIPPETS) == 1
    for snippet in SNIPPETS:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 10


def test_readme_is_short() -> None:
    assert len(README.split()) <= WORDS


def test_one_picture_and_the_two_commands() -> None:
    assert len(re.findall(r"!\[", README)) == 1
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", README, re.MULTILINE))


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
