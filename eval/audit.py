"""One update on its own: what an attack recovered of its images, and whether its view of the training is right."""

from __future__ import annotations

from statistics import fmean

import torch

from attacks.base import NotApplicable, Result
from eval.score import relative_error, score
from fl.client import Client, gather, local_update, predict
from fl.defense import overrides
from fl.method import Download
from fl.seeds import stream
from fl.simulate import ClientState, Truth
from fl.tensors import Tensors
from fl.types import ServerView, Trace

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
            f"{verdict}: {best:+.1f} dB at best and {fmean(gains):+.1f} dB on average against the best guess "
            f"without the update ({names}); {above} of {len(rows)} image(s) at least {MARGIN:g} dB above it",
        ]
    )


def forward_error(view: ServerView, truth: Truth, client: Client, state: ClientState, download: Download) -> float:
    """How far the attacker's own model of training is from what was observed, given the truth.

    No one can predict noise, so where the defence draws any, both are taken without it: training is run once more on
    the client's side, and the defence itself says what is expected of it.
    """
    noise = stream(0, "probe")
    untouched = noise.get_state()
    with torch.no_grad():
        predicted, observed = predict(view, truth.candidate()), view.update
        client.defense.transform_update(observed, noise)
        drawn = not torch.equal(noise.get_state(), untouched)
        if drawn or overrides(client.defense, "gradient"):
            observed = client.defense.surrogate(_noiseless(truth.trace, client, state, download, view.round), observed)
    return relative_error(predicted, {name: observed[name] for name in predicted})


def _noiseless(trace: Trace, client: Client, state: ClientState, download: Download, number: int) -> Tensors:
    """What the client would have sent in round `number` without its defence's noise."""
    return local_update(
        client,
        download.shared,
        state.private,
        gather(trace.inputs, trace.labels, trace.order),
        buffers={**client.task.buffers, **download.buffers, **state.buffers},
        received=download.received,
        memory=state.memory,
        draws=trace.draws,
        round=number,
        track=True,
    ).sent()
