"""How close reconstructions come to a client's own pictures, where a defense changed these before they were fed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eval.metrics.baselines import baseline_images
from eval.metrics.image import psnr, psnr_of_mse
from eval.metrics.matching import pairwise_mse
from eval.metrics.score import Row

OWN_PSNR = "psnr_own"
"""Column of the PSNR of a reconstruction against that of the client's own pictures which is closest to it."""


def add_own_pictures(
    rows: Sequence[Row],
    found: Tensor,
    own: Tensor,
    *,
    seed: int,
    reference: Tensor | None = None,
    public: Tensor | None = None,
) -> list[Row]:
    """Return the rows with `psnr_own`, and as `floor_<guess>_psnr_own` what each guess of that own picture has.

    Args:
        rows: one for each picture that was fed, from `eval.metrics.score.score`.
        found: reconstructions (N, C, H, W).
        own: the client's own pictures (M, C, H, W).
        seed: of the baseline `noise`.
        reference: images that the attacker had before, for the baseline `nearest`.
        public: means of the attack's public images, for the baseline `public`.
    """
    usable = found.isfinite().flatten(1).all(1).tolist()
    closest = pairwise_mse(found.detach().to(own).nan_to_num(), own).min(1)
    figures, places = psnr_of_mse(closest.values).tolist(), closest.indices.tolist()
    guesses = baseline_images(own, reference=reference, public=public, seed=seed)
    floors = {f"floor_{name}_{OWN_PSNR}": psnr(images, own).tolist() for name, images in guesses.items()}
    scored = []
    for row in rows:
        match = row["matched"]
        if match is None or not usable[match]:
            scored.append(row)
            continue
        guessed = {name: column[places[match]] for name, column in floors.items()}
        scored.append({**row, OWN_PSNR: figures[match], **guessed})
    return scored
