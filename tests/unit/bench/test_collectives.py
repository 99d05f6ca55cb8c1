"""The requests of a benchmark of collectives, and the algorithms that they time."""

import pytest

from stretto.bench import CollectiveRequest
from stretto.bench.collectives import (
    COLLECTIVES,
    CollectiveBenchRequest,
    CollectiveTrial,
    algorithms_to_time,
    collective_bound_s,
    likely_algorithms,
    parse_request,
)
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import parse_algorithm
from stretto.collectives.algorithms import ALL_GATHER, ALLREDUCE, BROADCAST
from stretto.errors import ConfigError
from stretto.simulator.cluster import preset

MESH = Mesh((2, 2))
WORLD = World(0, MESH)
LAB = World(0, MESH, link_bits_per_s=80_000_000)


def parsed(**options) -> CollectiveBenchRequest:
    return parse_request(CollectiveRequest(**options), None, 3)


def test_a_request_has_a_trial_for_each_size():
    request = parsed(sizes="1KB, 2MB", wire="bf16", algorithms="ring/4, hybrid,")
    assert request.trials == (
        CollectiveTrial("allreduce", 1000, "bf16"),
        CollectiveTrial("allreduce", 2_000_000, "bf16"),
    )
    assert request.labels == ("ring/4", "hybrid")
    assert request.runs == 3
    assert request.cluster is None


def test_a_request_reads_the_cluster_description(tmp_path):
    preset("box 400mbit").write(tmp_path / "box.toml")
    request = parse_request(CollectiveRequest(), tmp_path / "box.toml", 3)
    assert request.cluster == preset("box 400mbit")
    with pytest.raises(ConfigError, match="no cluster description"):
        parse_request(CollectiveRequest(), tmp_path / "other.toml", 3)


@pytest.mark.parametrize(
    ("options", "parts"),
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
def test_a_mistake_is_reported_before_ranks_connect(options, parts):
    with pytest.raises(ConfigError) as raised:
        parsed(**options)
    assert all(part in str(raised.value) for part in parts)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        parsed(device="cuda")


def timed(
    request: CollectiveBenchRequest, trial: CollectiveTrial, world: World = WORLD
) -> dict[str, str]:
    return algorithms_to_time(trial, request, world, world.mesh)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_times_every_algorithm_in_one_part_and_in_its_best_number_of_parts(collective):
    trial = CollectiveTrial(collective, 16_000_000)
    labels = timed(CollectiveBenchRequest((trial,), ("all",)), trial)
    names = {parse_algorithm(word, COLLECTIVES[collective].keys())[0] for word in labels}
    assert names == set(COLLECTIVES[collective])
    assert names <= set(labels)
    assert all(name == word for name, word in labels.items())


def test_all_leaves_out_algorithms_that_do_not_support_the_wire_format():
    trial = CollectiveTrial("allreduce", 1000, "fp8")
    assert set(timed(CollectiveBenchRequest((trial,), ("all",)), trial)) == set(ALLREDUCE) - {
        "native"
    }


@pytest.mark.parametrize(("wire", "native"), [("own", True), ("bf16", True), ("fp8", False)])
def test_by_default_the_likely_algorithms_are_timed_and_native_if_it_is_supported(wire, native):
    trial = CollectiveTrial("allreduce", 1000, wire)
    labels = list(timed(CollectiveBenchRequest((trial,)), trial))
    assert 2 <= len(labels) <= 6
    assert ("native" in labels) == native


def test_collectives_without_a_native_schedule_are_timed_without_it():
    assert set(likely_algorithms(CollectiveTrial("broadcast", 1000), preset("box 400mbit"))) == set(
        BROADCAST
    )
    assert set(
        likely_algorithms(CollectiveTrial("all-gather", 1000), preset("box 400mbit"))
    ) <= set(ALL_GATHER)


def test_hybrid_is_the_choice_of_the_table_at_each_size():
    table = {MESH.shape: "doubling, hierarchical/8 from 1MB"}
    cluster = preset("box 400mbit").model_copy(update={"tables": table})
    request = CollectiveBenchRequest((), ("hybrid", "ring"), cluster)
    assert timed(request, CollectiveTrial("allreduce", 1000)) == {
        "hybrid": "doubling",
        "ring": "ring",
    }
    assert timed(request, CollectiveTrial("allreduce", 4_000_000))["hybrid"] == "hierarchical/8"


def test_hybrid_supports_the_wire_format():
    cluster = preset("box 400mbit").model_copy(update={"tables": {MESH.shape: "native"}})
    request = CollectiveBenchRequest((), ("hybrid",), cluster)
    assert timed(request, CollectiveTrial("allreduce", 1000))["hybrid"] == "native"
    assert timed(request, CollectiveTrial("allreduce", 1000, "fp8"))["hybrid"] != "native"


@pytest.mark.parametrize(
    ("trial", "seconds"),
    [
        (CollectiveTrial("allreduce", 10_000_000), 1.0),
        (CollectiveTrial("allreduce", 10_000_000, "bf16"), 0.5),
        # One byte per element, and one byte for each 256 elements.
        (CollectiveTrial("allreduce", 10_240_000, "fp8"), 0.257),
        (CollectiveTrial("broadcast", 10_000_000), 1.0),
        (CollectiveTrial("reduce-scatter", 10_000_000), 0.5),
        (CollectiveTrial("all-gather", 10_000_000), 0.5),
    ],
)
def test_the_bound_is_the_bytes_of_a_hosts_link_over_its_rate(trial, seconds):
    assert collective_bound_s(trial, LAB, MESH) == pytest.approx(seconds)


def test_there_is_no_bound_without_a_rate_or_without_a_link():
    trial = CollectiveTrial("allreduce", 1000)
    assert collective_bound_s(trial, WORLD, MESH) is None
    assert collective_bound_s(trial, LAB, Mesh((4,))) is None


def test_algorithms_that_need_equal_hosts_are_left_out_for_unequal_ones():
    uneven = preset("box 400mbit").with_mesh(Mesh((2, 1)))
    assert likely_algorithms(CollectiveTrial("reduce-scatter", 1000), uneven, include_all=True) == [
        "halving",
        "ring",
    ]
