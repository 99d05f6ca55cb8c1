"""Batch statistics and data fingerprints in a checkpoint, and how a resumed run uses them."""

from dataclasses import replace

import pytest
import torch

from stretto.checkpoint import load_newest, save_checkpoint
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import CheckpointError
from stretto.run import RunConfig, assemble, prepare
from stretto.train.loop import train
from stretto.train.state import resume_state
from tests.unit.data.images.pictures import jpeg

SHAPES = ["data.samples=36", "data.test_samples=6", "data.size=8", "model.width=4"]
NORM = [*SHAPES, "model.norm=batch", "train.batch=12"]
TEXT = ["data.kind=text", "data.context=8", "model.kind=gpt", "model.context=8", "model.blocks=1"]
TEXT += ["model.width=8", "model.heads=1", "train.batch=4"]
IMAGES = ["data.kind=images", "data.size=8", "data.cache=none", "data.decoders=1"]
IMAGES += ["model.width=4", "model.classes=2", "train.batch=2"]


def on_rank(transport, folder, *settings, resume=False, steps=3):
    """Train as one rank, or restore without a step; return the parts."""
    loaded = load(RunConfig, None, [f"run.folder={folder}", f"train.steps={steps}", *settings])
    world = World(transport.rank, Mesh((transport.size,)))
    parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
    if resume:
        resume_state(parts, log=pytest.fail)
    else:
        train(parts)
    parts.strategy.close()
    return parts


def trained(size, folder, *settings):
    return run_threads(size, lambda c: on_rank(c, folder, *settings))


def resumed(size, folder, *settings):
    return run_threads(size, lambda c: on_rank(c, folder, *settings, resume=True))


def newest(folder):
    return load_newest(folder / "run" / "checkpoints", log=pytest.fail)


def statistics(parts):
    return {n: b for n, b in parts.model.named_buffers() if b.is_floating_point()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_the_mean_of_the_ranks_batch_statistics(tmp_path):
    ranks = [statistics(parts) for parts in trained(3, tmp_path, *NORM)]
    stored = newest(tmp_path).tensors_under("model")
    assert ranks[0]
    for name in ranks[0]:
        mean = torch.stack([of_rank[name].double() for of_rank in ranks]).mean(0)
        torch.testing.assert_close(stored[name].double(), mean, rtol=1e-6, atol=1e-9)


def test_a_checkpoint_also_holds_each_ranks_own_statistics(tmp_path):
    ranks = trained(3, tmp_path, *NORM)
    state = newest(tmp_path)
    for rank, parts in enumerate(ranks):
        assert same(state.tensors_under(f"rank-{rank}/buffers"), statistics(parts))


def test_as_many_ranks_restore_their_own_statistics(tmp_path):
    before = trained(3, tmp_path, *NORM)
    after = resumed(3, tmp_path, *NORM)
    assert not same(statistics(before[0]), statistics(before[1]))
    for one, other in zip(before, after, strict=True):
        assert same(statistics(one), statistics(other))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_another_number_of_ranks_restores_the_mean(size, tmp_path):
    trained(3, tmp_path, *NORM)
    stored = newest(tmp_path).tensors_under("model")
    for parts in resumed(size, tmp_path, *NORM):
        assert all(torch.equal(value, stored[n]) for n, value in statistics(parts).items())


@pytest.mark.parametrize(("size", "norm"), [(1, "batch"), (3, "group")])
def test_nothing_is_stored_per_rank_if_ranks_do_not_differ(size, norm, tmp_path):
    trained(size, tmp_path, *NORM, f"model.norm={norm}")
    assert {name.partition("/")[0] for name in newest(tmp_path).tensors} == {"model", "optimizer"}


def test_a_checkpoint_without_per_rank_statistics_can_be_resumed(tmp_path):
    trained(2, tmp_path, *NORM)
    state = newest(tmp_path)
    early = {n: t for n, t in state.tensors.items() if not n.startswith("rank-")}
    save_checkpoint(tmp_path / "run" / "checkpoints", replace(state, tensors=early), generation=0)
    for parts in resumed(2, tmp_path, *NORM):
        assert same(statistics(parts), {n: early[f"model/{n}"] for n in statistics(parts)})


def text_run(folder):
    path = folder / "text"
    path.write_bytes(bytes(range(32, 126)) * 4)
    settings = [*TEXT, f"data.path={path}"]
    trained(1, folder, *settings)
    return path, settings


def test_a_changed_text_is_refused_with_advice(tmp_path):
    path, settings = text_run(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"A", b"B", 1))
    with pytest.raises(CheckpointError, match=r"training data has changed .*put the files back"):
        resumed(1, tmp_path, *settings)


def test_a_moved_text_is_accepted(tmp_path):
    path, settings = text_run(tmp_path)
    moved = path.rename(tmp_path / "moved")
    (parts,) = resumed(1, tmp_path, *settings, f"data.path={moved}")
    assert same(parts.model.state_dict(), newest(tmp_path).tensors_under("model"))


def test_a_setting_that_changes_the_data_is_named_instead_of_the_data(tmp_path):
    _, settings = text_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"data\.held_out = 0\.1"):
        resumed(1, tmp_path, *settings, "data.held_out=0.3")


def test_a_checkpoint_without_data_fingerprints_can_be_resumed(tmp_path):
    path, settings = text_run(tmp_path)
    state = newest(tmp_path)
    facts = {name: fact for name, fact in state.facts.items() if name != "data"}
    save_checkpoint(tmp_path / "run" / "checkpoints", replace(state, facts=facts), generation=0)
    path.write_bytes(path.read_bytes()[::-1])
    (parts,) = resumed(1, tmp_path, *settings)
    assert same(parts.model.state_dict(), state.tensors_under("model"))


@pytest.mark.parametrize(("split", "what"), [("train", "training"), ("test", "test")])
def test_an_added_image_is_refused_with_the_name_of_its_split(split, what, tmp_path):
    folder = tmp_path / "images"
    for number, label_folder in enumerate(["train/a", "train/b", "test/a", "test/b"]):
        (folder / label_folder).mkdir(parents=True)
        (folder / label_folder / "1.jpg").write_bytes(jpeg(number))
    settings = [*IMAGES, f"data.path={folder}"]
    trained(1, tmp_path, *settings)
    (folder / split / "b" / "2.jpg").write_bytes(jpeg(9))
    with pytest.raises(CheckpointError, match=f"the {what} data has changed"):
        resumed(1, tmp_path, *settings)
