"""Naming an image among others of its class, from pixels and from gradients."""

import torch
from support import worlds

from defenses.noise import Noise
from eval.metrics import identification
from fl.client import Client
from fl.federation import ClientData, Federation
from fl.methods.fedavg import FedAvg
from fl.types import Batch


def test_distractors_are_of_the_class_and_never_the_image() -> None:
    images = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 3
    known = Batch(torch.cat([images, images[:1] + 1e-4]), torch.cat([labels, labels[:1]]))
    found = identification.draw_distractors(known, 0, images[0])
    assert len(found) == 9  # ten of the class, one of them the image, and its copy with noise below 8 bits
    assert not any(torch.equal(image, images[0]) for image in found)
    assert {tuple(image.flatten().tolist()) for image in found} <= {tuple(i.flatten().tolist()) for i in images[0::3]}
    assert len(identification.draw_distractors(known, 0, images[0], count=4)) == 4
    assert len(identification.draw_distractors(known, 7, images[0])) == 0


def test_the_closest_image_is_named_and_a_tie_is_none() -> None:
    truth, others = torch.zeros(1, 4, 4), torch.ones(3, 1, 4, 4)
    assert identification.is_closest_in_pixels(torch.full((1, 4, 4), 0.49), truth, others)
    assert not identification.is_closest_in_pixels(torch.full((1, 4, 4), 0.5), truth, others)
    assert not identification.is_closest_in_pixels(torch.full((1, 4, 4), 0.51), truth, others)
    assert not identification.is_closest_in_pixels(torch.full((1, 4, 4), torch.nan), truth, others)


def test_gradients_name_the_image_until_noise_drowns_them() -> None:
    data = worlds.images(12, "candidates")
    data = Batch(data.inputs, torch.zeros_like(data.labels))
    hits = {}
    for std in (0.0, 1e-3, 1e3):
        hits[std] = 0
        for i in range(12):
            image = data.take(torch.tensor([i]))
            client = Client(worlds.task(), FedAvg(lr=0.1, steps=1), Noise(std=std))
            view, _ = Federation(client, [ClientData(image, image)], seed=i).observe(0)
            others = data.inputs[[j for j in range(12) if j != i]]
            hits[std] += identification.is_closest_in_update(view, 0, image.inputs[0], others)
    assert hits[0.0] == hits[1e-3] == 12
    assert hits[1e3] < 6
