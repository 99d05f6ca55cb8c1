"""What a benchmark of collectives times, and what it compares with."""

import pytest

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST
from stretto.comm.algorithms.table import parse_word
from stretto.errors import ConfigError
from stretto.measure.collectives import COLLECTIVES, Trial
from stretto.measure.wanted import Wanted
from stretto.sim.presets import preset
from stretto.study.collectives import Request, bound_s, candidates, request_of, words_for

MESH = Mesh((2, 2))
WORLD = World(0, MESH)
LAB = World(0, MESH, link_bits_per_s=80_000_000)


def asked(**wanted) -> Request:
    return request_of(Wanted(**wanted), None, 3)


def test_a_request_has_a_trial_for_each_size():
    request = asked(sizes="1KB, 2MB", wire="bf16", algorithms="ring/4, hybrid,")
    assert request.trials == (
        Trial("allreduce", 1000, "bf16"),
        Trial("allreduce", 2_000_000, "bf16"),
    )
    assert request.words == ("ring/4", "hybrid")
    assert request.runs == 3
    assert request.cluster is None


def test_a_clusters_description_is_read(tmp_path):
    preset("box 400mbit").write(tmp_path / "box.toml")
    request = request_of(Wanted(), tmp_path / "box.toml", 3)
    assert request.cluster == preset("box 400mbit")
    with pytest.raises(ConfigError, match="no cluster description"):
        request_of(Wanted(), tmp_path / "other.toml", 3)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"sizes": "1KB,"}, ["a size such as"]),
        ({"sizes": "big"}, ["a size such as", "big"]),
        ({"algorithms": "rign"}, ["no algorithm 'rign'", "ring"]),
        ({"algorithms": "ring/0"}, ["parts are a number"]),
        ({"collective": "gather"}, ["no collective 'gather'", "all-gather"]),
        ({"collective": "broadcast", "algorithms": "ring"}, ["no algorithm 'ring'"]),
        ({"collective": "broadcast", "algorithms": "hybrid"}, ["hybrid", "binomial"]),
        ({"wire": "fp9"}, ["no wire 'fp9'", "fp8"]),
        ({"wire": "topk 1%"}, ["'topk 1%' is no collective", "bench step"]),
        ({"wire": "fp8", "algorithms": "ring,native"}, ["--wire fp8", "take native out"]),
        ({"device": "tpu"}, ["no device 'tpu'", "cpu (Gloo), cuda (NCCL)"]),
    ],
)
def test_a_mistake_is_named_before_ranks_meet(wanted, words):
    with pytest.raises(ConfigError) as wrong:
        asked(**wanted)
    assert all(word in str(wrong.value) for word in words)


def test_without_a_gpu_one_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        asked(device="cuda")


def meant(request: Request, trial: Trial, world: World = WORLD) -> dict[str, str]:
    return words_for(trial, request, world, world.mesh)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_is_every_algorithm_of_the_collective_in_one_part_and_at_its_best(collective):
    trial = Trial(collective, 16_000_000)
    words = meant(Request((trial,), ("all",)), trial)
    names = {parse_word(word, COLLECTIVES[collective].keys())[0] for word in words}
    assert names == set(COLLECTIVES[collective])
    assert names <= set(words)
    assert all(name == word for name, word in words.items())


def test_all_leaves_out_what_the_wire_forbids():
    trial = Trial("allreduce", 1000, "fp8")
    assert set(meant(Request((trial,), ("all",)), trial)) == set(ALLREDUCE) - {"native"}


@pytest.mark.parametrize(("wire", "native"), [("own", True), ("bf16", True), ("fp8", False)])
def test_left_open_the_likely_ones_are_timed_and_the_back_ends_own_where_it_can_be(wire, native):
    trial = Trial("allreduce", 1000, wire)
    words = list(meant(Request((trial,)), trial))
    assert 2 <= len(words) <= 6
    assert ("native" in words) == native


def test_a_collective_that_the_back_end_has_no_schedule_of_is_timed_without_it():
    assert set(candidates(Trial("broadcast", 1000), preset("box 400mbit"))) == set(BROADCAST)
    assert set(candidates(Trial("all-gather", 1000), preset("box 400mbit"))) <= set(ALL_GATHER)


def test_hybrid_stands_for_what_the_table_has_at_the_size():
    table = {MESH.shape: "doubling, hierarchical/8 from 1MB"}
    cluster = preset("box 400mbit").model_copy(update={"tables": table})
    request = Request((), ("hybrid", "ring"), cluster)
    assert meant(request, Trial("allreduce", 1000)) == {"hybrid": "doubling", "ring": "ring"}
    assert meant(request, Trial("allreduce", 4_000_000))["hybrid"] == "hierarchical/8"


def test_hybrid_is_nothing_that_the_wire_forbids():
    cluster = preset("box 400mbit").model_copy(update={"tables": {MESH.shape: "native"}})
    request = Request((), ("hybrid",), cluster)
    assert meant(request, Trial("allreduce", 1000))["hybrid"] == "native"
    assert meant(request, Trial("allreduce", 1000, "fp8"))["hybrid"] != "native"


@pytest.mark.parametrize(
    ("trial", "seconds"),
    [
        (Trial("allreduce", 10_000_000), 1.0),
        (Trial("allreduce", 10_000_000, "bf16"), 0.5),
        # A byte an element and a byte for each 256 of them.
        (Trial("allreduce", 10_240_000, "fp8"), 0.257),
        (Trial("broadcast", 10_000_000), 1.0),
        (Trial("reduce-scatter", 10_000_000), 0.5),
        (Trial("all-gather", 10_000_000), 0.5),
    ],
)
def test_the_bound_is_what_a_hosts_link_must_carry_over_its_rate(trial, seconds):
    assert bound_s(trial, LAB, MESH) == pytest.approx(seconds)


def test_there_is_no_bound_where_no_rate_is_known_or_no_link_is_used():
    trial = Trial("allreduce", 1000)
    assert bound_s(trial, WORLD, MESH) is None
    assert bound_s(trial, LAB, Mesh((4,))) is None


def test_hosts_of_unequal_size_go_without_what_cannot_be_made_for_them():
    uneven = preset("box 400mbit").with_mesh(Mesh((2, 1)))
    assert candidates(Trial("reduce-scatter", 1000), uneven, every=True) == ["halving", "ring"]
