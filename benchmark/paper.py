"""Tables and figures of Engstrom et al. (2020), the PPO paper and CleanRL, ours beside theirs.

    python benchmark/paper.py table2                    # PPO, PPO-M, TRPO, TRPO+; AAI and ACLI
    python benchmark/paper.py table3                    # PPO without clipping
    python benchmark/paper.py figure1                   # which of four optimizations matter
    python benchmark/paper.py figure2                   # Figures 2 to 4: is there a trust region?
    python benchmark/paper.py differences               # what was tried where Table 2 and 3 differ
    python benchmark/paper.py ppo-table1 --results DIR  # the PPO paper's surrogates
    python benchmark/paper.py cleanrl                   # PPO's defaults beside CleanRL's scores

Reads runs.csv of a results folder (figure2 and ppo-table1: updates.csv too; differences: of several
folders), writes Markdown, PNG and SVG. Algorithms go by the names above; combinations and
surrogates are told by their settings.

- Final reward: that column of runs.csv, written by run.py.
- Intervals: 95% percentile bootstrap over seeds, from 3 seeds on.
- Normalized score of the mean return of the last 100 episodes: 0 = random policy, 1 = the best
  surrogate's mean on that task, both held fixed when an interval is drawn. The random policy is the
  untrained one: its score is the mean over the episodes that ended in any run's first update.
"""

import argparse
import itertools
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import plot
from matplotlib.ticker import LogFormatter
from plot import ENOUGH, KEY, fail

TASKS = ["Walker2d", "Hopper", "Humanoid"]
PUBLISHED = {  # Engstrom et al., Tables 2 and 3: mean and interval, by TASKS
    "PPO": [(3292, 3157, 3426), (2513, 2391, 2632), (806, 785, 827)],
    "PPO-M": [(2735, 2602, 2866), (2142, 2008, 2279), (674, 656, 695)],
    "TRPO": [(2791, 2709, 2873), (2043, 1948, 2136), (586, 576, 596)],
    "TRPO+": [(3050, 2976, 3126), (2466, 2381, 2549), (1030, 979, 1083)],
    "PPO-NoClip": [(2867, 2701, 3024), (2371, 2316, 2424), (831, 798, 869)],
    "PPO, OpenAI Baselines": [(3424,), (2316,), ()],
    "AAI": [(242,), (99,), (224,)],
    "ACLI": [(557,), (421,), (444,)],
}
DIFFERENCE = "ACLI − AAI"
PUBLISHED[DIFFERENCE] = [(x - y,) for (x,), (y,) in zip(PUBLISHED["ACLI"], PUBLISHED["AAI"])]
OPTIMIZATIONS = {  # of Figure 1: the setting, its value when on (also the script's default)
    "value clipping": ("clip_vloss", True),
    "reward scaling": ("reward_scaling", "returns"),
    "orthogonal initialization": ("init", "orthogonal"),
    "learning-rate annealing": ("anneal_lr", True),
}
SURROGATES = {  # (clip_coef, kl_coef, kl_target) -> name, score in the PPO paper's Table 1
    (math.inf, 0, None): ("no clipping or penalty", -0.39),
    (0.1, 0, None): ("clipping, ε = 0.1", 0.76),
    (0.2, 0, None): ("clipping, ε = 0.2", 0.82),
    (0.3, 0, None): ("clipping, ε = 0.3", 0.70),
    (math.inf, None, 0.003): ("adaptive KL, d = 0.003", 0.68),
    (math.inf, None, 0.01): ("adaptive KL, d = 0.01", 0.74),
    (math.inf, None, 0.03): ("adaptive KL, d = 0.03", 0.71),
    (math.inf, 0.3, None): ("fixed KL, β = 0.3", 0.62),
    (math.inf, 1, None): ("fixed KL, β = 1", 0.71),
    (math.inf, 3, None): ("fixed KL, β = 3", 0.72),
    (math.inf, 10, None): ("fixed KL, β = 10", 0.69),
}
CLEANRL = {  # its documentation: mean and standard deviation of 3 seeds, 1M steps, -v4 tasks
    "HalfCheetah": (1442.64, 46.03),
    "Walker2d": (2287.95, 571.78),
    "Hopper": (2382.86, 271.74),
    "InvertedPendulum": (963.09, 22.20),
    "Humanoid": (716.11, 49.08),
    "Pusher": (-40.38, 7.15),
}
ALGORITHMS = ["PPO", "PPO-M", "TRPO", "TRPO+"]
BASELINES = "PPO, OpenAI Baselines"  # published only
WITHOUT_CLIPPING = ["PPO", BASELINES, "PPO-M", "PPO-NoClip"]
WHOLE = "Fisher matrix of the whole batch"
TRIED = [  # a cell of Tables 2 and 3, what was changed, the folder of its runs
    ("TRPO", "Walker2d", "-v4, whose feet differ", "engstrom_versions"),
    ("TRPO+", "Walker2d", "-v4, whose feet differ", "engstrom_versions"),
    ("PPO-M", "Walker2d", "-v4, whose feet differ", "engstrom_versions"),
    ("TRPO", "Humanoid", "without contact forces", "engstrom_versions"),
    ("TRPO", "Humanoid", "a reset before every batch", "engstrom_batch_reset"),
    ("TRPO", "Humanoid", WHOLE, "engstrom_humanoid"),
    ("TRPO", "Humanoid", f"{WHOLE}, without contact forces", "engstrom_humanoid"),
    ("TRPO", "Humanoid", "all that the release did", "engstrom_release"),
    ("TRPO", "Humanoid", f"all that the release did, {WHOLE}", "engstrom_release_fisher"),
    ("TRPO", "Humanoid", "code of sb3-contrib", "peers/matched"),
    ("TRPO+", "Humanoid", "without contact forces", "engstrom_versions"),
    ("TRPO+", "Humanoid", "value gradients not clipped", "engstrom_humanoid"),
    ("TRPO+", "Humanoid", WHOLE, "engstrom_humanoid"),
    ("TRPO+", "Humanoid", "all that the release did", "engstrom_release"),
    ("TRPO+", "Humanoid", f"all that the release did, {WHOLE}", "engstrom_release_fisher"),
    ("PPO-NoClip", "Humanoid", "without contact forces", "engstrom_humanoid"),
]
PPO_TASKS = ["HalfCheetah", "Hopper", "InvertedDoublePendulum", "InvertedPendulum", "Reacher"]
PPO_TASKS += ["Swimmer", "Walker2d"]
ON_OFF = [("on", "#0072B2", "-"), ("off", "#D55E00", "--")]
TRUST_REGION = [("TRPO", "#009E73", "-"), ("PPO", "#0072B2", "-"), ("PPO-M", "#D55E00", "-")]
HELD_OUT = "held-out batch", "#777777", (0, (3, 2))


# ---- Statistics ----
def aai(*samples, axis=0):
    """Average algorithmic improvement: max(|PPO - TRPO+|, |PPO-M - TRPO|), of the means."""
    ppo, ppo_m, trpo, trpo_plus = (np.mean(x, axis=axis) for x in samples)  # as in ALGORITHMS
    return np.maximum(abs(ppo - trpo_plus), abs(ppo_m - trpo))


def acli(*samples, axis=0):
    """Average code-level improvement: max(|PPO - PPO-M|, |TRPO+ - TRPO|), of the means."""
    ppo, ppo_m, trpo, trpo_plus = (np.mean(x, axis=axis) for x in samples)
    return np.maximum(abs(ppo - ppo_m), abs(trpo_plus - trpo))


def excess(*samples, axis=0):
    """Positive where code-level optimizations bring more than another algorithm."""
    return acli(*samples, axis=axis) - aai(*samples, axis=axis)


IMPROVEMENTS = {"AAI": aai, "ACLI": acli, DIFFERENCE: excess}


def pooled_mean(*samples, axis=0):
    return np.mean(np.concatenate(samples, axis=axis), axis=axis)


def survival(rewards):
    """x, 1 - CDF(x) at the sorted rewards: the share of agents with more than x."""
    x = np.sort(rewards)
    return x, 1 - np.arange(1, len(x) + 1) / len(x)


def normalized(scores, random, best):
    return (scores - random) / (best - random)


def estimate(statistic, *samples):
    """-> value, low, high, seeds: NaN where a sample is empty, NaN bounds below ENOUGH seeds."""
    samples = [np.asarray(x, float) for x in samples]
    seeds = min(map(len, samples), default=0)
    value = float(statistic(*samples, axis=0)) if seeds else math.nan
    enough = seeds >= ENOUGH
    low, high = plot.bootstrap_interval(statistic, *samples) if enough else (math.nan, math.nan)
    return value, float(low), float(high), seeds


# ---- Results ----
def read_runs(folder):
    """runs.csv, with the settings read, and family: the task without its version."""
    columns = ["script", "settings", "steps", "last_100", "final_reward", "versions"]
    runs = plot.read_runs(folder, columns)
    runs["family"] = runs.task.str.replace(r"-v\d+$", "", regex=True)
    if (runs.groupby("family").task.nunique() > 1).any():
        fail(f"{folder} mixes versions of a task: {', '.join(sorted(set(runs.task)))}.")
    try:
        runs["settings"] = runs.settings.map(json.loads)
        if not all(isinstance(x, dict) for x in runs.settings):
            raise TypeError("no object")
        runs.settings.map(surrogate)  # fails where a number is none
    except (ValueError, TypeError) as error:
        fail(f"{folder}/runs.csv: settings are not those of a run, as JSON: {error}")
    return runs


def chosen(runs, names):
    """The runs of these algorithms; an error if there is none."""
    rows = runs[runs.algorithm.isin(names)]
    if rows.empty:
        fail(f"no run of {', '.join(names)}; there are {', '.join(sorted(set(runs.algorithm)))}.")
    return rows


def source(runs):
    return f"Ours: {seeds_of(runs)}, {plot.provenance(runs.steps, runs.versions)}"


def seeds_of(runs):
    """The number of seeds that an algorithm has on a task, as text."""
    return plot.count(runs.groupby(["algorithm", "task"]).seed.nunique())


def number(value, low=math.nan, high=math.nan, digits=0, missing="missing"):
    if math.isnan(value):
        return missing
    interval = "" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{value:.{digits}f}{interval}"


def cell(value, low, high, seeds, digits=0):
    """Ours, as text: with its seeds, and why there is no interval."""
    if not seeds:
        return "missing"
    few = ", too few for an interval" if seeds < ENOUGH else ""
    return f"{number(value, low, high, digits)}, {plot.count([seeds])}{few}"


def markdown(title, header, rows, note):
    lines = [f"## {title}", "", *(f"| {' | '.join(row)} |" for row in [header, *rows])]
    lines.insert(3, "|---" * len(header) + "|")
    return "\n".join([*lines, "", note, ""])


# ---- Engstrom et al. ----
def engstrom_table(title, names, folder):
    runs = chosen(read_runs(folder), names)
    rewards = {
        (name, task): runs.final_reward[(runs.algorithm == name) & (runs.family == task)].dropna()
        for name, task in itertools.product(names, TASKS)
    }
    bars, rows = [], []
    for name in names:
        texts = []
        for task, theirs in zip(TASKS, PUBLISHED[name]):
            if name in IMPROVEMENTS:
                four = [rewards[algorithm, task] for algorithm in ALGORITHMS]
                ours = estimate(IMPROVEMENTS[name], *four)
            else:
                ours = estimate(np.mean, rewards[name, task])
            theirs = (*theirs, math.nan, math.nan, math.nan)[:3]
            bars.append((task, name, ours[:3], theirs))
            texts += ["–" if name == BASELINES else cell(*ours), number(*theirs, missing="–")]
        rows.append([name, *texts])
    header = ["", *(f"{task}, {who}" for task in TASKS for who in ("ours", "published"))]
    note = f"Final mean reward [95% bootstrap interval, from {ENOUGH} seeds on]. {source(runs)} "
    note += "Published: at least 80 agents a cell, 1M steps, -v2 tasks."
    if "ACLI" in names:
        note += " Its ACLI for Hopper is 423 by its printed means."
    return markdown(title, header, rows, note), draw_bars(bars), note


def draw_bars(bars):
    """bars: (panel, name, ours, published), the last two value, low, high; NaN: not drawn."""
    titles = list(dict.fromkeys(panel for panel, _, _, _ in bars))
    figure, axes = plot.panels(titles)
    grid = axes[0].get_gridspec()
    row_of = {x: axis.get_subplotspec().rowspan.start for x, axis in zip(titles, axes)}
    rows = [[name for x, name, _, _ in bars if row_of[x] == row] for row in range(grid.nrows)]
    names_of = [list(dict.fromkeys(names)) for names in rows]
    heights = [0.8 + 0.3 * len(names) for names in names_of]
    grid.set_height_ratios(heights)
    figure.set_figheight(1 + sum(heights))
    looks = {"ours": ("#0072B2", "o", -0.14), "published": ("#777777", "D", 0.14)}
    for panel, name, *both in bars:
        axis, y = axes[titles.index(panel)], names_of[row_of[panel]].index(name)
        if math.isnan(both[0][0]) and name != BASELINES:
            where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
            axis.text(0.02, y - 0.14, "ours missing", color="#0072B2", **where)
        for (value, low, high), (colour, marker, shift) in zip(both, looks.values()):
            axis.plot([value], [y + shift], marker, color=colour, markersize=5)
            axis.plot([low, high], [y + shift] * 2, color=colour)
    for panel, axis in zip(titles, axes):
        names = names_of[row_of[panel]]
        labels = names if axis.get_subplotspec().is_first_col() else [""] * len(names)
        axis.set_yticks(range(len(names)), labels)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    handles = [plot.plt.Line2D([], [], color=c, marker=m) for c, m, _ in looks.values()]
    figure.legend(handles, looks, loc="outside upper center", ncols=2, frameon=False)
    return figure


def combination(settings):
    """Of a run's settings: which of OPTIMIZATIONS are on."""
    return tuple(settings.get(key, on) == on for key, on in OPTIMIZATIONS.values())


def best_rates(runs):
    """Of each task and combination, the runs at the learning rate with the best mean reward."""
    runs = runs.dropna(subset=["final_reward"])
    runs = runs.assign(combination=runs.settings.map(combination))
    runs["rate"] = runs.settings.map(lambda x: str(x.get("learning_rate", "default")))
    cell = ["family", "combination"]
    means = runs.groupby([*cell, "rate"], as_index=False).final_reward.mean()
    best = means.sort_values("final_reward").drop_duplicates(cell, keep="last")
    return runs.merge(best[[*cell, "rate"]], on=[*cell, "rate"])


def figure1(folder):
    runs = read_runs(folder)
    runs = best_rates(runs[runs.script == "ppo_continuous"])
    if runs.empty:
        fail(f"{folder} has no run of ppo_continuous with a final reward.")
    tasks, rows = sorted(set(runs.family)), []
    cells = list(itertools.product(tasks, enumerate(OPTIMIZATIONS)))
    titles = [name if task == tasks[0] else "" for task, (_, name) in cells]
    figure, axes = plot.panels(titles, 1.9, columns=4)
    for axis, (task, (i, name)) in zip(axes, cells):
        pool, texts = runs[runs.family == task], []
        for on, (_, colour, style) in zip((True, False), ON_OFF):
            rewards = pool.final_reward[[x[i] == on for x in pool.combination]].to_numpy()
            texts.append(f"{rewards.mean():.0f} ({len(rewards)})" if len(rewards) else "missing")
            if len(rewards):
                x, share = survival(rewards)
                x, share = [pool.final_reward.min(), *x, pool.final_reward.max()], [1, *share, 0]
                axis.step(x, share, color=colour, linestyle=style, where="post")
        rows.append([task, name, *texts, f"{pool.combination.nunique()} of 16"])
        if i == 0:
            axis.set_ylabel(f"{task}: agents above x")
        if task == tasks[-1]:
            axis.set_xlabel("final reward x")
    plot.legend(figure, ON_OFF)
    note = "1 - CDF of the final reward x, at each combination's best learning rate. "
    note += f"{source(runs)} Published: 5 seeds a combination, Humanoid-v2 and Walker2d-v2, curves "
    note += "without numbers; value clipping doesn't help, each of the other three does."
    header = ["task", "optimization", "on: mean (agents)", "off: mean (agents)", "combinations"]
    return markdown("Engstrom et al., Figure 1", header, rows, note), figure, note


def highest(rows, column, digits):
    """The highest value that each seed reaches, averaged over the seeds, as text."""
    value = rows.groupby("seed")[column].max().mean() if column in rows else math.nan
    return number(value, digits=digits)


def draw_trust_region(updates, tasks):
    """A column a task; a row each for return, maximum ratio and mean KL; held-out dashed."""
    quantities = {"mean_return": "return", "max_ratio": "maximum ratio", "mean_kl": "mean KL"}
    titles = [task if q == "mean_return" else "" for q in quantities for task in tasks]
    figure, axes = plot.panels(titles, 1.9, len(tasks))
    for axis, (quantity, task) in zip(axes, itertools.product(quantities, tasks)):
        rows = updates[updates.task == task]
        for name, colour, _ in TRUST_REGION:
            own = rows[rows.algorithm == name]
            for column, style in ((quantity, "-"), (f"heldout_{quantity}", HELD_OUT[2])):
                if column in own:
                    curve = plot.summarize(own, column)
                    plot.draw_curve(axis, curve, colour, style, band=column == quantity)
        if quantity == "max_ratio":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(LogFormatter())
            axis.yaxis.set_minor_formatter(LogFormatter())
            for clip_coef in set(rows.clip_coef.dropna()) if "clip_coef" in rows else ():
                axis.axhline(1 + clip_coef, color="black", linestyle=":", linewidth=1)
        if task == tasks[0]:
            axis.set_ylabel(quantities[quantity])
        if quantity == "mean_kl":
            axis.set_xlabel("million steps")
    plot.legend(figure, [*TRUST_REGION, HELD_OUT, ("1 + ε", "black", ":")])
    return figure


def figure2(folder):
    names = [name for name, _, _ in TRUST_REGION]
    runs = chosen(read_runs(folder), names)
    columns = ["global_step", "mean_return", "max_ratio", "mean_kl"]
    updates = chosen(plot.read_updates(folder, columns, whole=True), names)
    tasks = sorted(set(updates.task))
    rows = []
    for task, name in itertools.product(tasks, names):
        own = updates[(updates.task == task) & (updates.algorithm == name)]
        median = number(own.max_ratio.median(), digits=2)
        ratios = [highest(own, column, 2) for column in ("max_ratio", "heldout_max_ratio")]
        kls = [highest(own, column, 3) for column in ("mean_kl", "heldout_mean_kl")]
        rows.append([task, name, str(own.seed.nunique()), median, *ratios, *kls])
    header = ["task", "algorithm", "seeds", "maximum ratio: median", "highest", "held-out"]
    header += ["mean KL: highest", "held-out"]
    note = "Line: mean over seeds, moving average over 10 updates; band: 95% bootstrap interval, "
    note += f"from {ENOUGH} seeds on. {source(runs)} Published: at least 80 agents, -v2; maximum "
    note += "ratios up to about 17 on Humanoid and 30 on Hopper; mean KL below 0.07 throughout, "
    note += "rising for PPO-M, falling in PPO's second half; held-out agrees."
    title = "Engstrom et al., Figures 2 to 4: median of all updates; highest, mean over seeds"
    return markdown(title, header, rows, note), draw_trust_region(updates, tasks), note


def final_rewards(algorithm, task, what, folder):
    """Of a cell's runs in a results folder, with what was changed or nothing: by seed."""
    if folder.name == "matched":  # a peer's episodes
        peers = [plot.read_peer(path) for path in sorted(folder.glob(f"*__{task}-*.csv"))]
        return [peer.mean_return.tail(5).mean() for peer in peers]
    runs = read_runs(folder).sort_values("seed")
    names = [algorithm, f"{algorithm}, {what}"]
    return runs.final_reward[runs.algorithm.isin(names) & runs.task.str.contains(task)].dropna()


def differences(folder):
    runs, bars, rows, changed = read_runs(folder / "engstrom_table2"), [], [], []
    for algorithm, task in dict.fromkeys(x[:2] for x in TRIED):
        published = PUBLISHED[algorithm][TASKS.index(task)]
        tried = [x[2:] for x in TRIED if x[:2] == (algorithm, task)]
        for what, name in [("nothing (Tables 2 and 3)", "engstrom_table2"), *tried]:
            rewards = final_rewards(algorithm, task, what, folder / name)
            ours = estimate(np.mean, rewards)
            changed += [len(rewards)] * (name != "engstrom_table2" and len(rewards) > 0)
            bars.append((f"{algorithm}, {task}", what, ours[:3], published))
            seeds = ", ".join(number(x) for x in rewards) or "missing"
            rows.append([task, algorithm, what, seeds, number(*ours[:3]), number(*published)])
    header = ["task", "algorithm", "what was changed", "per seed", "mean", "published"]
    note = f"Final mean reward [95% bootstrap interval, from {ENOUGH} seeds on]. With nothing "
    note += f"changed {seeds_of(runs)}, else {plot.count(changed or [0])} (differences.md). "
    note += f"{plot.provenance(runs.steps, runs.versions)} "
    note += "Published: at least 80 agents a cell, 1M steps, -v2 tasks."
    title = "Engstrom et al., Tables 2 and 3: what was tried where we differ"
    return markdown(title, header, rows, note), draw_bars(bars), note


# ---- PPO paper ----
def surrogate(settings):
    """Of a run's settings: the name of its surrogate, None if the paper doesn't have it."""
    clip_coef, kl_target = float(settings.get("clip_coef", 0.2)), settings.get("kl_target")
    kl_coef = float(settings.get("kl_coef", 0)) if kl_target is None else None
    return SURROGATES.get((clip_coef, kl_coef, kl_target), (None,))[0]


def random_scores(updates):
    """task -> mean return of the episodes that ended in first updates, played untrained."""
    first = updates[updates.global_step == updates.groupby(KEY).global_step.transform("min")]
    first = first[first.episodes > 0]
    total = (first.mean_return * first.episodes).groupby(first.task).sum()
    return total / first.groupby("task").episodes.sum()


def ppo_table1(folder):
    runs = read_runs(folder)
    runs = runs[runs.script == "ppo_continuous"]
    runs = runs.assign(surrogate=runs.settings.map(surrogate)).dropna(subset=["surrogate"])
    if runs.empty:
        fail(f"{folder} has no run with a surrogate of the PPO paper's Table 1.")
    columns = ["global_step", "episodes", "mean_return"]
    updates = plot.read_updates(folder, columns, whole=True)
    best = runs.groupby(["task", "surrogate"]).last_100.mean().groupby("task").max()
    limits = runs.task.map(random_scores(updates)), runs.task.map(best)
    runs["score"] = normalized(runs.last_100, *limits)
    tasks, bars, rows = sorted(set(runs.task)), [], []
    for name, published in SURROGATES.values():
        own = runs[runs.surrogate == name]
        scores = [own.score[own.task == task].dropna() for task in tasks]
        ours = estimate(pooled_mean, *scores)
        bars.append(("average normalized score", name, ours[:3], (published, math.nan, math.nan)))
        texts = [number(x.mean(), digits=2) for x in scores]
        rows.append([name, *texts, cell(*ours, digits=2), f"{published:.2f}"])
    header = ["surrogate", *tasks, "average, ours", "published"]
    missing = [x for x in PPO_TASKS if x not in set(runs.family)]
    note = "Normalized score of the last 100 episodes: 0 = untrained policy, 1 = the best "
    note += f"surrogate's mean on the task [95% bootstrap interval]. {source(runs)} "
    note += f"Missing tasks: {', '.join(missing)}. " if missing else ""
    note += "Published: 7 tasks (-v1), 3 seeds each, 1M steps, no intervals."
    return markdown("PPO paper, Table 1", header, rows, note), draw_bars(bars), note


# ---- CleanRL ----
def cleanrl(folder):
    runs = chosen(read_runs(folder), ["PPO"])
    peers = sorted((folder.parent / "peers").glob("cleanrl_ppo__*.csv"))
    again = {path.stem: plot.read_csv(path, ["episodic_return"]) for path in peers}
    again = {name: x.episodic_return[-100:].mean() for name, x in again.items()}
    bars, rows = [], []
    for task, (mean, deviation) in CLEANRL.items():
        scores = runs.sort_values("seed").last_100[runs.family == task].dropna()
        ours, digits = estimate(np.mean, scores), 0 if abs(mean) > 100 else 1
        bars.append((task, "PPO", ours[:3], (mean, mean - deviation, mean + deviation)))
        seeds = ", ".join(number(x, digits=digits) for x in scores) or "missing"
        published = f"{mean:.{digits}f} ± {deviation:.{digits}f}"
        own = [number(x, digits=digits) for name, x in again.items() if f"__{task}-" in name]
        rows.append(
            [task, seeds, number(*ours[:3], digits=digits), published, ", ".join(own) or "–"]
        )
    header = ["task", "ours, per seed", "mean", "CleanRL, -v4", "its code on -v5, per seed"]
    note = "Mean return of the last 100 training episodes [95% bootstrap interval, from "
    note += f"{ENOUGH} seeds on]. {source(runs)} "
    note += "CleanRL: mean ± standard deviation of 3 seeds, 1M steps, -v4 tasks; "
    note += "its code on -v5: benchmark/results/peers."
    return markdown("PPO beside CleanRL", header, rows, note), draw_bars(bars), note


TABLE_2 = partial(engstrom_table, "Engstrom et al., Table 2", [*ALGORITHMS, *IMPROVEMENTS])
TABLE_3 = partial(engstrom_table, "Engstrom et al., Table 3", WITHOUT_CLIPPING)
ARTIFACTS = {  # name -> function of a results folder, that folder below benchmark/results
    "table2": (TABLE_2, "engstrom_table2"),
    "table3": (TABLE_3, "engstrom_table2"),
    "figure1": (figure1, "engstrom_figure1"),
    "figure2": (figure2, "engstrom_table2"),
    "differences": (differences, ""),  # several folders
    "ppo-table1": (ppo_table1, "ppo_table1"),
    "cleanrl": (cleanrl, "mujoco_ppo"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifact", choices=ARTIFACTS)
    parser.add_argument("--results", type=Path, help="results folder; default: by artifact")
    parser.add_argument("--out", type=Path, default=plot.FIGURES, help="folder for the files")
    args = parser.parse_args()
    function, folder = ARTIFACTS[args.artifact]
    default = plot.FIGURES.parent / "results" / folder
    text, figure, note = function(args.results or default)
    plot.save(figure, args.out / args.artifact, note)
    try:
        (args.out / f"{args.artifact}.md").write_text(text)
    except OSError as error:
        fail(f"the table cannot be written: {error}")
    print(text)


if __name__ == "__main__":
    main()
