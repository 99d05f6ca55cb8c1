"""The results of a scaling study as table rows, records and an HTML page with curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto.report.figures import Figure, Trace, curve_style, escape_label
from stretto.report.html import Table, render_page
from stretto.studies.scaling_sweep import GridCell, PointSummary, RunResult, StudyPoint, summarise
from stretto.telemetry.sinks import write_atomically

HEADERS = (
    "strategy",
    "workers",
    "batch",
    "accuracy",
    "spread",
    "local",
    "distance",
    "rate x",
    "seeds",
)


def table_rows(summaries: Sequence[PointSummary]) -> list[list[str]]:
    """Return a row of text for each point, with the columns of `HEADERS`."""
    return [
        [
            one.point.strategy,
            str(one.point.workers),
            str(one.point.batch),
            f"{one.mean:.2%}",
            f"{one.spread:.2%}" if len(one.accuracies) > 1 else "-",
            f"{_mean(one.local_accuracies):.2%}" if one.local_accuracies else "-",
            "-" if one.consensus_distance is None else f"{one.consensus_distance:.4f}",
            f"{one.factor:g}" + ("" if one.is_interior else " (edge)"),
            str(len(one.accuracies)),
        ]
        for one in summaries
    ]


def summary_record(one: PointSummary) -> dict[str, object]:
    """Return a point as a JSON object."""
    return {
        "strategy": one.point.strategy,
        "workers": one.point.workers,
        "batch": one.point.batch,
        "accuracy": one.mean,
        "spread": one.spread,
        "accuracies": list(one.accuracies),
        "own_accuracy": _mean(one.local_accuracies) if one.local_accuracies else None,
        "apart": one.consensus_distance,
        "factor": one.factor,
        "interior": one.is_interior,
    }


def write_study_page(
    path: Path,
    title: str,
    axis: str,
    points: Sequence[StudyPoint],
    done: Mapping[GridCell, RunResult],
) -> None:
    """Write the page of a study; it may still be running.

    Args:
        path: The HTML file.
        title: The heading.
        axis: What accuracy is drawn against: "workers" or "batch".
        points: The points of the study.
        done: The results so far.
    """
    summaries = [one for point in points if (one := summarise(point, done)) is not None]
    edges = [one for one in summaries if not one.is_interior]
    conclusion = (
        f"The best rate of {len(edges)} of {len(summaries)} points is at the edge of its sweep: "
        "there accuracy may be higher than shown."
        if edges
        else f"The best rate of all {len(summaries)} points lies between rates that were tried."
    )
    figures = [
        _accuracy_figure(summaries, axis),
        _sweep_figure(points, done),
        _distance_figure(summaries, done),
    ]
    table = Table(
        "All points",
        "Accuracy is that of the mean of all workers' models on unseen data, averaged over seeds "
        "at the best rate. Local is the accuracy of the workers' models themselves. Distance is "
        "how far these are from their mean at the end, as a share of its norm.",
        HEADERS,
        table_rows(summaries),
    )
    drawn = [figure for figure in figures if figure.traces]
    write_atomically(path, render_page("study", title, conclusion, drawn, table))


def _accuracy_figure(summaries: Sequence[PointSummary], axis: str) -> Figure:
    traces: list[Trace] = []
    for index, strategy in enumerate(_strategies(summaries)):
        strategy_summaries = [one for one in summaries if one.point.strategy == strategy]
        traces.append(
            {
                **curve_style(index),
                "mode": "lines+markers",
                "name": escape_label(strategy),
                "x": [getattr(one.point, axis) for one in strategy_summaries],
                "y": [one.mean for one in strategy_summaries],
                "error_y": {"type": "data", "array": [one.spread for one in strategy_summaries]},
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


def _sweep_figure(points: Sequence[StudyPoint], done: Mapping[GridCell, RunResult]) -> Figure:
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
                {
                    **curve_style(index),
                    "mode": "lines+markers",
                    "name": escape_label(name),
                    "x": x,
                    "y": y,
                }
            )
    return Figure(
        "Accuracy against the rate",
        "One seed; each rate is a factor of the run's rate. The comparison is fair if no curve has "
        "its maximum at an edge.",
        traces,
        {
            "xaxis": {"title": "rate, as a factor of the run's", "type": "log"},
            "yaxis": {"title": "right answers", "tickformat": ".0%"},
        },
        height_px=520,
    )


def _distance_figure(
    summaries: Sequence[PointSummary], done: Mapping[GridCell, RunResult]
) -> Figure:
    traces: list[Trace] = []
    for index, one in enumerate(summaries):
        found = done.get(GridCell(one.point, one.factor, 0))
        if found is not None and found.consensus_distance:
            steps, distances = zip(*found.consensus_distance, strict=True)
            name = f"{one.point.strategy}, {one.point.workers} workers, batch {one.point.batch}"
            traces.append(
                {**curve_style(index), "name": escape_label(name), "x": steps, "y": distances}
            )
    return Figure(
        "Distance between models",
        "The root mean square distance of the workers' models from their mean, as a share of its "
        "norm, at the best rate. It follows the learning rate and falls to zero with it.",
        traces,
        {"xaxis": {"title": "step"}, "yaxis": {"title": "distance", "type": "log"}},
        height_px=520,
    )


def _strategies(summaries: Sequence[PointSummary]) -> list[str]:
    return list(dict.fromkeys(one.point.strategy for one in summaries))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
