from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.doctor.checks import (
    CHECKS,
    check_clocks,
    check_code,
    check_interfaces,
    check_mesh,
    check_peers,
    check_ports,
    check_rendezvous,
    check_timeouts,
    describe_code_differences,
    run_checks,
)
from stretto.doctor.machine_checks import (
    check_disk_space,
    check_file_limit,
    check_folder,
    check_hardware,
    check_shared_memory,
    check_threads,
    check_torch_build,
    required_files,
)
from stretto.doctor.port_probe import NOT_TRIED
from stretto.doctor.records import ClockOffset, Code, ProbeReport, ProbeResult
from tests.unit.doctor.examples import GB, PURPOSE, healthy, spoil

ASKED = {
    "requested_interface": "eth1",
    "interface_names": ("eth0", "eth1", "lo"),
    "requested_is_up": True,
}
HERE = {"requested_address": "198.18.0.11", "route_interface": "eth1"}

SPOILED = {
    "a GPU for its one rank": (check_hardware, "machine", {"gpus": ("H200",)}, "ok", "1 x H200"),
    "no gloo": (check_torch_build, "code", {"backends": ()}, "FAIL", "without Gloo"),
    "GPU without NCCL": (check_torch_build, "machine", {"gpus": ("H200",)}, "warn", "without NCCL"),
    "one file changed": (
        check_code,
        "code",
        {"files": {"run.py": "aa", "units.py": "xx"}},
        "FAIL",
        "units.py",
    ),
    "another torch": (check_code, "code", {"versions": {"torch": "2.11"}}, "FAIL", "torch 2.11"),
    "disk full": (
        check_disk_space,
        "folder",
        {"free_bytes": 10**6},
        "FAIL",
        "1 MB free in runs/run",
    ),
    "no room to write": (
        check_disk_space,
        "folder",
        {"error": "No space", "is_full": True},
        "FAIL",
        "free in",
    ),
    "no inodes": (check_disk_space, "folder", {"free_inodes": 3}, "FAIL", "3 inodes"),
    "read-only": (
        check_folder,
        "folder",
        {"error": "Read-only file system"},
        "FAIL",
        "read-only file",
    ),
    "file limit": (check_file_limit, "machine", {"files_soft": 64}, "FAIL", "may open 64 files"),
    "small shm": (
        check_shared_memory,
        "machine",
        {"shm_bytes": 64 * 2**20},
        "warn",
        "67.1 MB free",
    ),
    "no shm": (check_shared_memory, "machine", {"shm_bytes": None}, "warn", "no /dev/shm"),
    "many threads": (check_threads, "machine", {"threads": 4}, "warn", "4 threads on 1 core"),
    "few ports": (check_ports, "network", {"ports_high": 33000}, "warn", "only 233 ports"),
    "ports taken": (check_ports, "network", {"ports_used": 28200}, "FAIL", "28200 of 28232"),
    "no such interface": (
        check_interfaces,
        "network",
        {"requested_interface": "ib0"},
        "FAIL",
        "ib0, named by",
    ),
    "down": (check_interfaces, "network", {**ASKED, "requested_is_up": False}, "FAIL", "is down"),
    "no address": (check_interfaces, "network", ASKED, "FAIL", "has no address"),
    "loopback": (
        check_interfaces,
        "network",
        {"requested_interface": "lo", "requested_is_up": True, "requested_address": "127.0.0.1"},
        "FAIL",
        "is loopback",
    ),
    "elsewhere": (
        check_interfaces,
        "network",
        {**ASKED, **HERE, "route_interface": "eth0"},
        "warn",
        "not the one towards the store (eth0)",
    ),
    "the right one": (check_interfaces, "network", {**ASKED, **HERE}, "ok", "eth1 (198.18.0.11)"),
    "no way": (check_interfaces, "network", {"address": ""}, "FAIL", "no interface leads"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_rank_is_named_with_what_is_wrong_and_what_to_do(case):
    check, part, changes, status, expected = SPOILED[case]
    found = check(spoil(healthy(), 1, part, **changes))
    assert found.status == status
    assert expected in found.finding
    assert found.ranks == (() if status == "ok" else (1,))
    assert bool(found.advice) == (status != "ok")


def test_nothing_is_found_in_a_healthy_world():
    assert [found.check for found in run_checks(healthy()) if found.status != "ok"] == []


def test_nothing_is_found_in_a_rank_alone():
    assert [found.check for found in run_checks(healthy(1)) if found.status != "ok"] == []


def test_every_check_has_a_name_of_its_own():
    names = [found.check for found in run_checks(healthy())]
    assert len(set(names)) == len(names) == len(CHECKS)


@given(
    st.lists(st.sampled_from(sorted(SPOILED)), max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_whatever_is_wrong_there_is_one_line_a_check_and_every_failure_says_what_to_do(
    cases, ranks
):
    seen = healthy(4, ranks_per_host=2)
    for case, rank in zip(cases, ranks, strict=False):
        _, part, changes, _, _ = SPOILED[case]
        seen = spoil(seen, rank, part, **changes)
    found = run_checks(seen)
    assert len(found) == len(CHECKS)
    assert [f.check for f in found if f.status == "FAIL" and not f.advice] == []
    assert [f.check for f in found if "\n" in f.finding + f.advice] == []


def test_the_same_problem_of_several_ranks_is_shown_once():
    seen = spoil(healthy(4, 2), 2, "folder", error="Permission denied")
    found = check_folder(spoil(seen, 3, "folder", error="Permission denied"))
    assert found.ranks == (2, 3)
    assert found.finding == (
        "ranks 2-3 (host n1, 198.18.0.11): cannot write in runs/run: permission denied"
    )


def test_failures_are_shown_before_warnings():
    seen = spoil(healthy(), 1, "network", ports_high=33000)
    found = check_ports(spoil(seen, 2, "network", ports_used=28200))
    assert found.status == "FAIL"
    assert found.finding.startswith("rank 2")
    assert found.ranks == (1, 2)


def test_of_many_problems_the_first_three_are_shown_and_the_rest_counted():
    seen = healthy(6)
    for rank in range(5):
        seen = spoil(seen, rank, "folder", free_bytes=rank)
    found = check_disk_space(seen)
    assert found.finding.endswith("; and 2 more")
    assert found.ranks == (0, 1, 2, 3, 4)


def test_only_rank_0_needs_room_for_checkpoints():
    assert check_disk_space(spoil(healthy(), 1, "folder", free_bytes=GB // 2)).status == "ok"
    assert check_disk_space(spoil(healthy(), 0, "folder", free_bytes=GB // 2)).status == "FAIL"


def test_the_odd_one_out_is_named_even_when_it_is_the_coordinator():
    found = check_code(spoil(healthy(), 0, "code", files={"run.py": "zz", "units.py": "bb"}))
    assert found.ranks == (0,)
    assert "run.py" in found.finding


def test_between_two_ranks_the_code_of_the_coordinator_counts_as_the_majority():
    found = check_code(spoil(healthy(2), 1, "code", files={"run.py": "zz", "units.py": "bb"}))
    assert found.ranks == (1,)


def test_a_rank_whose_facts_cannot_be_read_runs_other_code():
    seen = healthy()
    found = check_code(replace(seen, facts={rank: seen.facts[rank] for rank in (0, 2)}))
    assert (found.status, found.ranks) == ("FAIL", (1,))


def test_a_file_that_only_one_side_has_is_a_difference():
    usual = Code({}, {"a.py": "1", "b.py": "2"}, (), "")
    assert describe_code_differences(Code({}, {"a.py": "1"}, (), ""), usual) == "b.py"
    assert (
        describe_code_differences(Code({}, {**usual.files, "c.py": "3"}, (), ""), usual) == "c.py"
    )


def test_many_differences_are_counted():
    usual = Code({}, {str(number): "x" for number in range(9)}, (), "")
    assert describe_code_differences(Code({}, {}, (), ""), usual) == "0, 1, 2, 3 and 5 more"


def test_missing_ranks_are_named():
    found = check_rendezvous(replace(healthy(6), present_ranks=(0, 2)))
    assert (found.status, found.ranks) == ("FAIL", (1, 3, 4, 5))
    assert "ranks 1, 3-5 of 6 never came" in found.finding


def test_trouble_with_the_store_is_told_with_what_to_do():
    seen = replace(
        healthy(),
        present_ranks=(),
        rendezvous_error="rank 0 cannot reach it: refused; open the port",
    )
    found = check_rendezvous(seen)
    assert (found.status, found.finding) == ("FAIL", "rank 0 cannot reach it: refused")
    assert found.advice == "open the port"


def with_round(seen, rank, *probes, measured=None):
    return replace(seen, probe_reports={**seen.probe_reports, rank: ProbeReport(probes, measured)})


def test_a_pair_that_cannot_connect_is_named_both_ways_apart():
    found = check_peers(with_round(healthy(), 2, ProbeResult(0, "198.18.0.10:41234", "timed out")))
    assert found.finding == (
        "rank 2 (host n2, 198.18.0.12): cannot connect to rank 0 at 198.18.0.10:41234: timed out"
    )
    assert "STRETTO_INTERFACE" in found.advice
    assert found.ranks == (2,)


def test_a_peer_that_accepts_and_does_not_answer_is_not_the_network_s_fault():
    found = check_peers(
        with_round(healthy(), 2, ProbeResult(0, "a:1", "connected, but nobody answers"))
    )
    assert "stopped" in found.advice
    assert "open TCP ports" not in found.advice


def test_a_pair_that_was_not_tried_only_warns():
    assert check_peers(with_round(healthy(), 2, ProbeResult(0, "a:1", NOT_TRIED))).status == "warn"


def test_a_rank_that_came_and_fell_silent_is_named():
    seen = healthy()
    found = check_peers(
        replace(seen, probe_reports={rank: seen.probe_reports[rank] for rank in (0, 1)})
    )
    assert (found.status, found.ranks) == ("FAIL", (2,))


def test_peers_that_nobody_could_try_are_not_called_open():
    seen = healthy()
    assert (
        check_peers(
            replace(seen, probe_reports={}, present_ranks=(), rendezvous_error="no store")
        ).status
        == "warn"
    )


@pytest.mark.parametrize(
    ("measured", "status"),
    [
        (ClockOffset(1.9, 0.0), "ok"),
        (ClockOffset(2.4, 0.5), "ok"),
        (ClockOffset(2.6, 0.5), "warn"),
        (ClockOffset(-2.6, 0.5), "warn"),
        (ClockOffset(31.0, 0.5), "FAIL"),
        (ClockOffset(-3600.0, 0.1), "FAIL"),
        (None, "warn"),
    ],
)
def test_a_clock_is_rated_by_its_least_offset(measured, status):
    assert check_clocks(with_round(healthy(), 1, measured=measured)).status == status


def test_a_clock_that_is_ahead_is_told_from_one_that_is_behind():
    ahead = check_clocks(with_round(healthy(), 1, measured=ClockOffset(3600.0, 0)))
    behind = check_clocks(with_round(healthy(), 1, measured=ClockOffset(-3600.0, 0)))
    assert "1 h 00 min ahead of that of rank 0" in ahead.finding
    assert "1 h 00 min behind that of rank 0" in behind.finding


def test_the_mesh_may_be_uneven():
    seen = healthy(3)
    for rank in (1, 2):
        rank_info = replace(seen.facts[rank].identity.rank_info, host_name="n1")
        seen = spoil(seen, rank, "identity", rank_info=rank_info, machine_id="kernel-1")
    assert "1+2" in check_mesh(seen).finding


def test_ranks_of_different_jobs_are_told():
    seen = healthy()
    rank_info = replace(seen.facts[2].identity.rank_info, size=4)
    found = check_mesh(spoil(seen, 2, "identity", rank_info=rank_info))
    assert found.status == "FAIL"
    assert "rank 2" in found.finding


def test_two_hosts_that_are_one_machine_are_told_unless_in_a_lab():
    seen = spoil(healthy(2), 1, "identity", machine_id="kernel-0")
    assert check_mesh(seen).status == "warn"
    for rank in (0, 1):
        rank_info = replace(seen.facts[rank].identity.rank_info, launcher="stretto lab")
        seen = spoil(seen, rank, "identity", rank_info=rank_info)
    assert check_mesh(seen).status == "ok"


def test_a_rank_that_is_there_twice_is_told():
    found = check_mesh(replace(healthy(), duplicate_ranks={1: "host n7, process 12"}))
    assert (found.status, found.ranks) == ("FAIL", (1,))
    assert "host n7, process 12" in found.finding


def test_more_ranks_than_gpus_warn():
    seen = healthy(2, ranks_per_host=2)
    for rank in (0, 1):
        seen = spoil(seen, rank, "machine", gpus=("H200",))
    assert check_hardware(seen).status == "warn"
    assert "2 ranks for 1 GPUs" in check_hardware(seen).finding


def test_threads_of_all_ranks_of_a_host_count_together():
    seen = healthy(2, ranks_per_host=2)
    assert check_threads(seen).status == "ok"
    found = check_threads(spoil(seen, 1, "machine", cores=(0,)))
    assert found.ranks == (0, 1)
    assert found.advice.startswith("start at most 1 ranks here")


def test_too_many_threads_are_answered_with_a_fair_number():
    found = check_threads(spoil(healthy(), 1, "machine", cores=(0, 1), threads=8))
    assert found.advice == "set run.threads=2 or OMP_NUM_THREADS=2"


def test_a_hard_limit_that_is_in_the_way_is_told():
    found = check_file_limit(spoil(healthy(), 1, "machine", files_soft=64, files_hard=64))
    assert "ulimit -n 4096" in found.advice
    assert "hard limit is 64" in found.advice


def test_ranks_and_decoders_need_files():
    base = required_files(healthy(2))
    assert required_files(healthy(3)) > base
    assert required_files(replace(healthy(2), requirements=replace(PURPOSE, decoders=8))) > base


@given(st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_the_ladder_of_time_outs_holds_only_in_its_order(heartbeat_timeout_s, timeout_s):
    requirements = replace(PURPOSE, heartbeat_timeout_s=heartbeat_timeout_s, timeout_s=timeout_s)
    found = check_timeouts(replace(healthy(), requirements=requirements))
    assert (found.status == "ok") == (4.0 < heartbeat_timeout_s < timeout_s)


def test_a_rung_out_of_order_is_named_with_the_setting_to_raise():
    requirements = replace(PURPOSE, heartbeat_timeout_s=400)
    found = check_timeouts(replace(healthy(), requirements=requirements))
    assert found.advice == "raise run.timeout_s above 400"


@pytest.mark.parametrize(("kill_wait_s", "status"), [(30.0, "ok"), (5.0, "warn")])
def test_what_slurm_leaves_before_it_kills_is_told(kill_wait_s, status):
    found = check_timeouts(spoil(healthy(), 0, "machine", kill_wait_s=kill_wait_s))
    assert found.status == status
    assert "between TERM and KILL" in found.finding
