"""A profile's curves as one image: over the draft length, and over the number of live rows."""

from __future__ import annotations

from pathlib import Path

from batchspec.errors import MissingDependencyError, UsageError
from batchspec.profile.curves import DepthCurve, OccupancyCurve

SUFFIXES = (".png", ".svg", ".pdf")


def write_image(path: Path, by_depth: list[DepthCurve], by_occupancy: list[OccupancyCurve]) -> None:
    """Draw the curves into `path`, whose ending says the format. Raises UsageError, MissingDependencyError."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--image {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        from batchspec.report.plots import MARKERS, PALETTE, STYLE
    except ImportError as error:
        raise MissingDependencyError(f"--image needs {error.name}: pip install 'batchspec[report]'") from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 4.2), layout="constrained")
        tokens, speed, occupancy = figure.subplots(1, 3)
        for number, curve in enumerate(by_depth):
            style = {"marker": MARKERS[number], "color": PALETTE[number]}
            tokens.plot(curve.depths, curve.tokens_per_step, label=curve.method.value, **style)
            for (live, ratios), line in zip(curve.speed_ups.items(), ("-", "--", ":"), strict=False):
                speed.plot(curve.depths, ratios, line, label=f"{curve.method.value}, {live} live rows", **style)
        for number, setting in enumerate(by_occupancy):
            style = {"marker": MARKERS[number], "color": PALETTE[number]}
            occupancy.plot(setting.live_rows, setting.ratios, label=setting.setting, **style)
            if setting.crossover is not None:
                occupancy.axvline(setting.crossover, color=PALETTE[number], linewidth=0.8, linestyle=":")
        tokens.set(title="Tokens per row and step", xlabel="tokens proposed at most, k", ylim=(1, None))
        speed.set(title="Speed-up against target-only", xlabel="tokens proposed at most, k")
        occupancy.set(title="Throughput / target-only; dotted: crossover", xlabel="live rows", xscale="log")
        occupancy.set_xticks(by_occupancy[0].live_rows, map(str, by_occupancy[0].live_rows))
        occupancy.minorticks_off()
        for axes in (speed, occupancy):
            axes.axhline(1, color="#1a1a1a", linewidth=0.8)
        for axes in (tokens, speed, occupancy):
            axes.grid(axis="both")
            axes.legend(fontsize=8)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UsageError(f"--image {path}: cannot be written: {error.strerror}") from error
