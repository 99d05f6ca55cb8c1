import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import cross_entropy

from stretto.data.order import samples_at
from stretto.data.shapes import FIGURES, Shapes, ShapesConfig
from stretto.models import CNNConfig, build_model, per_sample_accuracy, per_sample_loss


@pytest.fixture(scope="module")
def both_splits():
    config = ShapesConfig()
    train, test = Shapes(config, train=True), Shapes(config, train=False)
    return train.batch(np.arange(config.samples)), test.batch(np.arange(config.test_samples))


@pytest.fixture
def one_thread():
    """Use one thread: on a busy machine several threads that synchronise take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_linear_model_trained_to_convergence_fails(both_splits):
    (inputs, targets), (test_inputs, test_targets) = both_splits
    model = torch.nn.Linear(inputs[0].numel(), 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = cross_entropy(model(inputs.flatten(1)), targets)
        # A weak ridge penalty: without it the 3072 weights of a class fit the noise.
        value = value + 0.01 * model.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    assert per_sample_accuracy(model(inputs.flatten(1)), targets).mean() > 0.4  # training converged
    assert per_sample_accuracy(model(test_inputs.flatten(1)), test_targets).mean() < 0.35


@pytest.mark.usefixtures("one_thread")
def test_a_small_convolutional_net_learns_in_two_epochs(both_splits):
    (inputs, targets), (test_inputs, test_targets) = both_splits
    model = build_model(CNNConfig(), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        order = samples_at(np.arange(4096), num_samples=4096, seed=0, epoch=epoch)
        for batch in torch.from_numpy(order).split(32):
            optimizer.zero_grad()
            per_sample_loss(model(inputs[batch]), targets[batch]).mean().backward()
            optimizer.step()
    with torch.no_grad():
        assert per_sample_accuracy(model(test_inputs), test_targets).mean() > 0.85


def test_an_image_has_the_same_bits_in_every_batch():
    source = Shapes(ShapesConfig(size=13), train=True)
    indices = np.array([5, 3, 4000, 3, 17, 900, 250, 12])
    images, labels = source.batch(indices)
    single = [source.batch(indices[i : i + 1]) for i in range(len(indices))]
    assert torch.equal(images, torch.cat([image for image, _ in single]))
    assert torch.equal(labels, torch.cat([label for _, label in single]))


def test_an_image_has_the_same_bits_on_both_sides_of_a_block():
    source = Shapes(ShapesConfig(size=64), train=True)  # 8 images of 64 x 64 to a block
    images, _ = source.batch(np.arange(40))
    assert torch.equal(images[7:29], source.batch(np.arange(7, 29))[0])


def test_the_images_never_change_from_one_version_to_the_next():
    images, labels = Shapes(ShapesConfig(size=8), train=True).batch(np.array([0, 1, 2, 4095]))
    assert labels.tolist() == [3, 6, 0, 1]
    assert images[:, 0, 4, 4].tolist() == pytest.approx(
        [-0.495083, 0.302212, 1.351855, 0.817861], abs=1e-6
    )


@pytest.mark.parametrize("size", [8, 9, 32, 47, 200])
def test_images_of_any_size_are_channels_first_in_float32(size):
    images, labels = Shapes(ShapesConfig(size=size), train=True).batch(np.arange(3))
    assert (images.shape, images.dtype) == ((3, 3, size, size), torch.float32)
    assert (labels.shape, labels.dtype) == ((3,), torch.int64)


def test_no_indices_give_tensors_of_length_zero():
    images, labels = Shapes(ShapesConfig(), train=True).batch(np.arange(0))
    assert (images.shape, labels.shape) == ((0, 3, 32, 32), (0,))


def test_images_are_roughly_zero_mean(both_splits):
    (inputs, _), _ = both_splits
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.03


def test_every_class_occurs_about_equally_often(both_splits):
    (_, targets), _ = both_splits
    counts = targets.bincount(minlength=8)
    assert (counts - 512).abs().max() < 100  # 4.7 standard deviations


def test_fewer_classes_use_the_first_figures_only():
    _, labels = Shapes(ShapesConfig(classes=3), train=True).batch(np.arange(500))
    assert labels.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shapes(ShapesConfig(), train=True), Shapes(ShapesConfig(), train=False)),
        (Shapes(ShapesConfig(), train=True), Shapes(ShapesConfig(seed=1), train=True)),
    ],
    ids=["split", "seed"],
)
def test_splits_and_seeds_share_no_image(one, other):
    ours, theirs = one.batch(np.arange(300))[0], other.batch(np.arange(300))[0]
    assert torch.cdist(ours.flatten(1), theirs.flatten(1)).min() > 1


def test_noise_has_the_configured_deviation():
    clean = Shapes(ShapesConfig(noise=0.0), train=True).batch(np.arange(50))[0]
    noisy = Shapes(ShapesConfig(noise=0.25), train=True).batch(np.arange(50))[0]
    difference = noisy - clean
    assert difference.std().item() == pytest.approx(0.25, rel=0.01)
    assert abs(difference.mean().item()) < 0.003


def test_each_split_has_its_configured_number_of_samples():
    config = ShapesConfig(samples=70, test_samples=30)
    assert [Shapes(config, train=t).num_samples for t in (True, False)] == [70, 30]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_fits_in_the_unit_disc(name):
    x, y = np.meshgrid(*[np.linspace(-2, 2, 161, dtype=np.float32)] * 2)
    inside = FIGURES[name](x, y) < 0
    assert inside.any()
    assert np.hypot(x[inside], y[inside]).max() <= 1.01


def test_no_two_figures_look_the_same():
    x, y = np.meshgrid(*[np.linspace(-1, 1, 64, dtype=np.float32)] * 2)
    figures = [figure(x, y) < 0 for figure in FIGURES.values()]
    differing = [
        np.mean(one != other) for i, one in enumerate(figures) for other in figures[i + 1 :]
    ]
    assert min(differing) > 0.03


@pytest.mark.parametrize("wrong", [{"size": 7}, {"classes": 9}, {"classes": 1}, {"samples": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ShapesConfig(**wrong)
