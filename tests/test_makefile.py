"""`make cpu` takes PyTorch's own index where that can be reached, and does without where not."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[1]
UNREACHED = "http://127.0.0.1:9/whl/cpu"
"""Nothing listens at the port "discard"."""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class Index(BaseHTTPRequestHandler):
    """Answers every question with an empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Serve an index for as long as the block runs; gives its address."""
    server = HTTPServer(("127.0.0.1", 0), Index)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
    finally:
        server.shutdown()
        server.server_close()


def make_cpu(folder: Path, index: str) -> list[str]:
    """Return the lines of `make cpu`, with a Python that says what pip is asked for in place of asking it."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\nshift\necho "$@"\n')
    python.chmod(0o755)
    command = ["make", "-s", "-C", str(ROOT), "cpu", f"BIN={folder}", f"TORCH_CPU={index}"]
    environment = {"PATH": "/usr/bin:/bin", "no_proxy": "*", "index": "--from-the-environment"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_index_of_small_builds_is_asked_where_it_answers(tmp_path):
    with served() as index:
        (line,) = make_cpu(tmp_path, index)
    assert line == f"pip install torch torchvision -c constraints.txt --extra-index-url {index}"


def test_without_that_index_the_usual_build_is_installed(tmp_path):
    said, line = make_cpu(tmp_path, UNREACHED)
    assert said.startswith(f"{UNREACHED} is out of reach from here")
    assert line == "pip install torch torchvision -c constraints.txt"
