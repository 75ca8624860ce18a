"""What an attack recovered of one update, in words."""

from __future__ import annotations

from attacks.base import NotApplicable, Result
from eval.audit.verdict import image_line, verdict
from eval.metrics.score import score
from eval.metrics.self_verification import add_self_check_columns, verification_words
from fl.types import Truth


def leakage(result: Result, truth: Truth, *, seed: int = 0) -> str:
    """Return what leaked as text: a line per image with the best guess's score beside the attack's, and a verdict.

    A guess (see `eval.metrics.baselines`) knows nothing of the update. Where there is no image, the verdict names what
    else was recovered. "Confirmed" is what the attack showed without the truth. `eval.audit.verdict` says when images
    count as leaked.

    Args:
        result: of an attack.
        truth: what the client fed, from `fl.capture.from_batch`.
        seed: of the baseline `noise`.

    Raises:
        ValueError: the reconstruction does not have the images' shape.
    """
    if isinstance(result, NotApplicable):
        return f"not applicable: {result.reason}"
    rows = add_self_check_columns(result, score(result, truth, seed=seed))
    said = verdict(rows)
    if result.inputs is None:
        return "; ".join(words for words in (said, verification_words(result.verified)) if words)
    return "\n".join([*(image_line(row, row["image"]) for row in rows), said])
