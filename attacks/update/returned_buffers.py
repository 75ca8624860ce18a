"""What a client's buffers come to, such as the running statistics of batch normalization, after a step on images."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.network.layer_chain import load_sent_weights
from fl.view import ServerView


def predict_buffers(view: ServerView, images: Tensor, raised_by: float = 0.0) -> dict[str, Tensor]:
    """Return the client's floating-point buffers after one step on images, where they came back.

    Args:
        view: in which buffers came back, and nothing that the network's outputs hang on is private.
        images: (B, C, H, W), all of the step; in the precision in which the network is run.
        raised_by: what is added to all these buffers before the step.

    Returns:
        By name.
    """
    sent = view.buffers_after or {}
    model = load_sent_weights(view.client.task.to(device=images.device, dtype=images.dtype).model, view)
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point() and n in sent}
    with torch.no_grad():
        for buffer in buffers.values():
            buffer += raised_by
        model(images)
    return buffers
