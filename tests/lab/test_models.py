"""The networks: sizes, seeds, settings; models by import path; a model as one vector."""

import pytest
import torch
from torch import nn

from fedlaw import models
from fedlaw.models import assign, check_trainable, count_parameters, create, flatten, layout, unflatten


@pytest.mark.parametrize(
    ("name", "shape", "settings", "size"),
    [
        ("mlp", (1, 28, 28), {}, 109_386),
        ("mlp", (1, 8, 8), {"hidden": [32]}, 64 * 32 + 32 + 32 * 10 + 10),
        ("cnn", (3, 32, 32), {"channels": (32, 64), "hidden": (128,)}, 545_290),
        ("cnn", (3, 32, 32), {}, 114_186),
        ("cnn", (3, 32, 32), {"channels": [64, 128], "hidden": [128]}, 1_126_026),
        ("cnn", (1, 28, 28), {}, None),
        ("cnn", (1, 8, 8), {"channels": [8], "groups": 1}, None),
        ("logistic", (30,), {}, 310),
    ],
)
def test_networks_have_the_sizes_that_were_measured(name, shape, settings, size):
    model = create(name, shape, 10, seed=0, **settings)
    assert model(torch.zeros(3, *shape)).shape == (3, 10)
    assert size is None or count_parameters(model) == size
    check_trainable(model)
    plain = (nn.Flatten, nn.Linear, nn.ReLU, nn.Conv2d, nn.GroupNorm, nn.MaxPool2d)
    assert isinstance(model, nn.Sequential)
    assert all(isinstance(layer, plain) for layer in model)


def test_there_is_one_line_on_every_model():
    assert models.registry.names() == ("cnn", "logistic", "mlp")
    assert all(models.registry.summaries().values())


@pytest.mark.parametrize("name", ["mlp", "cnn", "logistic"])
def test_the_seed_alone_decides_the_parameters(name):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = flatten(create(name, (3, 32, 32), 10, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(flatten(create(name, (3, 32, 32), 10, seed=5)), first)
    assert not torch.equal(flatten(create(name, (3, 32, 32), 10, seed=6)), first)


def test_initialisation_is_pytorch_s_own():
    ours = create("mlp", (1, 28, 28), 10, seed=3)
    torch.manual_seed(3)
    theirs = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    assert torch.equal(flatten(ours), flatten(theirs))


@pytest.mark.parametrize(
    ("name", "shape", "settings", "says"),
    [
        ("mpl", (4,), {}, "did you mean 'mlp'"),
        ("mlp", (4,), {"width": 3}, "no setting 'width'"),
        ("mlp", (4,), {"hidden": [0]}, "hidden must be a list of integers"),
        ("mlp", (4,), {"hidden": 64}, "hidden must be a list of integers"),
        ("mlp", (4,), {"hidden": [True]}, "hidden"),
        ("mlp", (), {}, "input_shape"),
        ("mlp", (4,), {"seed": -1}, "seed"),
        ("cnn", (64,), {}, "needs images"),
        ("cnn", (1, 4, 4), {}, "halve images of 4x4 3 times"),
        ("cnn", (3, 32, 32), {"channels": []}, "at least one convolution"),
        ("cnn", (3, 32, 32), {"channels": [20]}, "groups must divide"),
        ("cnn", (3, 32, 32), {"groups": 0}, "groups must divide"),
    ],
)
def test_settings_that_make_no_model_are_refused(name, shape, settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        create(name, shape, 10, **{"seed": 0, **settings})
    assert "\n" not in str(caught.value)


OWN = """
import torch
from torch import nn
ready = 3
def net(input_shape, classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.Tanh(), nn.Linear(width, classes))
class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
    def forward(self, x):
        return self.layer(x)
def batch_norm(classes):
    return nn.Sequential(nn.Linear(6, classes), nn.BatchNorm1d(classes))
def narrow():
    return nn.Linear(6, 2)
def fails():
    return nn.Linear(7, 3)
def number():
    return 7
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "broken_models.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_models_by_import_path(own):
    model = create("own_models:net", (6,), 3, seed=0, width=5)
    assert model(torch.zeros(2, 6)).shape == (2, 3)
    assert count_parameters(model) == 6 * 5 + 5 + 5 * 3 + 3
    assert torch.equal(flatten(model), flatten(create("own_models:net", (6,), 3, seed=0, width=5)))
    fixed = create("own_models:Fixed", (6,), 3, seed=0)  # a factory that asks for neither shape nor classes
    assert fixed.training
    assert create("torch.nn:Linear", (6,), 3, seed=0, in_features=6, out_features=3).bias.shape == (3,)


@pytest.mark.parametrize(
    ("path", "settings", "says"),
    [
        ("own_models:net", {"depth": 3}, "no setting 'depth'; it takes: input_shape, classes, width"),
        ("own_models:batch_norm", {}, "buffer '1.num_batches_tracked'"),
        ("own_models:narrow", {}, r"outputs \(N, 3\), one per class; for N = 2 it gave \(2, 2\)"),
        ("own_models:fails", {}, r"fails on inputs \(2, 6\)"),
        ("own_models:number", {}, "gave a int"),
        ("own_models:ready", {}, "something to call"),
        ("own_models:absent", {}, "has no 'absent'"),
        ("absent_models:net", {}, "no module 'absent_models'"),
        ("own_models:", {}, "not an import path"),
        ("os.path:join; x", {}, "not an import path"),
    ],
)
def test_models_of_the_wrong_form_are_refused(own, path, settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        create(path, (6,), 3, seed=0, **settings)
    assert "\n" not in str(caught.value)


def test_an_error_inside_the_user_s_module_is_shown_as_it_is(own):
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        create("broken_models:net", (6,), 3, seed=0)


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("running", torch.arange(2.0))

    def forward(self, x):
        return self.linear(x) * self.scale + self.running


def test_the_vector_holds_parameters_then_buffers_and_comes_back():
    model = WithBuffer()
    vector = flatten(model)
    slots = layout(model)
    assert [slot.name for slot in slots] == ["scale", "linear.weight", "linear.bias", "running"]
    assert slots[-1].stop == len(vector) == count_parameters(model) == 1 + 6 + 2 + 2
    assert not vector.requires_grad
    kept = vector.clone()
    vector += 1  # a copy: the model does not follow
    assert torch.equal(flatten(model), kept)
    other = WithBuffer()
    assign(other, kept)
    x = torch.randn(4, 3)
    assert torch.equal(other(x), model(x))
    assert torch.equal(torch.func.functional_call(WithBuffer(), unflatten(kept, slots), (x,)), model(x))


def test_unflatten_gives_views_with_leading_dimensions():
    slots = layout(create("cnn", (1, 8, 8), 10, seed=0, channels=[8]))
    size = slots[-1].stop
    vectors = torch.randn(2, 5, size)
    views = unflatten(vectors, slots)
    assert all(view.shape == (2, 5, *slot.shape) for view, slot in zip(views.values(), slots, strict=True))
    assert torch.equal(torch.cat([view.flatten(2) for view in views.values()], -1), vectors)
    views[slots[0].name].zero_()
    assert (vectors[..., : slots[0].stop] == 0).all()
    strided = torch.randn(size, 5).T  # as a column of updates would be
    assert torch.equal(unflatten(strided, slots)[slots[0].name].flatten(1), strided[:, : slots[0].stop])


def test_a_tensor_shared_by_two_layers_is_there_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert count_parameters(model) == 9 + 3 + 3


def test_state_that_cannot_be_averaged_is_refused():
    counted = nn.Linear(2, 2)
    counted.register_buffer("steps", torch.tensor(0))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for model, says in ((counted, "'steps' is torch.int64"), (mixed, "one dtype"), (frozen, "no parameter")):
        with pytest.raises(ValueError, match=says):
            check_trainable(model)
    with pytest.raises(ValueError, match="6 elements"):
        unflatten(torch.zeros(5), layout(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"\(d,\)"):
        assign(nn.Linear(2, 2), torch.zeros(3, 6))
