"""What an attack recovered of one update, in words."""

from __future__ import annotations

from attacks.base import NotApplicable, Result
from eval.audit.verdict import image_line, verdict
from eval.metrics.baselines import mean_images
from eval.metrics.matching import first_equal
from eval.metrics.score import score
from eval.metrics.self_verification import add_self_check_columns, verification_words
from eval.metrics.validity_flags import COPY_OF
from fl.types import Batch, Truth


def leakage(result: Result, truth: Truth, *, seed: int = 0, public: Batch | None = None) -> str:
    """Return what leaked as text: a line per image with the best guess's score beside the attack's, and a verdict.

    A guess (see `eval.metrics.baselines`) knows nothing of the update. Where there is no image, the verdict names what
    else was recovered. "Confirmed" is what the attack showed without the truth. `eval.audit.verdict` says when images
    count as leaked. Images that are equal count once.

    Args:
        result: of an attack.
        truth: what the client fed, from `fl.capture.from_batch`.
        seed: of the baseline `noise`.
        public: images that the attack had (`attack.auxiliary_images()`), whose mean is one more guess.

    Raises:
        ValueError: the reconstruction does not have the images' shape.
    """
    if isinstance(result, NotApplicable):
        return f"not applicable: {result.reason}"
    rows = add_self_check_columns(result, score(result, truth, seed=seed, public=mean_images(public)))
    firsts = first_equal(truth.inputs)
    rows = [row if (first := firsts[row["image"]]) == row["image"] else {**row, COPY_OF: first} for row in rows]
    said = verdict(rows)
    if result.inputs is None:
        return "; ".join(words for words in (said, verification_words(result.verified)) if words)
    return "\n".join([*(image_line(row, row["image"]) for row in rows), said])
