"""Distances from the truth as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.table import Table

from parity.suites.truth import WAYS, Distance


def distance_table(distances: Sequence[Distance]) -> Table:
    """One line for each model and way: exact to itself and right are two columns."""
    table = Table(
        "model", "run", "exact to itself", "right", "worst of bound", "rms from truth",
        "worst position", "other tokens", "ties",
    )  # fmt: skip
    for row in distances:
        bounded = row.worst_of_bound is not None
        table.add_row(
            row.model,
            row.way,
            "yes" if row.same_bits else "no",
            row.right,
            f"{row.worst_of_bound:.2f}" if bounded else "",
            f"{row.rms:.1e}",
            f"{row.worst_row_rms:.1e}",
            f"{row.other_tokens} of {row.positions}",
            str(len(row.ties)) if bounded else "",
        )
    return table


def save_distance_plot(distances: Sequence[Distance], path: Path) -> None:
    """Distance of each way from the truth, a group of bars a model; the format is the file's ending."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row.model for row in distances))
    ways = [name for name in WAYS if any(row.way == name for row in distances)]
    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.5 + 1.3 * len(models)), 4), layout="constrained")
    width = 0.8 / len(ways)
    for place, way in enumerate(ways):
        found = {row.model: row for row in distances if row.way == way}
        positions = [
            i + (place - (len(ways) - 1) / 2) * width for i, model in enumerate(models) if model in found
        ]
        rows = [found[model] for model in models if model in found]
        axes.bar(positions, [row.rms for row in rows], width, label=way)
        axes.plot(positions, [row.worst_row_rms for row in rows], "k_", markersize=5)
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(models)),
        models,
        rotation=30 if len(models) > 5 else 0,
        ha="right" if len(models) > 5 else "center",
    )
    axes.set_ylabel("rms from the truth / deviation of logits")
    axes.set_title("llama.cpp alone beside the float64 reference (dash: worst position)", fontsize=10)
    axes.legend(ncols=len(ways), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
