"""A study told to people: a table, a page with curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.report.figures import Figure, Trace, line, shown
from stretto.report.page import Table, render_page
from stretto.study.scaling.sweep import Cell, Done, Point, Summary, summarise
from stretto.telemetry.aside import write_aside

HEADERS = ("strategy", "workers", "batch", "accuracy", "spread", "own", "apart", "rate x", "seeds")


def table_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return a row for each point."""
    return [
        [
            one.point.strategy,
            str(one.point.workers),
            str(one.point.batch),
            f"{one.mean:.2%}",
            f"{one.spread:.2%}" if len(one.accuracies) > 1 else "-",
            f"{_mean(one.own_accuracies):.2%}" if one.own_accuracies else "-",
            "-" if one.apart is None else f"{one.apart:.4f}",
            f"{one.factor:g}" + ("" if one.interior else " (edge)"),
            str(len(one.accuracies)),
        ]
        for one in summaries
    ]


def to_json(one: Summary) -> dict[str, object]:
    """Return a point as one object."""
    return {
        "strategy": one.point.strategy,
        "workers": one.point.workers,
        "batch": one.point.batch,
        "accuracy": one.mean,
        "spread": one.spread,
        "accuracies": list(one.accuracies),
        "own_accuracy": _mean(one.own_accuracies) if one.own_accuracies else None,
        "apart": one.apart,
        "factor": one.factor,
        "interior": one.interior,
    }


def write_study_page(
    path: Path, title: str, axis: str, points: Sequence[Point], done: Mapping[Cell, Done]
) -> None:
    """Write the page of a study along ``axis``, "workers" or "batch", as far as it is."""
    summaries = [one for point in points if (one := summarise(point, done)) is not None]
    edges = [one for one in summaries if not one.interior]
    verdict = (
        f"The best rate of {len(edges)} of {len(summaries)} points is at the edge of its sweep: "
        "there accuracy may be higher than told."
        if edges
        else f"The best rate of all {len(summaries)} points lies between rates that were tried."
    )
    figures = [_accuracy(summaries, axis), _sweeps(points, done), _apart(summaries, done)]
    table = Table(
        "All points",
        "Accuracy is that of the mean of all models on data they have not been trained on, the "
        "mean over seeds at the best rate; own is that of workers' own models; apart is how far "
        "these are from their mean at the end, as a share of its norm.",
        HEADERS,
        table_rows(summaries),
    )
    drawn = [figure for figure in figures if figure.traces]
    write_aside(path, render_page("study", title, verdict, drawn, table))


def _accuracy(summaries: Sequence[Summary], axis: str) -> Figure:
    traces: list[Trace] = []
    for index, strategy in enumerate(_strategies(summaries)):
        mine = [one for one in summaries if one.point.strategy == strategy]
        traces.append(
            {
                **line(index),
                "mode": "lines+markers",
                "name": shown(strategy),
                "x": [getattr(one.point, axis) for one in mine],
                "y": [one.mean for one in mine],
                "error_y": {"type": "data", "array": [one.spread for one in mine]},
            }
        )
    sizes = sorted({getattr(one.point, axis) for one in summaries})
    return Figure(
        f"Accuracy against {axis}",
        "Right answers on unseen data, each point at its best rate; bars are one standard "
        "deviation over seeds. A curve that stays level scales.",
        traces,
        {
            "xaxis": {
                "title": axis,
                "type": "log",
                "tickvals": sizes,
                "ticktext": [f"{size:,}" for size in sizes],
            },
            "yaxis": {"title": "right answers", "tickformat": ".1%"},
        },
    )


def _sweeps(points: Sequence[Point], done: Mapping[Cell, Done]) -> Figure:
    traces: list[Trace] = []
    for index, point in enumerate(points):
        tried = sorted(
            (cell.factor, one.accuracy)
            for cell, one in done.items()
            if cell.point == point and cell.seed == 0
        )
        if tried:
            name = f"{point.strategy}, {point.workers} workers, batch {point.batch}"
            x, y = zip(*tried, strict=True)
            traces.append(
                {**line(index), "mode": "lines+markers", "name": shown(name), "x": x, "y": y}
            )
    return Figure(
        "Accuracy against the rate",
        "One seed, each rate a factor of the run's own. A comparison is fair where every curve "
        "has its top inside.",
        traces,
        {
            "xaxis": {"title": "rate, as a factor of the run's", "type": "log"},
            "yaxis": {"title": "right answers", "tickformat": ".0%"},
        },
        height_px=520,
    )


def _apart(summaries: Sequence[Summary], done: Mapping[Cell, Done]) -> Figure:
    traces: list[Trace] = []
    for index, one in enumerate(summaries):
        found = done.get(Cell(one.point, one.factor, 0))
        if found is not None and found.apart:
            steps, far = zip(*found.apart, strict=True)
            name = f"{one.point.strategy}, {one.point.workers} workers, batch {one.point.batch}"
            traces.append({**line(index), "name": shown(name), "x": steps, "y": far})
    return Figure(
        "How far models are apart",
        "The root mean square distance of workers' models from their mean, as a share of its "
        "norm, at the best rate: it follows the rate, and falls to nothing as that does.",
        traces,
        {"xaxis": {"title": "step"}, "yaxis": {"title": "apart", "type": "log"}},
        height_px=520,
    )


def _strategies(summaries: Sequence[Summary]) -> list[str]:
    return list(dict.fromkeys(one.point.strategy for one in summaries))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
