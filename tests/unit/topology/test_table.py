import subprocess
import sys

import pytest

from stretto.errors import ConfigError
from stretto.topology import TOPOLOGIES, TopologySettings, make_topology


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_has_its_name_of_the_table(name):
    assert make_topology(name).name == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^no topology 'hyper-cube'; .*; did you mean hypercube\?"
    ):
        make_topology("hyper-cube")


def test_an_unknown_name_without_a_similar_one_is_refused_with_all_names():
    with pytest.raises(
        ConfigError, match=r"^no topology '42'; there are complete, ring, .*equidyn$"
    ):
        make_topology("42")


def test_settings_reach_the_topology():
    assert make_topology("base", TopologySettings(peers=3)).period(16) == 2
    assert make_topology("equidyn", TopologySettings(eta=0.2))(0, 2).receives[
        0
    ].weight == pytest.approx(0.1)
    assert make_topology("ring", TopologySettings(groups=2)).name == "ring between 2 groups"
    cycles = {
        tuple(cycle_of(make_topology("derangement", TopologySettings(seed=s)))) for s in range(5)
    }
    assert len(cycles) == 5


def cycle_of(topology):
    return [topology(rank, 16).receives[0].rank for rank in range(16)]


def test_a_setting_without_effect_is_refused():
    message = "^ring leaves no choice of peers; hyper-hypercube, simple-base, base do$"
    with pytest.raises(ConfigError, match=message):
        make_topology("ring", TopologySettings(peers=2))


def test_the_seed_may_be_set_for_every_topology():
    assert make_topology("ring", TopologySettings(seed=9))(0, 3) == make_topology("ring")(0, 3)


def test_the_package_imports_no_torch():
    code = (
        "import sys; import stretto.topology, stretto.topology.analysis; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
