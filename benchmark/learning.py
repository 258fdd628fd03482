"""Learning curves and the table of final returns of finished runs.

    python benchmark/learning.py runs/*

Writes results/learning.csv (one row a run and update) and figures/learning.png under --out, over
the committed ones unless told otherwise, and prints the README's table: the mean return of the last
100 training episodes, seed by seed.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
COLOURS = {"ppo_continuous": "#0072B2", "trpo_continuous": "#D55E00"}
COLOURS["ppo_minimal_no_tricks"] = "#009E73"


def read_run(directory):
    """One row an update: what was run, its steps, and the mean return of the last 100 episodes."""
    config = json.loads((directory / "config.json").read_text())
    updates = pd.read_csv(directory / "updates.csv")
    episodes = pd.read_csv(directory / "episodes.csv")
    last_100 = episodes.episodic_return.rolling(100, min_periods=1).mean().to_numpy()
    ended = np.searchsorted(episodes.global_step, updates.global_step, side="right")
    last_100 = np.append(last_100, np.nan)  # of no episode, at index -1
    rows = updates[["global_step", "seconds", "episodes", "mean_return"]].copy()
    rows["last_100"] = last_100[ended - 1]
    settings, versions = config["settings"], config["versions"]
    rows.insert(0, "script", config["script"])
    rows.insert(1, "task", settings["env_id"])
    rows.insert(2, "seed", settings["seed"])
    rows["compile"] = settings.get("compile", False)
    rows["versions"] = " ".join(f"{name} {version}" for name, version in versions.items())
    return rows.round(3)


def table(results):
    """Markdown: the last row of last_100 of each seed, and their mean."""
    final = results.groupby(["script", "task", "seed"]).tail(1)
    lines = ["| script | task | steps | " + "per seed | mean |", "|---|---|---|---|---|"]
    for (script, task), rows in final.groupby(["script", "task"]):
        seeds = ", ".join(f"{row.last_100:.0f}" for row in rows.sort_values("seed").itertuples())
        steps = f"{rows.global_step.max():,}"
        lines.append(f"| {script} | {task} | {steps} | {seeds} | {rows.last_100.mean():.0f} |")
    return "\n".join(lines)


def draw(results, path):
    """One panel a task, one colour a script: a thin line a seed, a thick one for their mean."""
    tasks = sorted(results.task.unique())
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 3), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        for script, rows in results[results.task == task].groupby("script"):
            curves = rows.pivot_table(index="global_step", columns="seed", values="last_100")
            color, label = COLOURS.get(script, "#000000"), f"{script}, {curves.shape[1]} seeds"
            axis.plot(curves.index / 1e6, curves, color=color, alpha=0.3, linewidth=0.8)
            axis.plot(curves.index / 1e6, curves.mean(axis=1), color=color, label=label)
        axis.set_title(task)
        axis.set_xlabel("million steps")
        axis.legend(loc="lower right", frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("mean return, last 100 episodes")
    figure.text(0.99, 0.005, results.versions.iloc[0], ha="right", fontsize=6, color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, default=HERE, help="folder; default: benchmark")
    options = parser.parse_args()
    directories = [path for path in options.runs if (path / "updates.csv").is_file()]
    if not directories:
        sys.exit("learning.py: none of these is a run directory with an updates.csv.")
    results = pd.concat([read_run(path) for path in directories], ignore_index=True)
    results = results.sort_values(["script", "task", "seed", "global_step"])
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    results.to_csv(options.out / "results" / "learning.csv", index=False)
    draw(results, options.out / "figures" / "learning.png")
    print(table(results))


if __name__ == "__main__":
    main()
