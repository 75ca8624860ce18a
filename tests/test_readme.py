"""What the README tells a new user to type works as it stands."""

import re
from pathlib import Path

import pytest
import torch

import attacks
from defenses import defenses
from fl.method import methods

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet: str) -> None:
    quick = re.sub(r'"iterations": \d+', '"iterations": 20', snippet)
    with torch.random.fork_rng():  # user code may draw from the global generator
        names: dict[str, object] = {}
        exec(compile(quick, "README.md", "exec"), names)
    shown = names.get("message") or names["images"]
    assert isinstance(shown, str | torch.Tensor)
    assert "dB" in shown if isinstance(shown, str) else shown.shape == (1, 1, 28, 28)


def test_snippets_are_short() -> None:
    assert len(SNIPPETS) == 2
    for snippet in SNIPPETS:
        lines = [line for line in snippet.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(lines) < 10


def test_every_registered_name_is_in_the_readme() -> None:
    for registry in (methods, attacks.attacks, defenses):
        for name in registry.names():
            if name not in {"chain", "none"}:
                assert f"`{name}`" in README, f"{registry.kind} {name} is not in the README"


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
