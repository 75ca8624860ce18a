"""Operations replayed as one CUDA graph: launched together, where launching each would take longer than doing it.

An iteration on a small network is some six hundred operations of a few microseconds each on a GPU, and Python takes
longer to start one. A graph is captured once for tensors at fixed addresses: what is given is copied there, and what is
found is copied away, since the next replay writes over it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.gradient_matching.engine.problem import Evaluation

WARMUP_RUNS = 3
"""Calls before a capture, in which libraries choose and set up what they use."""


class CapturedGraph:
    """`evaluate` at variables of the shapes of `variables`, as one CUDA graph.

    Args:
        evaluate: objectives (T,) and gradients by variable; no operation that waits for the device, none that draws.
        variables: by name, on one CUDA device.

    Raises:
        RuntimeError: if it can't be captured.
    """

    def __init__(self, evaluate: Evaluation, variables: dict[str, Tensor]) -> None:
        self.evaluate = evaluate  # the graph reads its constants by address: they must not be freed
        self.given = {name: value.detach().clone() for name, value in variables.items()}
        device = next(iter(self.given.values())).device
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARMUP_RUNS):
                    evaluate(self.given)
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.values, self.grads = evaluate(self.given)

    def __call__(self, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objectives (T,) and gradients by variable at `given`."""
        for name, value in given.items():
            self.given[name].copy_(value.detach())
        self.graph.replay()
        return self.values.clone(), {name: value.clone() for name, value in self.grads.items()}
