"""Plans for people: made, explained, compared with what would be if memory or links were others."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.config.text import suggestion
from stretto.errors import ConfigError
from stretto.optim import LAMBConfig, LARSConfig
from stretto.plan.choosing import Choosing
from stretto.plan.footprint import Footprints
from stretto.plan.infeasible import TooLittleMemoryError
from stretto.plan.options import Allowed, all_options
from stretto.plan.planner import Planned, make_plan
from stretto.plan.profile import Profile
from stretto.run import RunConfig
from stretto.strategy.sharded.config import ShardedConfig
from stretto.units import format_bytes, parse_bits_per_s, parse_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan is made for."""

    profile: Profile
    budget: int
    allowed: Allowed

    def plan(self) -> Planned:
        """Return the plan."""
        return make_plan(self.profile, self.budget, self.allowed)


def allowed_by(config: RunConfig) -> Allowed:
    """Return what a plan for this run may use."""
    strategy = config.strategy
    checkpoint = isinstance(strategy, ShardedConfig) and strategy.checkpoint
    return Allowed(
        checkpoint=checkpoint,
        barrier=config.train.reads_gradients,
        whole_layers=isinstance(config.optim, LARSConfig | LAMBConfig),
    )


def changed(setting: Setting, text: str) -> Setting:
    """Return the setting with ``text`` laid over it: "memory=8GiB,rate=10gbit,ranks=16".

    Raises:
        ConfigError: There is no such word, or its value is none.
    """
    for pair in text.split(","):
        word, found, value = pair.strip().partition("=")
        if word not in _CHANGES or not found:
            raise ConfigError(
                f"--what-if {pair.strip()!r}: expected word=value"
                f"{suggestion(word, list(_CHANGES), 'known')}"
            )
        setting = _CHANGES[word](setting, value)
    return setting


def _with_memory(setting: Setting, value: str) -> Setting:
    return replace(setting, budget=parse_bytes(value))


def _with_rate(setting: Setting, value: str) -> Setting:
    rate = parse_bits_per_s(value) / 8
    if not rate:
        raise ConfigError(f"--what-if rate={value}: nothing could be sent")
    return _with_link(setting, bytes_per_s=rate)


def _with_latency(setting: Setting, value: str) -> Setting:
    number, unit = value.strip()[:-2], value.strip()[-2:]
    scales = {"us": 1e-6, "ms": 1e-3}
    try:
        return _with_link(setting, latency_s=float(number) * scales[unit])
    except (ValueError, KeyError):
        raise ConfigError(f'--what-if latency={value}: expected "50us" or "1ms"') from None


def _with_ranks(setting: Setting, value: str) -> Setting:
    hosts = setting.profile.link.hosts
    if not value.isdecimal() or int(value) < 1 or int(value) % hosts:
        raise ConfigError(f"--what-if ranks={value}: expected a multiple of {hosts} (hosts)")
    return _with_link(setting, ranks=int(value))


def _with_link(setting: Setting, **changes: object) -> Setting:
    link = setting.profile.link.model_copy(update=changes)
    return replace(setting, profile=setting.profile.model_copy(update={"link": link}))


_CHANGES: dict[str, Callable[[Setting, str], Setting]] = {
    "memory": _with_memory,
    "rate": _with_rate,
    "latency": _with_latency,
    "ranks": _with_ranks,
}


def pareto(setting: Setting, count: int) -> list[tuple[int, float]]:
    """Return budgets from the least to what lets everything stay, each with its step's time."""
    footprints = Footprints(setting.profile)
    options = all_options(setting.profile, setting.allowed, footprints)
    choosing = Choosing(setting.profile, options, footprints, setting.allowed)
    least = footprints.peak(choosing.tightest(choosing.smallest()))
    most = max(least, footprints.peak(choosing.tightest(choosing.fastest())))
    points: list[tuple[int, float]] = []
    for number in range(count):
        budget = least + (most - least) * number // max(count - 1, 1)
        try:
            points.append((budget, replace(setting, budget=budget).plan().step_s))
        except TooLittleMemoryError:
            continue
    # More memory is never worse: the plan of less fits, too.
    best = float("inf")
    for index, (budget, step_s) in enumerate(points):
        best = min(best, step_s)
        points[index] = budget, best
    return points


def check_place(path: Path, flag: str) -> None:
    """Refuse to write where there is no folder."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.absolute().parent}")


def comparison(name: str, before: Planned, after: Planned) -> str:
    """Return what another setting would bring, in words."""
    share = after.step_s / before.step_s - 1
    return (
        f"{name}: {after.step_s * 1e3:.1f} ms a step ({share:+.1%}), keeping "
        f"{format_bytes(after.peak_bytes)}"
    )
