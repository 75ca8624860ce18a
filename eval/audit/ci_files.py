"""The files that an audit leaves for CI: checked before it begins, and written when it is over."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile

from eval.audit.judgment import Judgment
from eval.audit.junit import junit_xml
from eval.audit.sarif import sarif_log
from eval.audit.source_place import SourcePlace
from eval.io import jsonl
from fl.runtime.atomic_files import make_folder, remove_path

SUFFIXES = {"junit": (".xml",), "sarif": (".sarif", ".sarif.json")}
"""What the names of the files end with. No other file of a run or of a user's ends so: nothing else is overwritten."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How an audit was called, and how it ended.

    Attributes:
        version: of hyperleak.
        exit_code: of the command.
        began: when, with a time zone.
    """

    version: str
    exit_code: int
    began: datetime


@dataclass(frozen=True, kw_only=True)
class CIFiles:
    """Where findings go for CI.

    Attributes:
        junit: as JUnit XML; None for nowhere.
        sarif: as SARIF 2.1.0; likewise.
    """

    junit: Path | None = None
    sarif: Path | None = None

    @property
    def asked_for(self) -> dict[str, Path]:
        """The files by the option that asks for them."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: path for name, path in named.items() if path is not None}

    def check(self) -> None:
        """Check that the files can be written, and make their folders.

        Raises:
            ValueError: a name that ends otherwise, one that is no file's or both files', or a folder that can't be
                written; says which option.
        """
        named = self.asked_for
        if len({path.resolve() for path in named.values()}) < len(named):
            options = " and ".join(f"--{name}" for name in named)
            raise ValueError(f"expected {options} as two files, got {next(iter(named.values()))} for both")
        for name, path in named.items():
            if not path.name.endswith(SUFFIXES[name]) or path.name in SUFFIXES[name]:
                kinds = " or ".join(SUFFIXES[name])
                raise ValueError(f"expected --{name} as a file whose name ends with {kinds}, got {path}")
            if path.exists() and not path.is_file():
                raise ValueError(f"expected --{name} as a file, got the folder or device {path}")
            try:
                make_folder(path.parent)
                with TemporaryFile(dir=path.parent):
                    pass
            except OSError as error:
                raise ValueError(
                    f"expected --{name} as a file that can be written, got {path}: {error.strerror}"
                ) from error

    def remove_old(self) -> None:
        """Take away what an earlier audit left there, so that nobody takes it for this one's."""
        for path in self.asked_for.values():
            remove_path(path)

    def write(self, judgment: Judgment, place: SourcePlace, called: Invocation) -> None:
        """Write the files.

        Args:
            judgment: what the audit came to.
            place: where the code of what is audited stands.
            called: how the audit was called.

        Raises:
            OSError: one can't be written.
        """
        if self.junit is not None:
            jsonl.write_text(self.junit, junit_xml(judgment, version=called.version, at=called.began))
        if self.sarif is not None:
            told = sarif_log(judgment, place, version=called.version, exit_code=called.exit_code)
            jsonl.write_text(self.sarif, json.dumps(told, indent=2, allow_nan=False) + "\n")
