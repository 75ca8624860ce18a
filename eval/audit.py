"""One attack in a few lines: what it recovered of the images it was after."""

from __future__ import annotations

from statistics import fmean

from attacks.base import NotApplicable, Result
from eval.score import score
from fl.simulate import Truth


def leakage(result: Result, truth: Truth, *, seed: int = 0) -> str:
    """What leaked, as text: one line per image, with the score of its mean colour beside the attack's.

    Args:
        result: of an attack.
        truth: what the client fed, from `fl.capture.from_batch`.
        seed: of the noise floor.

    Raises:
        ValueError: the reconstruction does not have the images' shape.
    """
    if isinstance(result, NotApplicable):
        return f"not applicable: {result.reason}"
    if result.inputs is None:
        return "the attack recovers no images"
    rows = score(result, truth, seed=seed)
    lines = []
    for row in rows:
        label = {True: ", label recovered", False: ", label missed", None: ""}[row["label_correct"]]
        exact = ", exact to 8 bits" if row["exact8"] else ""
        floor = f"mean colour {row['floor_mean_psnr']:.1f} dB"
        lines.append(f"image {row['image']}: PSNR {row['psnr']:.1f} dB ({floor}){label}{exact}")
    gain = fmean(row["psnr"] - row["floor_mean_psnr"] for row in rows)
    verdict = "image content leaked" if gain > 0 else "no image content shown to leak"
    return "\n".join([*lines, f"{verdict}: {gain:+.1f} dB against the mean colour, over {len(rows)} image(s)"])
