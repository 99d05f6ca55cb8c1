"""What is known of a run before its model is cut up, and the plan that is made of it then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.comm.channel import Channel
from stretto.comm.small import gather_text
from stretto.errors import ConfigError
from stretto.plan.check import check
from stretto.plan.explain import verdict
from stretto.plan.options import Allowed
from stretto.plan.planner import make_plan
from stretto.plan.profile import Profile, check_same_units, read_profile
from stretto.plan.units import ModelUnit
from stretto.plan.value import Plan
from stretto.strategy.sharded.config import ShardedConfig, fitting

_WRONG = "wrong: "


@dataclass(frozen=True, slots=True)
class Known:
    """What somebody saw of the model."""

    calls: Sequence[str] | None = None
    """The modules that a forward calls, in order."""
    profile: Profile | None = None
    """What it takes, where no file says so."""
    barrier: bool = False
    """Whether somebody reads all gradients before the update."""
    tell: Callable[[str], None] = lambda _verdict: None
    """Told on rank 0 what a plan promises that was made at the start."""


def plan_at_start(
    config: ShardedConfig,
    known: Known,
    units: Sequence[ModelUnit],
    channel: Channel,
    *,
    whole_layers: bool,
) -> Plan:
    """Return the plan that rank 0 makes for ``config.memory``; all ranks together.

    Raises:
        ConfigError: On all ranks, if there is none.
    """
    shapes = [unit.shape for unit in units]

    def make() -> str:
        profile = _profile(config, known)
        check_same_units(profile, shapes, config.profile or "the estimate")
        link = profile.link.model_copy(update=_ranks_of(channel))
        profile = profile.model_copy(update={"link": link})
        allowed = Allowed(
            checkpoint=config.checkpoint, barrier=known.barrier, whole_layers=whole_layers
        )
        planned = make_plan(profile, config.memory or 0, allowed)
        known.tell(f"{config.profile or 'an estimate'} says: {verdict(planned)}")
        return planned.plan.to_json()

    told = told_by_rank_0(make, channel)
    plan = fitting(Plan.model_validate_json(told), shapes, "the plan made at the start")
    check(plan)
    return plan


def told_by_rank_0(make: Callable[[], str], channel: Channel) -> str:
    """Return the text that rank 0 makes, on every rank; all ranks together.

    Raises:
        ConfigError: On all ranks, in the words of the one that rank 0 met.
    """
    text = ""
    if channel.rank == 0:
        try:
            text = make()
        except ConfigError as wrong:
            text = f"{_WRONG}{wrong}"
    told = gather_text(text, channel)[0]
    if told.startswith(_WRONG):
        raise ConfigError(told.removeprefix(_WRONG))
    return told


def _profile(config: ShardedConfig, known: Known) -> Profile:
    if config.profile is not None:
        return read_profile(Path(config.profile))
    if known.profile is None:
        raise ConfigError(
            "strategy.memory: nothing is known of the model; set strategy.profile, a file of "
            "stretto profile"
        )
    return known.profile


def _ranks_of(channel: Channel) -> dict[str, int]:
    """Return what a link must say of the ranks that there are."""
    mesh = channel.mesh
    even = len(set(mesh.ranks_per_host)) == 1
    return {"ranks": mesh.size, "hosts": mesh.hosts if even else 1}
