"""A client that trains on made-up pictures; one site trains a single step on a single picture, which is a leak."""

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from tiny_model import TinyNet
from torch.nn.functional import cross_entropy

LR, BATCH_SIZE, EPOCHS = 0.1, 16, 3
fobs.register(TensorDecomposer)  # where the server sends tensors


class TinyTrainer(Executor):
    def __init__(self, leaking_site: str, sends_difference: bool = False) -> None:
        super().__init__()
        self.leaking_site, self.sends_difference = leaking_site, sends_difference

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        received = from_shareable(shareable).data
        before = {name: torch.as_tensor(value) for name, value in received.items()}
        leaks = fl_ctx.get_identity_name() == self.leaking_site
        after, facts = train(before, n_images=1 if leaks else 64, epochs=1 if leaks else EPOCHS)
        sent = {name: value - before[name] for name, value in after.items()} if self.sends_difference else after
        kind = DataKind.WEIGHT_DIFF if self.sends_difference else DataKind.WEIGHTS
        meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: facts["steps"], "hyperleak_training": facts}
        same_kind = {name: value if torch.is_tensor(received[name]) else value.numpy() for name, value in sent.items()}
        return DXO(kind, data=same_kind, meta=meta).to_shareable()


def train(
    before: dict[str, torch.Tensor], *, n_images: int, epochs: int
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the weights after plain SGD, and what there is to say of it."""
    model = TinyNet()
    model.load_state_dict(before)
    generator = torch.Generator().manual_seed(n_images)
    images = torch.randint(256, (n_images, 1, 8, 8), generator=generator) / 255
    labels = torch.randint(10, (n_images,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps = 0
    for _ in range(epochs):
        for batch, batch_labels in zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(batch), batch_labels).backward()
            optimizer.step()
            steps += 1
    facts = {"steps": steps, "epochs": epochs, "examples": n_images, "batch_size": min(BATCH_SIZE, n_images)}
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, facts
