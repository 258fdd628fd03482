"""Return curves, one panel a task, of run directories or of folders with collected results.

    python benchmark/plot.py runs/*
    python benchmark/plot.py benchmark/results/minimal --statistic iqm --x minutes --out curves.png
    python benchmark/plot.py runs/Hopper* --peers peers/*.csv  # <peer>__<task>__s<seed>.csv

Writes a PNG and an SVG. A seed's curve: the mean return of the episodes that ended in each update,
then a centred moving average over --smooth updates (fewer at the ends). Line: mean or interquartile
mean over the seeds (the same below 4 seeds), on a grid that spans what *every* seed has: a legend's
number of seeds holds all along a line, and nothing is extrapolated. Band, from 3 seeds on: 95%
percentile bootstrap of whole curves. Runs of a script whose settings differ on the same task are
several algorithms, named by those settings.
"""

import argparse
import collections
import itertools
import json
import math
import re
import sys
import textwrap
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scipy.stats

FIGURES = Path(__file__).parent / "figures"
KEY = ["algorithm", "task", "seed"]
TEXTS = {"algorithm", "task", "script", "settings", "versions", "git_commit"}  # others: numbers
NEVER_EMPTY = {*KEY, "script", "settings", "versions", "steps"}
NOT_THE_ALGORITHM = {"env_id", "seed", "runs_dir", "resume", "checkpoint_every", "heldout"}
NOT_THE_ALGORITHM |= {"total_timesteps", "compile", "threads", "cuda", "torch_deterministic"}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito
STYLES = ["-", "--", "-.", ":"]
GREY, DASHES = "#666666", ["--", ":", "-.", (0, (8, 2)), (0, (3, 3))]  # of peers
PEER_BATCH = 2048  # steps whose episodes make a point of a peer's curve
WIDTH = 9  # inches, at most: 100 pixels each where a README shows the figure
ENOUGH = 3  # seeds for an interval
STATISTICS = {"mean": np.mean, "iqm": lambda x, axis=0: scipy.stats.trim_mean(x, 0.25, axis=axis)}
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
plt.rcParams["text.parse_math"] = False  # a $ is a $
plt.rcParams["svg.hashsalt"] = "ppo"  # the same results give the same SVG


def fail(message):
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


# ---- Reading ----
def read_csv(path, columns):
    """A CSV with these columns: all but TEXTS become numbers, or NaN where there is none."""
    try:
        kinds, empty = dict.fromkeys(TEXTS, str), dict.fromkeys(TEXTS, "")  # "None" is a name
        table = pd.read_csv(path, dtype=kinds, keep_default_na=False, na_values=empty)
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read as a CSV: {str(error).splitlines()[0]}")
    lacking = [column for column in columns if column not in table]
    if lacking:
        fail(f"{path} has no column {', '.join(lacking)}.")
    numbers = [column for column in table if column not in TEXTS]
    table = table.assign(**{x: pd.to_numeric(table[x], errors="coerce") for x in numbers})
    counts = [column for column in ("seed", "steps", "global_step") if column in table]
    table[counts] = table[counts].where(np.isfinite(table[counts]))
    for column in columns:
        lines = table.index[table[column].isna()] + 2  # the header is the first line
        if column in NEVER_EMPTY and len(lines):
            fail(f"{path}, line {lines[0]}: {column} is missing or no number.")
    return table


def read_config(run):
    """What config.json says of a run directory; its algorithm is still the script alone."""
    try:
        config = json.loads((run / "config.json").read_text())
        own = dict(zip(KEY, (config["script"], *map(config["settings"].get, ("env_id", "seed")))))
        if list(map(type, own.values())) != [str, str, int]:
            raise TypeError("script, env_id or seed")
        versions = " ".join(f"{name} {x}" for name, x in config["versions"].items())
        return own | {"settings": config["settings"], "versions": versions, "run": run}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fail(f"{run}/config.json is not that of a run: {type(error).__name__} {error}")


def name_algorithms(configs):
    """Append to each script's name its settings that differ between runs on the same task."""
    values = collections.defaultdict(set)  # (script, setting, task) -> values
    for config in configs:
        for setting, value in config["settings"].items():
            if setting not in NOT_THE_ALGORITHM:
                values[config["algorithm"], setting, config["task"]].add(str(value))
    differing = {(script, setting) for (script, setting, _), x in values.items() if len(x) > 1}
    for config in configs:
        items = config["settings"].items()
        texts = [f"{k}={v}" for k, v in items if (config["algorithm"], k) in differing]
        config["algorithm"] = " ".join([config["algorithm"], *texts])


def how_to_get(folder):
    """The command that fills a results folder, as the end of a message; empty if none is known."""
    folder = folder.resolve()
    path = f"benchmark/experiments/{folder.name}.toml"
    if not (FIGURES.parents[1] / path).is_file():
        return ""
    elsewhere = "" if folder.parent == FIGURES.parent / "results" else f" --results {folder.parent}"
    return f" Type python benchmark/run.py {path}{elsewhere} first."


def read_runs(folder, columns):
    """runs.csv of a results folder."""
    if not (folder / "runs.csv").is_file():
        fail(f"{folder} is no results folder: it has no runs.csv.{how_to_get(folder)}")
    runs = read_csv(folder / "runs.csv", KEY + columns)
    if runs.empty:
        fail(f"{folder}/runs.csv has no run in it.")
    if runs.duplicated(KEY).any():
        fail(f"{folder}/runs.csv has several rows for one algorithm, task and seed.")
    return runs


def read_updates(folder, columns, whole=False):
    """updates.csv of a results folder, with the versions that each was made with.

    Each run needs a row an update up to its end; whole: from its first one on.
    """
    runs = read_runs(folder, ["steps", "versions"])
    updates = read_csv(folder / "updates.csv", KEY + columns)
    steps_of = {key: np.sort(steps) for key, steps in updates.groupby(KEY).global_step}
    for key, total in runs.set_index(KEY).steps.items():
        steps = steps_of.get(key, np.empty(0))
        apart = set(np.diff(steps, prepend=0)[0 if whole else 1 :])
        if total not in steps[-1:] or len(apart) > 1:
            name = "{} on {}, seed {}".format(*key)
            fail(f"{folder}/updates.csv lacks rows of {name}.{how_to_get(folder)}")
    return updates.merge(runs[[*KEY, "versions"]], on=KEY)


def read(paths, columns):
    """Run directories and results folders -> a row an update: KEY, columns, versions, run …"""
    tables, configs = [], []
    for path in paths:
        if (path / "config.json").is_file():
            configs.append(read_config(path))
        elif (path / "runs.csv").is_file():
            tables.append(read_updates(path, columns).assign(run=str(path)))
        else:
            text = f"{path} is no run directory (config.json) and no results folder (runs.csv)."
            fail(text + how_to_get(path))
    name_algorithms(configs)
    for config in configs:
        path = config["run"] / "updates.csv"
        begun = path.is_file() and path.stat().st_size
        table = read_csv(path, columns) if begun else pd.DataFrame(columns=columns)
        if table.mean_return.notna().any():
            own = {name: config[name] for name in [*KEY, "versions"]}
            tables.append(table.assign(**own, run=str(config["run"])))
        else:
            print(f"left out: {config['run']}: no episode has ended yet", file=sys.stderr)
    nothing = pd.DataFrame(columns=[*KEY, "run", *columns])
    updates = pd.concat(tables, ignore_index=True) if tables else nothing
    updates["steps"] = updates.groupby([*KEY, "run"]).global_step.transform("max")
    updates = updates.dropna(subset=columns)
    if updates.empty:
        fail("there is nothing to draw: no episode has ended yet.")
    return longest(updates)


def longest(updates):
    """Of several runs of the same algorithm, task and seed, keep the longest, and say so."""
    lengths = updates.groupby([*KEY, "run"]).global_step.max().reset_index()
    kept = lengths.sort_values("global_step", kind="stable").drop_duplicates(KEY, keep="last")
    for run in sorted(set(lengths.run) - set(kept.run)):
        print(f"left out: {run}: another run of that seed is as long", file=sys.stderr)
    return updates.merge(kept[[*KEY, "run"]], on=[*KEY, "run"])


def read_peer(path):
    """Episodes of a peer's run -> rows like updates', one per PEER_BATCH steps."""
    match = re.fullmatch(r"(.+)__(.+)__s(\d+)\.csv", path.name)
    if not match:
        fail(f"{path}: a peer's file is named <peer>__<task>__s<seed>.csv.")
    episodes = read_csv(path, ["global_step", "episodic_return"])
    batch = np.ceil(episodes.global_step / PEER_BATCH) * PEER_BATCH
    returns = episodes.groupby(batch).episodic_return.mean().rename("mean_return")
    return (
        returns.dropna().reset_index().assign(algorithm=match[1], task=match[2], seed=int(match[3]))
    )


# ---- Statistics ----
def bootstrap_interval(statistic, *samples):
    """95% percentile interval of statistic(*samples, axis); each sample is resampled on its own.

    The first axis of a sample are its seeds; whole rows (curves) are drawn. For a value pooled over
    tasks, pass a sample a task: that is the stratified bootstrap.
    """
    settings = {"n_resamples": 2000, "method": "percentile", "axis": 0, "rng": 0, "batch": 100}
    with warnings.catch_warnings():  # of a constant: "degenerate", though its interval is right
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)
        interval = scipy.stats.bootstrap(samples, statistic, **settings).confidence_interval
    return interval.low, interval.high


def smoothed(values, window):
    """Centred moving average; at the ends over what there is, so a constant stays one."""
    return pd.Series(values).rolling(window, center=True, min_periods=1).mean().to_numpy()


def on_grid(curves, points=200):
    """(x, y) of each seed -> the span that all have, as a grid; (seeds, points) linear between."""
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.linspace(start, stop, points)) if start <= stop else np.empty(0)
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])


Curve = collections.namedtuple("Curve", "x line low high seeds")


def summarize(updates, y="mean_return", x="steps", statistic="mean", smooth=10):
    """Updates of an algorithm on a task -> Curve over its seeds; low is None where no band is."""
    horizontal, scale = {"steps": ("global_step", 1e6), "minutes": ("seconds", 60)}[x]
    rows = updates.dropna(subset=[y, horizontal]).sort_values("global_step")
    seeds = [rows[rows.seed == seed] for seed in rows.seed.unique()]
    curves = [(x[horizontal].to_numpy() / scale, smoothed(x[y], smooth)) for x in seeds]
    grid, values = on_grid(curves) if curves else (np.empty(0), np.empty((1, 0)))
    band = len(curves) >= ENOUGH and len(grid)
    low, high = bootstrap_interval(STATISTICS[statistic], values) if band else (None, None)
    return Curve(grid, STATISTICS[statistic](values, axis=0), low, high, len(curves))


def gaps(updates):
    """Sentences: which seeds an algorithm lacks that others have, and which seed ends a line."""
    sentences = []
    for (algorithm, task), rows in updates.groupby(KEY[:2]):
        ends = rows.groupby("seed").global_step.max()
        missing = sorted(set(updates.seed) - set(rows.seed))
        if missing:
            text = f"seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            sentences.append(f"{algorithm} on {task}: missing {text}.")
        if ends.nunique() > 1:
            end = f"{ends.min():,.0f} steps, where seed {ends.idxmin()} ends"
            sentences.append(f"{algorithm} on {task}: drawn to {end}.")
    return sentences


# ---- Drawing ----
def draw_curve(axis, curve, colour, style="-", band=True):
    """With a band, if it has one; without, thin and below the others."""
    look = {"linewidth": 1.6, "zorder": 2} if band else {"linewidth": 1, "zorder": 1}
    look |= {"marker": "."} if len(curve.x) == 1 else {}
    axis.plot(curve.x, curve.line, color=colour, linestyle=style, **look)
    if band and curve.low is not None:
        axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)


def legend(figure, entries):
    """entries: (label, colour, style), above the panels."""
    lines = [plt.Line2D([], [], color=colour, linestyle=style) for _, colour, style in entries]
    labels = [label for label, _, _ in entries]
    columns = int(figure.get_figwidth() * 15 / (max(map(len, labels)) + 8))
    columns = max(1, min(len(labels), columns))
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False)


def panels(names, height=2.6, columns=None):
    """A figure and an axis a name."""
    columns = columns or {1: 1, 2: 2, 4: 2}.get(len(names), 3 if len(names) <= 6 else 4)
    rows = math.ceil(len(names) / columns)
    size = min(WIDTH, 5 * columns + 1), height * rows + 1
    figure, axes = plt.subplots(*(rows, columns), figsize=size, squeeze=False, layout="constrained")
    for axis, name in itertools.zip_longest(axes.flat, names):
        axis.set_title(name, fontsize=10)
        axis.set_visible(name is not None)
    return figure, list(axes.flat[: len(names)])


def save(figure, path, note):
    """As path.png and path.svg, the note below the panels."""
    text = textwrap.fill(note, int(figure.get_figwidth() * 19))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color="#555555")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_name(path.name + ".png"), dpi=200)
        figure.set_layout_engine("none")  # keep what was laid out
        figure.savefig(path.with_name(path.name + ".svg"), metadata={"Date": None})
    except OSError as error:
        fail(f"the figure cannot be written: {error}")
    plt.close(figure)


def count(seeds):
    """The number of seeds as text; several numbers as a range."""
    few, many = min(seeds), max(seeds)
    return f"{few} to {many} seeds" if few < many else f"{few} seed{'s' * (few != 1)}"


def provenance(steps, versions):
    """Steps and versions of some runs, for a footnote."""
    low, high = int(min(steps)), int(max(steps))
    steps = f"{low:,} to {high:,}" if low < high else f"{low:,}"
    return f"{steps} steps a seed. {'; '.join(sorted(set(versions.dropna())))}."


def draw(updates, peers, x="steps", statistic="mean", smooth=10):
    """One panel a task; peers (rows as updates', or None) on those tasks lie under ours."""
    tasks = sorted(updates.task.unique())
    figure, axes = panels(tasks)
    names = sorted(set(updates.algorithm))
    ours = zip(names, itertools.cycle(COLOURS), itertools.cycle(STYLES))
    looks = [(updates, *look, True) for look in ours]  # table, name, colour, style, band
    if peers is not None:
        peers = peers[peers.task.isin(tasks)]
        grey = zip(sorted(set(peers.algorithm)), itertools.cycle([GREY]), itertools.cycle(DASHES))
        looks += [(peers, *look, False) for look in grey]
    entries = []
    for table, name, colour, style, band in looks:
        curves = []
        for task, axis in zip(tasks, axes):
            rows = table[(table.algorithm == name) & (table.task == task)]
            curves.append(summarize(rows, "mean_return", x, statistic, smooth))
            draw_curve(axis, curves[-1], colour, style, band)
        seeds = [curve.seeds for curve in curves if curve.seeds]
        entries.append((f"{name} ({count(seeds)})", colour, style))
    for axis in axes:
        axis.set_xlabel("million steps" if x == "steps" else "minutes")
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("return")
    legend(figure, entries)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="run directories, results folders")
    parser.add_argument("--out", type=Path, default=FIGURES / "curves.png", help="SVG beside it")
    parser.add_argument("--x", choices=["steps", "minutes"], default="steps")
    parser.add_argument("--statistic", choices=sorted(STATISTICS), default="mean")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], help="CSVs of episodes")
    parser.add_argument("--smooth", type=int, default=10, help="updates averaged; 1: none")
    args = parser.parse_args()
    if args.out.suffix not in (".png", ".svg"):
        fail(f"--out {args.out}: give a name that ends in .png or .svg; both are written.")
    if not 1 <= args.smooth <= 10**6:
        fail(f"--smooth {args.smooth}: give the number of updates to average, 1 for none.")
    if args.peers and args.x == "minutes":
        fail("--peers: their files hold no minutes; use --x steps.")
    columns = ["global_step", "mean_return"] + (["seconds"] if args.x == "minutes" else [])
    updates = read(args.paths, columns)
    peers = pd.concat([read_peer(path) for path in args.peers]) if args.peers else None
    figure = draw(updates, peers, args.x, args.statistic, args.smooth)
    source = "Ours: " * bool(args.peers) + provenance(updates.steps, updates.versions)
    smoothing = f"moving average over {args.smooth} updates" if args.smooth > 1 else "not smoothed"
    line = args.statistic.replace("iqm", "interquartile mean")
    note = f"Line: {line} over seeds; band{' of ours' * bool(args.peers)}: 95% bootstrap interval, "
    note += f"from {ENOUGH} seeds on; {smoothing}. {source}"
    for gap in gaps(updates):
        print(gap, file=sys.stderr)
    save(figure, args.out.with_suffix(""), " ".join([note, *gaps(updates)]))
    print(f"wrote {args.out.with_suffix('.png')} and .svg")


if __name__ == "__main__":
    main()
