"""LPIPS: published values with real weights, an independent forward pass, and no value without weights."""

import hashlib
import io
import logging
import os
import shutil
from pathlib import Path
from threading import Event
from urllib.error import URLError

import lpips
import numpy as np
import pytest
import torch
import torchvision
from torch.nn.functional import interpolate

from eval.metrics import perceptual
from eval.metrics.perceptual import CHECKPOINTS, ENVIRONMENT, OFFLINE, Lpips, Unavailable, load_lpips

SLICES = {"squeeze": (2, 5, 8, 10, 11, 12, 13), "alex": (2, 5, 8, 10, 12), "vgg": (4, 9, 16, 23, 30)}
BUILDERS = {"squeeze": torchvision.models.squeezenet1_1, "alex": torchvision.models.alexnet}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """A torchvision cache with nothing in it, whatever this machine has."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HYPERLEAK_DATA", str(tmp_path / "data"))
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return tmp_path / "home" / "hub" / "checkpoints"


@pytest.fixture(scope="module")
def weights():
    """The real SqueezeNet, where there is one."""
    file = Path(os.environ.get("HYPERLEAK_DATA", ""), "weights", "squeezenet1_1_imagenet_fp16.npz")
    if not os.environ.get("HYPERLEAK_DATA") or not file.is_file():
        pytest.skip("set HYPERLEAK_DATA to the folder that holds weights/squeezenet1_1_imagenet_fp16.npz")
    return file


@pytest.fixture(scope="module")
def squeeze(weights):
    return load_lpips(file=weights)


def pictures(count=4, channels=3, size=64, seed=0):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


def random_state(net, seed=0):
    """A backbone of random weights under torchvision's names, with the classifier a checkpoint has."""
    with torch.random.fork_rng(devices=[]):
        features = BUILDERS[net](weights=None).features
    generator = torch.Generator().manual_seed(seed)
    state = {f"features.{k}": 0.1 * torch.randn(v.shape, generator=generator) for k, v in features.state_dict().items()}
    return {**state, "classifier.1.weight": torch.zeros(3, 3)}


def known_checkpoint(path, monkeypatch, net="squeeze", state=None):
    """Save a random backbone and make its hash the known one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state or random_state(net), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(CHECKPOINTS, net, f"{net}-{digest[:8]}.pth")
    return path.rename(path.with_name(f"{net}-{digest[:8]}.pth"))


def by_hand(net, state, a, b):
    """LPIPS from the paper's equation (1): unit-normalized features, squared difference, linear heads, mean."""
    features = BUILDERS[net](weights=None).features.eval()
    features.load_state_dict({k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")})
    file = Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"
    heads = torch.load(file, map_location="cpu", weights_only=True)
    shift, scale = (torch.tensor(v)[:, None, None] for v in ((-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)))
    x, y = ((2 * z - 1 - shift) / scale for z in (a, b))
    total, start = torch.zeros(len(a)), 0
    with torch.no_grad():
        for i, stop in enumerate(SLICES[net]):
            x, y = features[start:stop](x), features[start:stop](y)
            start = stop
            unit = [z / (z.square().sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y)]
            difference = (unit[0] - unit[1]).square()
            total += (difference * heads[f"lin{i}.model.1.weight"]).sum(1).mean((1, 2))
    return total.double()


def test_the_published_example_is_reproduced(squeeze):
    """The example in torchmetrics' documentation, 0.1008 for SqueezeNet, up to 16-bit weights."""
    generator = torch.Generator().manual_seed(123)
    a, b = torch.rand(10, 3, 100, 100, generator=generator), torch.rand(10, 3, 100, 100, generator=generator)
    assert squeeze(a, b).mean().item() == pytest.approx(0.10079, abs=2e-5)


def test_real_weights_give_zero_for_equal_pictures_and_grow_with_noise(squeeze):
    a = pictures()
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(1))
    assert squeeze(a, a).abs().max() == 0
    distances = [squeeze((a * 0 + 0.5 + s * noise).clamp(0, 1), a * 0 + 0.5).mean().item() for s in (0.02, 0.1, 0.3)]
    assert 0 < distances[0] < distances[1] < distances[2]


def test_real_weights_agree_with_a_forward_pass_by_hand(squeeze, weights):
    with np.load(weights, allow_pickle=False) as arrays:
        state = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
    a, b = pictures(seed=1), pictures(seed=2)
    torch.testing.assert_close(squeeze(a, b), by_hand("squeeze", state, a, b), atol=1e-6, rtol=1e-5)


def test_the_file_may_come_from_the_environment_and_names_its_net(weights, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, str(weights))
    assert load_lpips().net == "squeeze"
    with pytest.raises(ValueError, match="one for 'squeeze'"):
        load_lpips("alex")


@pytest.mark.parametrize("net", ["squeeze", "alex"])
def test_a_checkpoint_in_the_cache_is_used_whole(net, empty_cache, monkeypatch):
    state = random_state(net)
    known_checkpoint(empty_cache / "x.pth", monkeypatch, net, state)
    measure = load_lpips(net)
    assert isinstance(measure, Lpips)
    a, b = pictures(seed=1), pictures(seed=2)
    torch.testing.assert_close(measure(a, b), by_hand(net, state, a, b), atol=1e-6, rtol=1e-5)
    assert not any(p.requires_grad for p in measure.model.parameters())


@pytest.fixture
def measure(empty_cache, monkeypatch):
    """LPIPS on a random SqueezeNet: good for everything but its values."""
    known_checkpoint(empty_cache / "x.pth", monkeypatch)
    return load_lpips("squeeze")


def test_gray_is_repeated(measure):
    a, b = pictures(channels=1, seed=1), pictures(channels=1, seed=2)
    assert torch.equal(measure(a, b), measure(a.repeat(1, 3, 1, 1), b.repeat(1, 3, 1, 1)))


def test_small_pictures_are_resized_and_the_name_says_so(measure):
    a, b = pictures(size=28, seed=1), pictures(size=28, seed=2)
    larger = [interpolate(z, size=(64, 64), mode="bilinear", align_corners=False) for z in (a, b)]
    torch.testing.assert_close(measure(a, b), measure(*larger), atol=1e-6, rtol=1e-4)
    assert measure.name(28, 28) == measure.name(31, 100) == "lpips_squeeze@64"
    assert measure.name(32, 32) == "lpips_squeeze"


def test_pictures_are_clamped_and_taken_one_by_one(measure, monkeypatch):
    a, b = pictures(seed=1), pictures(seed=2)
    values = measure(a, b)
    assert values.shape == (4,)
    torch.testing.assert_close(measure(a * 3 - 1, b), measure((a * 3 - 1).clamp(0, 1), b))
    monkeypatch.setattr(perceptual, "_BATCH", 3)
    torch.testing.assert_close(measure(a.flip(0), b.flip(0)).flip(0), values, atol=1e-6, rtol=1e-5)


def test_bad_pictures_are_refused(measure):
    with pytest.raises(ValueError, match="1 or 3 channels"):
        measure(pictures(channels=2), pictures(channels=2))
    with pytest.raises(ValueError, match="undo the normalization"):
        measure(pictures(), pictures() * 255)


def test_loading_leaves_the_global_generator_alone(empty_cache, monkeypatch):
    known_checkpoint(empty_cache / "x.pth", monkeypatch)
    state = torch.get_rng_state()
    load_lpips("squeeze")
    assert torch.equal(torch.get_rng_state(), state)


def test_without_weights_there_is_a_reason_and_no_value(empty_cache):
    measure = load_lpips()
    assert isinstance(measure, Unavailable)
    assert measure.name(28, 28) == "lpips_alex@64"
    assert measure.missing.startswith("LPIPS not available: no alexnet-owt-7be5be79.pth found; put ")
    assert "$TORCH_HOME/hub/checkpoints" in measure.missing
    assert str(empty_cache) not in measure.missing  # results quote this: no path of this machine
    assert ENVIRONMENT in measure.missing
    assert measure(pictures(), pictures()).isnan().all()


def test_a_damaged_checkpoint_in_the_cache_is_not_used(empty_cache):
    empty_cache.mkdir(parents=True)
    torch.save(random_state("squeeze"), empty_cache / CHECKPOINTS["squeeze"])
    measure = load_lpips("squeeze")
    assert isinstance(measure, Unavailable)
    assert "damaged" in measure.reason
    assert "b8a52dc0" in measure.reason


def test_a_single_flipped_bit_is_noticed(empty_cache, monkeypatch):
    path = known_checkpoint(empty_cache / "x.pth", monkeypatch)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert isinstance(load_lpips("squeeze"), Unavailable)
    with pytest.raises(ValueError, match="no known backbone"):
        load_lpips(file=path)


class Answer(io.BytesIO):
    """What a server sends, with what it says of it."""

    def __init__(self, content):
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content))}


@pytest.fixture
def asked(monkeypatch):
    """Addresses that were asked for; the network is down until `asked.content` is set."""

    class Asked(list):
        content: bytes | None = None

        def __call__(self, address, *, timeout):
            assert timeout <= 5
            self.append(address)
            if self.content is None:
                raise URLError("no route")
            return Answer(self.content)

    network = Asked()
    monkeypatch.setattr(perceptual, "urlopen", network)
    monkeypatch.delenv(OFFLINE)
    return network


def test_nothing_is_fetched_unless_it_is_allowed(asked, monkeypatch):
    assert isinstance(load_lpips(), Unavailable)
    monkeypatch.setenv(OFFLINE, "1")
    assert isinstance(load_lpips(allow_download=True), Unavailable)
    assert asked == []


def test_without_a_network_the_reason_is_as_ever_and_nothing_is_asked_twice(asked, caplog):
    caplog.set_level(logging.WARNING, "eval")
    first = load_lpips(allow_download=True)
    assert asked == ["https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"]
    assert first == load_lpips(allow_download=True) == load_lpips()
    assert len(asked) == 1
    (line,) = caplog.messages
    assert "alexnet-owt-7be5be79.pth for LPIPS could not be downloaded" in line
    assert "no route" in line


def test_a_server_that_does_not_answer_is_given_up(asked, monkeypatch):
    monkeypatch.setattr(perceptual, "_SECONDS", 0.05)
    given_up = Event()
    monkeypatch.setattr(perceptual, "urlopen", lambda _address, timeout: given_up.wait())
    assert isinstance(load_lpips(allow_download=True), Unavailable)
    given_up.set()


def test_a_download_is_used_and_a_line_says_so(asked, empty_cache, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "eval")
    source = known_checkpoint(tmp_path / "source.pth", monkeypatch)
    asked.content = source.read_bytes()
    assert isinstance(load_lpips("squeeze", allow_download=True), Lpips)
    assert (empty_cache / source.name).read_bytes() == asked.content
    (line,) = caplog.messages
    assert line.startswith(f"fetching {source.name} for LPIPS from https://download.pytorch.org/models/")
    assert "--offline" in line
    assert isinstance(load_lpips("squeeze"), Lpips)
    assert len(asked) == 1


def test_a_download_of_something_else_is_not_kept(asked, empty_cache, caplog):
    asked.content = b"a page to log in on"
    assert isinstance(load_lpips(allow_download=True), Unavailable)
    assert "another SHA-256" in caplog.text
    assert [*empty_cache.iterdir()] == []


@pytest.fixture
def in_data_folder(weights, tmp_path, monkeypatch):
    """The real SqueezeNet in the data folder."""
    monkeypatch.setattr(perceptual, "DATA_FILES", {"squeeze": weights.name})
    (tmp_path / "data" / "weights").mkdir(parents=True)
    return Path(shutil.copy(weights, tmp_path / "data" / "weights"))


def test_a_backbone_in_the_data_folder_is_taken_unasked_before_any_is_fetched(in_data_folder, asked):
    assert load_lpips(allow_download=True).net == load_lpips("squeeze").net == "squeeze"
    assert asked == []
    assert isinstance(load_lpips("alex"), Unavailable)


def test_one_in_the_cache_goes_before_it(in_data_folder, empty_cache, monkeypatch):
    known_checkpoint(empty_cache / "x.pth", monkeypatch, "alex", random_state("alex"))
    assert load_lpips().net == "alex"


def test_a_damaged_file_in_the_data_folder_is_not_used(in_data_folder):
    in_data_folder.write_bytes(b"none")
    assert load_lpips().reason == f"{in_data_folder.name} is damaged"


def test_the_addresses_are_torchvisions():
    models = {"alex": "AlexNet", "squeeze": "SqueezeNet1_1", "vgg": "VGG16"}
    for net, name in models.items():
        assert getattr(torchvision.models, f"{name}_Weights").IMAGENET1K_V1.url == perceptual._URL + CHECKPOINTS[net]


def test_checkpoints_that_lack_a_layer_are_refused(tmp_path, monkeypatch):
    state = random_state("squeeze")
    del state["features.3.squeeze.bias"]
    path = known_checkpoint(tmp_path / "x.pth", monkeypatch, state=state)
    with pytest.raises(ValueError, match=r"features\.3\.squeeze\.bias"):
        load_lpips(file=path)


def test_named_files_must_exist_and_nets_be_known(tmp_path):
    with pytest.raises(FileNotFoundError, match=ENVIRONMENT):
        load_lpips(file=tmp_path / "none.pth")
    with pytest.raises(ValueError, match="unknown LPIPS net 'alexnet'; did you mean 'alex'"):
        load_lpips("alexnet")
