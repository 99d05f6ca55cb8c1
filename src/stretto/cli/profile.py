"""``stretto profile``: measure or estimate the costs of a run's model and links, for plans."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.planner.profile import Profile

_MAX_ROWS = 40


def profile(
    run: Path,
    /,
    *overrides: str,
    out: Path = Path("profile.json"),
    cluster: str | None = None,
    estimate: bool = False,
    device: str = "cpu",
    repeats: int = 9,
) -> int:
    """Measure the time and memory of each unit of RUN's model, and of its messages.

    Example: stretto lab --hosts 4 --rate 400mbit -- stretto profile run.toml --out profile.json

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings that override the file, as table.key=value.
    out
        File to write the profile to, as JSON.
    cluster
        Take the link from here instead of timing messages: a file of stretto calibrate, or a name
        such as "gpu nodes 100gbit".
    estimate
        Count the model's operations instead of running them; needs --cluster.
    device
        cpu (Gloo) or cuda (NCCL); with --estimate also h200, "h200 fp32", or operations and bytes
        of memory per second as 3e14,2e12.
    repeats
        Number of timed steps; the median counts.
    """
    from stretto.bench.profile_run import (
        ProfileOptions,
        check_profile_options,
        profile_run,
        write_profile,
    )
    from stretto.cluster.detect import detect_world
    from stretto.launch.process_setup import quiet_torch
    from stretto.recipes import load_run

    quiet_torch()
    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    _check_out_folder(out)
    world = detect_world()
    options = ProfileOptions(repeats, device, cluster, estimate)
    check_profile_options(world, options)
    config = load_run(run, overrides).config
    if estimate and world.rank > 0:  # an estimate needs one rank only
        return 0
    result = profile_run(config, world, options, _say if world.rank == 0 else lambda _: None)
    if world.rank == 0:
        write_profile(result, out)
        _print(result)
        _say(f"wrote {out}")
    return 0


def _check_out_folder(out: Path) -> None:
    from stretto.errors import ConfigError

    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")


def _print(found: "Profile") -> None:
    from stretto.units import format_bytes, format_s

    width = max(len(_shorten(unit.name)) for unit in found.units) + 2
    head = f"{'unit':<{width}}{'elements':>12}{'forward':>14}{'backward':>14}{'spread':>8}"
    print(f"{head}{'activations':>13}{'workspace':>11}")
    for unit in found.units[:_MAX_ROWS]:
        print(
            f"{_shorten(unit.name):<{width}}{unit.numel:>12,}{format_s(unit.forward_s):>14}"
            f"{format_s(unit.backward_s):>14}{unit.spread:>8.1%}"
            f"{format_bytes(unit.activation_bytes):>13}{format_bytes(unit.workspace_bytes):>11}"
        )
    if len(found.units) > _MAX_ROWS:
        print(f"and {len(found.units) - _MAX_ROWS} more")
    for line in _summary(found):
        print(line)


def _summary(found: "Profile") -> list[str]:
    from stretto.planner.profile import worthwhile_unit_bytes
    from stretto.units import format_bytes, format_s

    link = found.link
    return [
        f"forward and backward {format_s(found.compute_s)}, update {format_s(found.update_s)}, "
        f"beside messages {found.slowdown:.2f} times as long; {found.source}",
        f"link of {link.ranks} ranks: {format_s(link.latency_s)} a message, "
        f"{format_bytes(link.bytes_per_s)}/s, {link.lanes} at once; worth joining up to "
        f"{format_bytes(worthwhile_unit_bytes(link))}; an all-gather takes {link.gather_ratio:.2f} "
        f"of a reduce-scatter, an all-reduce {link.sum_ratio:.2f} of both, "
        f"a step without a barrier {found.no_barrier_slowdown:.2f} times as long as predicted, "
        f"a plan's own order {found.reordering_slowdown:.2f} times on top "
        f"({found.reordering_slowdown_with_barrier:.2f} with a barrier)",
    ]


def _shorten(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]} .. {name[-18:]}"


def _say(line: str) -> None:
    print(f"stretto profile: {line}", file=sys.stderr)
