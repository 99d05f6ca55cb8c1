import ipaddress
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import ConfigError, LabError
from stretto.lab.namespaces import (
    claim_if_dead,
    claim_new_id,
    locked_ids,
    remove_lock,
    require_tools,
)
from stretto.lab.run_in_lab import cores_of, rank_environment, threads_per_rank
from stretto.lab.spec import HEAD, LabNames, LabSpec, address, build_commands, host_of, lab_id_of

NAMES = LabNames("a1b2c3")


@st.composite
def specs(draw):
    hosts = draw(st.integers(1, 16))
    return LabSpec(
        hosts=hosts,
        ranks_per_host=draw(st.integers(1, 64 // hosts)),
        bits_per_s=draw(st.none() | st.integers(1000, 10**11)),
        loss=draw(st.just(0.0) | st.floats(1e-6, 0.5)),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": 0}, "1 to 16 hosts, got 0"),
        ({"hosts": 17}, "1 to 16 hosts, got 17"),
        ({"hosts": 2, "ranks_per_host": 0}, "at least 1 rank per host"),
        ({"hosts": 13, "ranks_per_host": 5}, "13 hosts x 5 ranks"),
        ({"hosts": 2, "bits_per_s": 400}, "at least 1000 bit/s, got 400"),
        ({"hosts": 2, "loss": 1.0}, "below 1, got 1.0"),
        ({"hosts": 2, "loss": -0.1}, "below 1, got -0.1"),
    ],
)
def test_the_error_for_an_impossible_lab_names_the_request(wrong, said):
    with pytest.raises(ConfigError, match=said):
        LabSpec(**wrong)


@given(specs())
def test_every_interface_name_fits_the_kernel_s_fifteen_characters(spec):
    names = [NAMES.bridge, NAMES.link, *(NAMES.port(node) for node in spec.nodes)]
    assert all(len(name) <= 15 and NAMES.lab_id in name for name in names)


@given(specs())
def test_interface_names_in_the_switch_are_unique(spec):
    in_switch = [NAMES.bridge, *(NAMES.port(node) for node in spec.nodes)]
    assert len(set(in_switch)) == len(in_switch)


@given(specs())
def test_addresses_are_distinct_and_from_the_benchmark_range(spec):
    given_out = {ipaddress.ip_address(address(node)) for node in spec.nodes}
    assert len(given_out) == spec.hosts + 1
    assert all(one in ipaddress.ip_network("198.18.0.0/15") for one in given_out)


@given(specs())
def test_every_created_namespace_is_recognised_as_this_lab_s(spec):
    made = [command[3] for command in build_commands(spec, "a1b2c3") if command[2] == "add"]
    assert len(made) == spec.hosts + 2
    assert {lab_id_of(namespace) for namespace in made} == {"a1b2c3"}


@pytest.mark.parametrize(
    "name", ["", "stretto", "stretto-a1b2c3-", "stretto-A1B2C3-h0", "x-stretto-a1b2c3-h0", "h0"]
)
def test_a_namespace_of_another_program_has_no_lab_id(name):
    assert lab_id_of(name) is None


@given(specs())
def test_nothing_is_created_outside_the_lab_s_namespaces(spec):
    for command in build_commands(spec, "a1b2c3"):
        if command[:3] == ("ip", "netns", "add"):
            continue
        inside = command[3] if command[1] == "netns" else command[2]
        assert command[1] in ("-n", "netns")
        assert lab_id_of(inside) == "a1b2c3"


@given(specs())
def test_a_namespace_is_created_before_it_is_used(spec):
    made = set()
    for command in build_commands(spec, "a1b2c3"):
        used = {word for word in command if lab_id_of(word)}
        if command[:3] == ("ip", "netns", "add"):
            made |= used
        assert used <= made


@given(specs())
def test_no_command_sets_a_route(spec):
    assert not any("route" in command for command in build_commands(spec, "a1b2c3"))


@given(specs())
def test_with_a_rate_each_link_is_shaped_at_both_ends(spec):
    shaped = [command for command in build_commands(spec, "a1b2c3") if command[0] == "tc"]
    ends = Counter(command[command.index("dev") + 1] for command in shaped)
    expected = Counter({NAMES.link: spec.hosts + 1, **{NAMES.port(p): 1 for p in spec.nodes}})
    assert ends == (expected if spec.bits_per_s else Counter())


@given(specs())
def test_only_hosts_drop_packets_and_only_with_a_loss(spec):
    losing = {command[3] for command in build_commands(spec, "a1b2c3") if "nft" in command}
    hosts = {NAMES.namespace(host) for host in range(spec.hosts)}
    assert losing == (hosts if spec.loss else set())


def test_the_shaping_parameters_are_those_that_were_measured():
    commands = build_commands(LabSpec(hosts=1, bits_per_s=400_000_000), "a1b2c3")
    text = "tc -n stretto-a1b2c3-h0 qdisc add dev ste-a1b2c3 root tbf rate 400000000bit burst 128kb"
    assert f"{text} latency 100ms" in {" ".join(command) for command in commands}


def test_one_packet_in_a_thousand_is_a_thousand_in_a_million():
    commands = build_commands(LabSpec(hosts=1, loss=0.001), "a1b2c3")
    (rules,) = [command[-1] for command in commands if "nft" in command]
    assert 'iifname "ste-a1b2c3" numgen random mod 1000000 < 1000 drop' in rules


@given(specs())
def test_ranks_fill_one_host_after_another(spec):
    hosts = [host_of(spec, rank) for rank in range(spec.ranks)]
    assert hosts == sorted(hosts)
    assert set(Counter(hosts).values()) == {spec.ranks_per_host}


def test_a_rank_has_torchrun_s_variables_in_its_environment():
    spec = LabSpec(hosts=2, ranks_per_host=4, bits_per_s=400_000_000)
    assert rank_environment(spec, NAMES, 6, store_port=4711) == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": address(HEAD),
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "ste-a1b2c3",
        "STRETTO_LAB_BITS_PER_S": "400000000",
        "STRETTO_LAUNCHER": "stretto lab",
    }


def test_an_unshaped_lab_sets_no_rate_variable():
    found = rank_environment(LabSpec(hosts=1), NAMES, 0, store_port=1)
    assert "STRETTO_LAB_BITS_PER_S" not in found


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        ([0, 1], [[0], [1], [0], [1]]),
        ([3], [[3], [3], [3], [3]]),
        ([0, 1, 2, 3], [[0], [1], [2], [3]]),
        ([*range(9)], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_every_rank_has_its_own_cores_if_there_are_enough(cores, shares):
    spec = LabSpec(hosts=2, ranks_per_host=2)
    assert [list(cores_of(spec, rank, cores)) for rank in range(4)] == shares


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (16, 4), (17, 4)])
def test_cores_are_shared_evenly_and_every_rank_has_one(cores, threads):
    assert threads_per_rank(LabSpec(hosts=4), cores) == threads


def test_missing_tools_are_named_with_the_packages_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LabError, match=r"ip, tc, setpriv, taskset, nft.*apt-get install iproute2 nftables"
    ):
        require_tools(LabSpec(hosts=1, loss=0.1))


def test_without_root_the_error_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/sbin/{tool}")
    with pytest.raises(LabError, match="run it as root"):
        require_tools(LabSpec(hosts=1))


def test_a_live_lab_s_lock_cannot_be_claimed(tmp_path):
    with claim_new_id(tmp_path) as (lab_id, _), claim_if_dead(tmp_path, lab_id) as is_dead:
        assert not is_dead


def test_a_dead_lab_s_lock_can_be_claimed(tmp_path):
    with claim_new_id(tmp_path) as (lab_id, _):
        pass
    with claim_if_dead(tmp_path, lab_id) as is_dead:
        assert is_dead


def test_a_lock_file_is_listed_until_it_is_removed(tmp_path):
    with claim_new_id(tmp_path) as (lab_id, _):
        assert locked_ids(tmp_path) == {lab_id}
        remove_lock(tmp_path, lab_id)
        assert locked_ids(tmp_path) == set()


def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    def flock_after_removal(_fd, _operation):
        remove_lock(tmp_path, "a1b2c3")  # another process cleared it first

    monkeypatch.setattr("fcntl.flock", flock_after_removal)
    with claim_if_dead(tmp_path, "a1b2c3") as is_dead:
        assert not is_dead
