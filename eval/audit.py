"""One attack in a few lines: what it recovered of the images it was after."""

from __future__ import annotations

from statistics import fmean

from attacks.base import NotApplicable, Result
from eval.score import score
from fl.simulate import Truth

MARGIN = 1.0
"""How far above every guess, in dB, an image has to come before it counts as leaked."""


def leakage(result: Result, truth: Truth, *, seed: int = 0) -> str:
    """What leaked, as text: one line per image, with the score of the best guess beside the attack's, and a verdict.

    A guess (see `eval.floors`) knows nothing of the update; images leaked if one of them comes `MARGIN` above the best.

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
    floors = [key for key in rows[0] if key.startswith("floor_") and key.endswith("_psnr")]
    lines, gains = [], []
    for row in rows:
        label = {True: ", label recovered", False: ", label missed", None: ""}[row["label_correct"]]
        exact = ", exact to 8 bits" if row["exact8"] else ""
        floor = max(row[key] for key in floors)
        gains.append(row["psnr"] - floor)
        lines.append(f"image {row['image']}: PSNR {row['psnr']:.1f} dB (best guess {floor:.1f} dB){label}{exact}")
    best = max(gains)
    names = ", ".join(key.removeprefix("floor_").removesuffix("_psnr") for key in floors)
    if best >= MARGIN:
        verdict = "image content leaked"
    else:
        verdict = "not told apart from a guess" if best > -MARGIN else "no image content shown to leak"
    above = sum(gain >= MARGIN for gain in gains)
    return "\n".join(
        [
            *lines,
            f"{verdict}: {best:+.1f} dB at best and {fmean(gains):+.1f} dB on average against the best guess without the "
            f"update ({names}); {above} of {len(rows)} image(s) at least {MARGIN:g} dB above it",
        ]
    )
