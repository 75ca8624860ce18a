"""Gradient matching without the classifier: what flows back into the last linear layer is in the update itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attacks.base import NotApplicable, Reconstruction, ViewRewriter, attacks
from attacks.labels.recovery import single_label
from attacks.update.view_below_classifier import LAYER_SIGNAL, view_below_classifier
from fl.view import ServerView


@attacks.register("headless")
@dataclass(frozen=True, kw_only=True)
class Headless(ViewRewriter):
    """Cuts off everything above the extractor's last linear layer; for one step on one image.

    The layer's bias gradient is delta = dL/d(output), exactly what flows back into the layers below, and its weight
    gradient delta z^T gives its input z = gW^T delta / |delta|^2 (in the update's own factor of step size and
    clipping). So the gradient of <delta, output(x)> with respect to every parameter below equals the observed one at
    the true image: classifier, label and loss drop out of the search.

    Threat model: an honest-but-curious server that sees one client's update and knows that it was one step on one
    image; neither classifier, label nor loss need be known, only the layers below.

    Attributes:
        layer: name of the linear layer; None takes the last one with a bias outside the classifier.
    """

    plain: ClassVar[str] = "cuts off the classifier: reads from the update what the last layer below it was given."

    layer: str | None = None

    def rewrite(self, view: ServerView) -> ServerView | NotApplicable:
        """Return the view of the network up to the layer, without labels, and with earlier rounds on the same image."""
        return view_below_classifier(view, self.layer)

    def lift_result(self, view: ServerView, rewritten: ServerView, result: Reconstruction) -> Reconstruction:
        """Return the result, with the layer's input under `features`, and the label if the classifier tells.

        Where what the first layer takes was found, but is no image, that is there.
        """
        private = {"features": rewritten.received[LAYER_SIGNAL]["features"], **result.private}
        known = () if view.labels is None or "labels" in result.knowledge else ("labels",)
        labels, note = single_label(view)
        notes = "; ".join(filter(None, (result.note, note)))
        return replace(result, private=private, labels=labels, note=notes, knowledge=(*result.knowledge, *known))
