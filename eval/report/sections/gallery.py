"""Which images are shown, by rule, and as what files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from eval.metrics.image import PSNR_CAP
from eval.metrics.score import Row
from eval.metrics.self_verification import verification_words
from eval.report.blocks import GalleryBlock, ImagePair
from eval.report.formatting import format_number
from eval.report.load import Pixels, Run
from eval.report.result_groups import IMAGE, ResultGroup, has_failed

MIN_SIDE = 112
"""Pixels that small images are enlarged to, at least; whole pixels only, so that nothing is smoothed away."""
MAX_UNJUDGED = 6
"""Reconstructions that are shown of an attack where no true image says which are the best."""
_TOLERANCE = 0.05


def build_gallery(run: Run, group: ResultGroup, name: str, title: str) -> GalleryBlock:
    """Return the best, the median and the worst image of an attack.

    Args:
        run: the run.
        group: the attack's results.
        name: of the files, without ending.
        title: above the images.

    Raises:
        ValueError: there are no pictures, or they are not those that the rows are about; says which.
    """
    if any(row.get("image") is not None for row in group.unjudged_rows):
        return _unjudged_gallery(run, group, name, title)
    if not group.image_rows:
        raise ValueError("the attack recovered no pictures")
    cases = []
    for rule, row in choose_cases(group):
        seed = row["seed"]
        order = [other for other in group.image_rows if other["seed"] == seed]
        originals, found = run.load_pictures(group, seed)
        if originals is None or len(originals) != len(order):
            raise ValueError(f"there are {len(found)} pictures for {len(order)} rows of seed {seed}")
        index = next(i for i, other in enumerate(order) if other is row)
        cases.append(_case(rule, row, originals[index], found[index]))
    return GalleryBlock(name, title, cases)


def _unjudged_gallery(run: Run, group: ResultGroup, name: str, title: str) -> GalleryBlock:
    """Return the first reconstructions of an attack, where nobody knows the true images."""
    rows = [row for row in group.unjudged_rows if row.get("image") is not None]
    _, found = run.load_pictures(group, rows[0]["seed"])
    if len(found) != len(rows):
        raise ValueError(f"there are {len(found)} pictures for {len(rows)} rows")
    shown = zip(rows[:MAX_UNJUDGED], found, strict=False)
    return GalleryBlock(name, title, [_unjudged_case(number, *pair) for number, pair in enumerate(shown, 1)])


def _unjudged_case(number: int, row: Row, found: Pixels) -> ImagePair:
    _check_channels(found)
    said = verification_words(row.get("verified"), row.get("fixed")) or "the attack can't tell how close it came"
    scale, size = _enlarged(found)
    return ImagePair(str(number), said, None, encode_png(found, scale), f"image {row.get(IMAGE)}", size)


def choose_cases(group: ResultGroup) -> list[tuple[str, Row]]:
    """Return best, median (the lower of two) and worst image by PSNR over all images and seeds, or fewer."""
    ordered = sorted(group.image_rows, key=lambda row: (row["psnr"], str(row.get(IMAGE)), row["seed"]))
    rules = {"best": len(ordered) - 1, "median": (len(ordered) - 1) // 2, "worst": 0}
    if len(ordered) < 3:
        rules = {"best": len(ordered) - 1, "worst": 0} if len(ordered) == 2 else {"only": 0}
    return [(rule, ordered[index]) for rule, index in rules.items()]


def _case(rule: str, row: Row, original: Pixels, found: Pixels) -> ImagePair:
    _check_channels(original)
    if not has_failed(row) and abs(_psnr(original, found) - row["psnr"]) > _TOLERANCE:
        raise ValueError(f"picture {row.get(IMAGE)} is not the one its row is about: its PSNR differs")
    scale, size = _enlarged(original)
    words = f"{format_number(row['psnr'])} dB" + (" (failed: no picture)" if has_failed(row) else "")
    about = f"client {row.get('client', '?')}, image {row.get(IMAGE)}, seed {row['seed']}"
    return ImagePair(rule, words, encode_png(original, scale), encode_png(found, scale), about, size)


def _check_channels(image: Pixels) -> None:
    if image.shape[0] not in (1, 3):
        raise ValueError(f"images of {image.shape[0]} channels can't be shown")


def _enlarged(image: Pixels) -> tuple[int, tuple[int, int]]:
    """Return by how much an image is enlarged, and its width and height then."""
    height, width = image.shape[1:]
    scale = max(1, -(-MIN_SIDE // max(height, width)))
    return scale, (width * scale, height * scale)


def encode_png(image: Pixels, scale: int = 1) -> bytes:
    """Return a PNG file of one image (C, H, W) in [0, 1], every pixel `scale` by `scale` large."""
    pixels = (np.nan_to_num(image).clip(0, 1) * 255).round().astype(np.uint8).repeat(scale, 1).repeat(scale, 2)
    plain: Any = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(plain).save(file, "PNG", optimize=True)
    return file.getvalue()


def _psnr(original: Pixels, found: Pixels) -> float:
    difference = original.astype(np.float64).clip(0, 1) - found.astype(np.float64).clip(0, 1)
    return float(min(PSNR_CAP, -10 * np.log10(max(np.square(difference).mean(), 1e-300))))
