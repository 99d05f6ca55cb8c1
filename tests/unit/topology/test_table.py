import subprocess
import sys

import pytest

from stretto.errors import ConfigError
from stretto.topology.table import TOPOLOGIES, Settings, named


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_has_the_name_it_has_in_the_table(name):
    assert named(name).name == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^no topology 'hyper-cube'; .*; did you mean hypercube\?"
    ):
        named("hyper-cube")


def test_a_name_like_none_is_refused_with_all_there_are():
    with pytest.raises(
        ConfigError, match=r"^no topology '42'; there are complete, ring, .*equidyn$"
    ):
        named("42")


def test_settings_reach_the_topology():
    assert named("base", Settings(peers=3)).period(16) == 2
    assert named("equidyn", Settings(eta=0.2))(0, 2).receives[0].weight == pytest.approx(0.1)
    assert named("ring", Settings(groups=2)).name == "ring between 2 groups"
    circles = {tuple(circle_of(named("derangement", Settings(seed=s)))) for s in range(5)}
    assert len(circles) == 5


def circle_of(topology):
    return [topology(rank, 16).receives[0].rank for rank in range(16)]


def test_a_setting_that_would_do_nothing_is_refused():
    message = "^ring leaves no choice of peers; hyper-hypercube, simple-base, base do$"
    with pytest.raises(ConfigError, match=message):
        named("ring", Settings(peers=2))


def test_every_run_has_a_seed_so_it_may_be_given_to_all():
    assert named("ring", Settings(seed=9))(0, 3) == named("ring")(0, 3)


def test_the_room_needs_no_torch():
    code = (
        "import sys; import stretto.topology.analysis, stretto.topology.draw; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
