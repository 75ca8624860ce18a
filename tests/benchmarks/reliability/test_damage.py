"""A small sample of the experiments on killed runs and damaged files (`benchmarks/reliability`)."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reliability import damage

ROOT = Path(__file__).parents[3]


def test_damaged_files_are_named_and_never_silent_where_the_format_can_tell(tmp_path):
    kinds = {kind.name: kind for kind in damage.make(tmp_path)}
    draw = random.Random(7)
    for kind in kinds.values():
        for _ in range(6):
            path = draw.choice(sorted(kind.paths))
            data = bytearray(path.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            found = damage.outcome(kind, path, bytes(data), kind.read(path))
            assert found in ({"named", "same"} if kind.tells else {"named", "same", "silent"}), (kind.name, path)


def test_figures_count_what_formats_can_tell(tmp_path):
    found = damage.measure(26, 3, tmp_path)
    assert sum(sum(own.values()) for own in found.values()) == 26
    silent, faults, _ = damage.figures(found, {name: "update .s" not in name for name in found})
    assert faults.met
    assert silent.tried == 24


@pytest.mark.slow
def test_a_killed_run_leaves_the_files_of_a_calm_one(tmp_path):
    code = (
        "import sys; from pathlib import Path; from benchmarks.reliability import kills\n"
        "found = kills.measure(4, 1, 1, Path(sys.argv[1]))\n"
        "sys.exit(str(found['differ']) if found['differ'] else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
