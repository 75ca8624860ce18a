"""The peers' code: where it is looked for, how to get it, and how a script of theirs is run from Python."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HYPERLEAK_PEERS"
SITE = "site"
"""The folder in it that packages are installed into."""


class PeerMissingError(Exception):
    """A peer's code is not there; the message says how to get it."""


@dataclass(frozen=True)
class Source:
    """A peer's code.

    Attributes:
        name: of the peer.
        folder: it lies in, under the folder that `HYPERLEAK_PEERS` names.
        get: the commands that bring it there.
        file: that holds the attack, in its folder.
        sha256: of this file in the version the figures are of.
    """

    name: str
    folder: str
    get: str
    file: str
    sha256: str

    def find(self) -> Path:
        """Its folder.

        Raises:
            PeerMissingError: the variable is not set, or the attack is not where it should be.
        """
        root = os.environ.get(VARIABLE)
        if not root:
            raise PeerMissingError(f"set {VARIABLE} to a folder; in it: {self.get}")
        folder = Path(root) / self.folder
        if not (folder / self.file).is_file():
            raise PeerMissingError(f"no {self.folder}/{self.file} in {VARIABLE}; in that folder: {self.get}")
        return folder

    def version(self) -> str:
        """Return whether what is there is the version the figures are of."""
        digest = hashlib.sha256((self.find() / self.file).read_bytes()).hexdigest()
        return "as named" if digest == self.sha256 else f"another one (sha256 of {self.file}: {digest})"


def _cloned(name: str, repository: str, commit: str, file: str, sha256: str, needs: str = "") -> Source:
    folder = repository.rsplit("/", 1)[1]
    get = f"`git clone https://github.com/{repository} && git -C {folder} checkout {commit}`"
    return Source(name, folder, f"{get}, then `{needs}`" if needs else get, file, sha256)


IG = _cloned(
    "invertinggradients",
    "JonasGeiping/invertinggradients",
    "1157b61c6704df42c497ab9eb074c75da5204334",
    "inversefed/reconstruction_algorithms.py",
    "dc6002945c46c3fcc5045969f5cb326393cf8522bc9bbb5d459863a3620a6f8b",
)
IDLG = _cloned(
    "iDLG",
    "PatrickZH/Improved-Deep-Leakage-from-Gradients",
    "975bce8b41c4611cbda44fddd50778d88bd1de9c",
    "iDLG.py",
    "41a57c3f1fc0ea86c29b31fb977d48df09d5787fbef0608389db073f6263ddd6",
)
ROG = _cloned(
    "ROG",
    "KAI-YUE/rog",
    "e6efc048dd02e01af45c3a4dd355053807dfa4e5",
    "src/attack/attacker.py",
    "b8c741fe44059ff1fc7a193d971ddf08982815094cea4ffa68c88c56aaf4ba9e",
)
PFLLIB = _cloned(
    "PFLlib",
    "TsingZ0/PFLlib",
    "d832e76f6a23b833038949ec1e4fdefe63a4d350",
    "system/flcore/clients/clientavg.py",
    "9c06e53b3dd5713cfa0475a17a109cc4a7bf792fcb11832d4a82d5068f8bd98d",
    f"pip install --no-deps --target {SITE} scikit-learn==1.9.1 joblib==1.6.0 threadpoolctl==3.8.0 "
    "cloudpickle==3.1.2 narwhals==2.29.0",
)
PFL_RESEARCH = _cloned(
    "pfl-research",
    "apple/pfl-research",
    "c9d1f32f6e84fec984f448e2bc19a3e3fd5a4807",
    "pfl/model/pytorch.py",
    "05b6cc369424f75f6d8329a00cf0107c6b7926c4bd88f3dc0a90baf9545958f5",
    f"pip install --no-deps --target {SITE} multiprocess==0.70.19 dill==0.4.1 dp-accounting==0.5.0 "
    "prv-accountant==0.2.0 attrs absl-py",
)
HYPERFL = _cloned(
    "the HyperFL authors' code",
    "Pengxin-Guo/HyperFL",
    "a62bd1035a74f4229edbf1848e21d77b11ff3f35",
    "cnn/methods/dp_fedavg.py",
    "f93f968b46f47e461c28fbfd27fa099215f3783b7a338f94f9378674dac0c1ea",
)
BREACHING = Source(
    "breaching",
    SITE,
    f"`pip install --no-deps --target {SITE} breaching==0.1.2 hydra-core==1.3.2 omegaconf==2.3.0 "
    f"antlr4-python3-runtime==4.9.3 six==1.17.0` (invertinggradients needs six, too)",
    "breaching/attacks/optimization_based_attack.py",
    "c2cde16319f38d8bb388797764892987f338e7a90e928aa98a7021c3a0cc9e69",
)


def importable(folder: Path, inside: str = "") -> None:
    """Let packages in `folder`/`inside`, and those installed beside it, be imported; those installed here go first."""
    for path in (str(folder / inside), str(folder.parent / SITE)):
        if path not in sys.path:
            sys.path.append(path)


def execute(path: Path, given: Mapping[str, object], constants: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Run a script of a peer's as a module of its own, with some of its names replaced.

    For code that can't be imported: its settings stand in the middle of a function, or it imports what an attack does
    not need. The file itself stays as it is.

    Args:
        path: of the script.
        given: values by name, instead of what the script imports under these names.
        constants: values by name, instead of those that the script assigns to these names or loops over with them,
            anywhere in it.

    Returns:
        The module's names.

    Raises:
        ValueError: a constant is nowhere assigned, so the script is not what it was taken for.
    """
    setting = _Settings(given, constants or {})
    tree = ast.fix_missing_locations(setting.visit(ast.parse(path.read_text(encoding="utf-8"), str(path))))
    if missing := set(constants or {}) - setting.seen:
        raise ValueError(f"expected {path.name} to assign {', '.join(sorted(missing))}, and it does not")
    names: dict[str, Any] = {"__name__": f"peer_{path.stem}", **given}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


def chapter(lines: Sequence[str], command: str) -> list[str]:
    """Return the end of a page: how to get what is not ours, and the command that runs it."""
    return [
        "## The peers' code",
        "",
        f"It is not part of this repository. Make a folder, let `{VARIABLE}` name it, and in it:",
        "",
        *[f"- {line}" for line in lines],
        "",
        f"Then {command}. What is missing is left out, and said to be.",
    ]


class _Settings(ast.NodeTransformer):
    """Takes out imports of given names and all prints, and replaces constants."""

    def __init__(self, given: Mapping[str, object], constants: Mapping[str, object]) -> None:
        self.given, self.constants = given, constants
        self.seen: set[str] = set()

    def _imported(self, node: ast.Import | ast.ImportFrom) -> ast.stmt:
        kept = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) not in self.given]
        node.names = kept
        return node if kept else ast.Pass()

    visit_Import = visit_ImportFrom = _imported  # noqa: N815 - the names ast asks for

    def _value(self, target: ast.expr, value: ast.expr) -> ast.expr:
        if not isinstance(target, ast.Name) or target.id not in self.constants:
            return value
        self.seen.add(target.id)
        return ast.parse(repr(self.constants[target.id]), mode="eval").body

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        node.value = self._value(node.targets[0], node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.stmt:
        node.iter = self._value(node.target, node.iter)
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value
        printed = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
        return ast.Pass() if printed else node
