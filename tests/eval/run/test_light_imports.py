"""A run is put together without what takes longer to import than torch itself, or is for some runs alone."""

import subprocess
import sys

SCRIPT = """
import sys
import eval.run.execute
from fl.models import models
from eval.report.charts import style
from eval.report.charts.render import render_svg
from eval.report.charts.specs import Heatmap
import eval.report.writer
assert "resnet50" in models.names()
loaded = sys.modules.keys() & {"torchvision", "scipy.stats", "matplotlib"}
assert not loaded, loaded
render_svg(Heatmap([[1.0]], 0.0, 1.0), style.NARROW)
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""


def test_matplotlib_is_loaded_to_draw_only_and_pyplot_scipy_stats_and_torchvision_never():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
