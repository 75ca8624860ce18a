"""Images that an attacker has before it attacks: those that it is to reconstruct may not be among them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from attacks.base import Attack

CHUNK = 1024
"""Images of the attacker's that are compared together."""


def check_no_overlap(attack: Attack, label: str, watched: Iterable[Tensor]) -> None:
    """Say so where the attacker would train on what it is scored on, to 8 bits.

    Args:
        attack: which.
        label: its name in a run.
        watched: images (N, C, H, W) in [0, 1] that it is to reconstruct, batch by batch.

    Raises:
        ValueError: how many of the watched images the attack has beforehand, and what to do about it.
    """
    images = attack.auxiliary_images()
    if images is None:
        return
    sought = [mark for batch in watched for mark in _image_hashes(batch)]
    wanted, held = set(sought), set[bytes]()
    for some in images.inputs.split(CHUNK):
        held |= wanted.intersection(_image_hashes(some))
    if found := sum(mark in held for mark in sought):
        raise ValueError(
            f"attack {label!r}: expected images that are not attacked, got {found} of the {len(sought)} watched ones "
            "among those it has beforehand; name another data set or its other part (auxiliary, part), or have other "
            "images watched"
        )


def _image_hashes(images: Tensor) -> list[bytes]:
    """Return every image (N, C, H, W) in steps of 8 bits."""
    levels = (images.detach() * 255).round().int().cpu().numpy()
    return [bytes(str(image.shape), "ascii") + image.tobytes() for image in levels]
