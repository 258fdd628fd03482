"""benchmark/paper.py: its statistics by hand, its tables and figures from made-up results."""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import paper

VERSIONS = "python 3.11.7 torch 2.13.0"


def write_results(folder, runs, updates=10, columns=()):
    """runs: (algorithm, task, seed, settings, last_100) -> runs.csv, updates.csv in the folder.

    The final reward is 1000 more than last_100, so that they can't be mistaken for each other.
    """
    rows, tables = [], []
    for algorithm, task, seed, settings, reward in runs:
        key = {"algorithm": algorithm, "task": task, "seed": seed}
        script = "trpo_continuous" if "TRPO" in algorithm else "ppo_continuous"
        row = key | {"script": script, "settings": json.dumps(settings), "steps": 2048 * updates}
        row |= {"last_100": reward, "final_reward": reward + 1000, "versions": VERSIONS}
        rows.append(row)
        table = pd.DataFrame({"global_step": 2048 * np.arange(1, updates + 1)}).assign(**key)
        table["mean_return"] = np.linspace(10, reward, updates)
        table["episodes"], table["clip_coef"] = 4, math.inf if "TRPO" in algorithm else 0.2
        for column in columns:
            table[column] = 1 + np.linspace(0.1, 0.1 * seed, updates)
        tables.append(table)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    pd.concat(tables).to_csv(folder / "updates.csv", index=False)
    return folder


def make(monkeypatch, tmp_path, artifact, results):
    """Run the command -> its Markdown; its three files have to be there."""
    argv = ["paper.py", artifact, "--results", str(results), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    paper.main()
    assert (tmp_path / f"out/{artifact}.png").stat().st_size > 5000
    assert "<svg" in (tmp_path / f"out/{artifact}.svg").read_text()
    return (tmp_path / f"out/{artifact}.md").read_text()


def rows_of(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [[text.strip() for text in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    "task, improvements",
    [("Walker2d", (242, 557)), ("Hopper", (99, 423)), ("Humanoid", (224, 444))],
)
def test_aai_and_acli_of_the_published_means(task, improvements):
    i = paper.TASKS.index(task)
    means = [[paper.PUBLISHED[name][i][0]] for name in paper.ALGORITHMS]
    assert (paper.aai(*means), paper.acli(*means)) == improvements
    printed = paper.PUBLISHED["AAI"][i][0], paper.PUBLISHED["ACLI"][i][0]
    assert printed == (improvements if task != "Hopper" else (99, 421))


def test_survival_is_the_share_of_agents_with_more():
    x, share = paper.survival([4, 1, 3, 3])
    assert list(x) == [1, 3, 3, 4]
    np.testing.assert_allclose(share, [0.75, 0.5, 0.25, 0])


def test_estimate_has_no_interval_below_three_seeds():
    assert paper.estimate(np.mean, [])[3] == 0
    value, low, high, seeds = paper.estimate(np.mean, [1, 3])
    assert (value, seeds) == (2, 2) and math.isnan(low) and math.isnan(high)
    assert paper.estimate(np.mean, [5, 5, 5]) == (5, 5, 5, 3)


@pytest.mark.parametrize("seeds, coverage", [(3, 3 / 4), (5, 5 / 6)])
def test_intervals_of_few_seeds_hold_the_mean_less_often_than_they_say(seeds, coverage):
    """As the README warns: of normal data in 3 of 4 and 5 of 6 cases, not in 95%."""
    samples = np.random.default_rng(1).normal(size=(600, seeds))
    bounds = [paper.estimate(np.mean, sample)[1:3] for sample in samples]
    held = np.mean([low <= 0 <= high for low, high in bounds])
    assert abs(held - coverage) < 0.05


def test_pooled_mean_resamples_within_each_task():
    assert paper.estimate(paper.pooled_mean, [0, 0, 0], [1, 1, 1]) == (0.5, 0.5, 0.5, 3)
    assert math.isnan(paper.estimate(paper.pooled_mean, [0, 0, 0], [])[0])


def test_best_rate_of_each_combination_by_mean_reward():
    rewards = {1e-4: (1, 2, 3), 2e-4: (0, 0, 9), 3e-4: (2.5, 2.5, 2.5)}
    rows = [
        {"family": "Hopper", "settings": {"learning_rate": rate}, "final_reward": x}
        for rate, xs in rewards.items()
        for x in xs
    ]
    rows.append({"family": "Hopper", "settings": {"init": "xavier"}, "final_reward": -1})
    kept = paper.best_rates(pd.DataFrame(rows))
    assert sorted(kept.final_reward) == [-1, 0, 0, 9]


def test_surrogate_by_settings():
    assert paper.surrogate({}) == "clipping, ε = 0.2"
    assert paper.surrogate({"clip_coef": "inf"}) == "no clipping or penalty"
    assert paper.surrogate({"clip_coef": "inf", "kl_coef": 3.0}) == "fixed KL, β = 3"
    adaptive = {"clip_coef": "inf", "kl_coef": 1.0, "kl_target": 0.01}
    assert paper.surrogate(adaptive) == "adaptive KL, d = 0.01"
    assert paper.surrogate({"clip_coef": 0.25}) is None


def test_table2_beside_the_published_and_missing_as_missing(monkeypatch, tmp_path):
    rewards = {"PPO": 300, "PPO-M": 100, "TRPO": 150, "TRPO+": 310}
    runs = [(name, "Hopper-v5", s, {}, x + s) for name, x in rewards.items() for s in (1, 2, 3)]
    runs += [("PPO", "Walker2d-v5", s, {}, 700 + s) for s in (1, 2)]
    text = make(monkeypatch, tmp_path, "table2", write_results(tmp_path / "results", runs))
    header, ppo, ppo_m, _, trpo_plus, aai, acli, excess = rows_of(text)
    assert header[1:4] == ["Walker2d, ours", "Walker2d, published", "Hopper, ours"]
    assert ppo[1] == "1702, 2 seeds, too few for an interval"
    assert ppo[2] == "3292 [3157, 3426]"
    assert ppo[3].startswith("1302 [") and ppo[3].endswith("], 3 seeds")
    assert ppo_m[1] == "missing" and trpo_plus[5] == "missing" and aai[1] == "missing"
    assert aai[3].startswith("50 [") and aai[4] == "99"
    assert acli[3].startswith("200 [") and acli[4] == "421"
    assert excess[3].startswith("150 [") and excess[2::2] == ["315", "322", "220"]
    assert "2 to 3 seeds" in text and "20,480 steps" in text and VERSIONS in text


def test_table3(monkeypatch, tmp_path):
    runs = [("PPO-NoClip", "Humanoid-v5", s, {"clip_coef": "inf"}, 800) for s in range(3)]
    text = make(monkeypatch, tmp_path, "table3", write_results(tmp_path / "results", runs))
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["PPO-NoClip"][4:] == ["1800 [1800, 1800], 3 seeds", "831 [798, 869]"]
    assert rows["PPO, OpenAI Baselines"] == ["–", "3424", "–", "2316", "–", "–"]
    assert rows["PPO-M"][4] == "missing"


def test_figure1(monkeypatch, tmp_path):
    runs = []
    for on in itertools.product([True, False], repeat=4):
        options = zip(paper.OPTIMIZATIONS.values(), on, (False, "none", "xavier", False))
        off = {key: x for (key, _), is_on, x in options if not is_on}
        reward = 100 + 50 * on[1]  # of reward scaling alone
        for rate, seed in itertools.product((1e-4, 2e-4), (1, 2)):
            name = f"{on} {rate}"
            run = (name, "Walker2d-v5", seed, off | {"learning_rate": rate}, reward + 1e4 * rate)
            runs.append(run)
    text = make(monkeypatch, tmp_path, "figure1", write_results(tmp_path / "results", runs, 2))
    rows = {row[1]: row[2:] for row in rows_of(text)}
    assert rows["reward scaling"] == ["1152 (16)", "1102 (16)", "16 of 16"]
    assert rows["value clipping"] == ["1127 (16)", "1127 (16)", "16 of 16"]


def test_figure2(monkeypatch, tmp_path):
    names, tasks = ("TRPO", "PPO", "PPO-M"), ("Hopper-v5", "Walker2d-v5")
    runs = [(n, t, s, {}, 100 * s) for n in names for t in tasks for s in (1, 2, 3)]
    columns = "max_ratio", "mean_kl", "heldout_max_ratio", "heldout_mean_kl"
    folder = write_results(tmp_path / "results", runs, columns=columns)
    rows = rows_of(make(monkeypatch, tmp_path, "figure2", folder))
    assert rows[1] == ["Hopper-v5", "TRPO", "3", "1.13", "1.20", "1.20", "1.200", "1.200"]
    folder = write_results(tmp_path / "results", runs[:3], columns=columns[:2])
    rows = rows_of(paper.figure2(folder)[0])
    assert rows[1][5] == "missing" and rows[2][3:5] == ["missing", "missing"]


def test_cleanrl_beside_ours_seed_by_seed(monkeypatch, tmp_path):
    runs = [("PPO", "Hopper-v5", seed, {}, 1000.0 * seed) for seed in (3, 1, 2)]
    runs += [("PPO", "Pusher-v5", 1, {}, -41.26)]
    (tmp_path / "peers").mkdir()
    for seed, last in (1, 300), (2, 500):
        returns = [1e6, *[last] * 100]
        episodes = pd.DataFrame({"global_step": range(101), "episodic_return": returns})
        episodes.to_csv(tmp_path / f"peers/cleanrl_ppo__Hopper-v5__s{seed}.csv", index=False)
    markdown = make(monkeypatch, tmp_path, "cleanrl", write_results(tmp_path / "in", runs))
    rows = {row[0]: row[1:] for row in rows_of(markdown)}
    assert rows["Hopper"][0] == "1000, 2000, 3000" and rows["Hopper"][1].startswith("2000 [")
    assert rows["Hopper"][2:] == ["2383 ± 272", "300, 500"]
    assert rows["Pusher"] == ["-41.3", "-41.3", "-40.4 ± 7.2", "–"]
    assert rows["Humanoid"] == ["missing", "missing", "716 ± 49", "–"]


def test_ppo_table1_normalizes_by_the_untrained_and_the_best(monkeypatch, tmp_path):
    kinds = {"clip": ({}, 110), "none": ({"clip_coef": "inf"}, -40), "odd": ({"clip_coef": 9}, 1e6)}
    runs = [
        (name, task, seed, settings, 10 + (reward - 10) * scale)
        for name, (settings, reward) in kinds.items()
        for task, scale in (("Hopper-v5", 1), ("Swimmer-v5", 2))
        for seed in (1, 2, 3)
    ]
    folder = write_results(tmp_path / "results", runs)
    text = make(monkeypatch, tmp_path, "ppo-table1", folder)
    rows = {row[0]: row[1:] for row in rows_of(text)}
    # The first updates return 10: 0. clip: 110 -> 1; none: -40 -> -50/100.
    assert rows["clipping, ε = 0.2"] == ["1.00", "1.00", "1.00 [1.00, 1.00], 3 seeds", "0.82"]
    assert rows["no clipping or penalty"][:2] == ["-0.50", "-0.50"]
    assert rows["fixed KL, β = 3"] == ["missing", "missing", "missing", "0.72"]
    assert "Missing tasks: HalfCheetah, InvertedDoublePendulum" in text


def test_differences_beside_the_unchanged_cells(monkeypatch, tmp_path):
    cells = [("TRPO", "Walker2d"), ("TRPO", "Humanoid"), ("TRPO+", "Humanoid")]
    runs = [(name, f"{task}-v5", seed, {}, 10 * seed) for name, task in cells for seed in (1, 2, 3)]
    write_results(tmp_path / "engstrom_table2", runs)
    versions = [("TRPO", "Walker2d-v4", 1, {}, 70), ("TRPO+", "Humanoid-v5", 1, {}, 80)]
    write_results(tmp_path / "engstrom_versions", versions)
    names = "TRPO, Fisher matrix of the whole batch", "TRPO+, value gradients not clipped"
    runs = [(name, "Humanoid-v5", 1, {}, reward) for name, reward in zip(names, (90, 100))]
    write_results(tmp_path / "engstrom_humanoid", runs)
    task = "benchmark.batch_reset:BatchReset/Humanoid-v5"
    write_results(tmp_path / "engstrom_batch_reset", [("TRPO", task, 1, {}, 110)])
    task = "benchmark.batch_reset:Release/Humanoid-v5"
    write_results(tmp_path / "engstrom_release", [("TRPO+", task, 1, {}, 120)])
    write_results(tmp_path / "engstrom_release_fisher", [("TRPO", task, 1, {}, 130)])
    matched = tmp_path / "peers/matched"
    matched.mkdir(parents=True)
    steps = 2048 * np.arange(1, 11)
    episodes = pd.DataFrame({"global_step": steps, "episodic_return": np.arange(10)})
    episodes.to_csv(matched / "sb3_contrib_trpo__Humanoid-v5__s1.csv", index=False)
    rows = rows_of(make(monkeypatch, tmp_path, "differences", tmp_path))
    nothing = "nothing (Tables 2 and 3)"
    assert rows[1][:4] == ["Walker2d", "TRPO", nothing, "1010, 1020, 1030"]
    assert rows[1][4].startswith("1020 [1010, 1030") and rows[1][5] == "2791 [2709, 2873]"
    assert rows[2] == ["Walker2d", "TRPO", "-v4, whose feet differ", "1070", "1070", rows[1][5]]
    assert rows[3][:4] == ["Walker2d", "TRPO+", nothing, "missing"]
    found = {tuple(row[1:3]): row[3] for row in rows if row[0] == "Humanoid"}
    assert found["TRPO", "a reset before every batch"] == "1110"
    assert found["TRPO", "code of sb3-contrib"] == "7"  # the mean of its last 5 batches
    assert found["TRPO", "Fisher matrix of the whole batch"] == "1090"
    assert found["TRPO", "without contact forces"] == "missing"
    assert found["TRPO+", "without contact forces"] == "1080"
    assert found["TRPO+", "value gradients not clipped"] == "1100"
    assert found["TRPO+", "all that the release did"] == "1120"
    both = "all that the release did, Fisher matrix of the whole batch"
    assert found["TRPO", both] == "1130" and found["TRPO+", both] == "missing"


@pytest.mark.parametrize("artifact", paper.ARTIFACTS)
def test_bad_input_is_one_line(artifact, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        make(monkeypatch, tmp_path, artifact, tmp_path)
    assert stop.value.code == 2
    folder = tmp_path / "engstrom_table2" if artifact == "differences" else tmp_path
    error = f"paper.py: {folder} is no results folder: it has no runs.csv."
    if artifact == "differences":
        error += " Type python benchmark/run.py benchmark/experiments/engstrom_table2.toml"
        error += f" --results {tmp_path} first."
    assert capsys.readouterr().err == f"{error}\n"


def test_table_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, capsys):
    results = write_results(tmp_path / "results", [("PPO", "Hopper-v5", 1, {}, 100)])
    (tmp_path / "out/table2.md").mkdir(parents=True)
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, "table2", results)
    error = capsys.readouterr().err
    assert "the table cannot be written: " in error and error.count("\n") == 1


@pytest.mark.parametrize("artifact", ["table2", "figure2", "cleanrl"])
@pytest.mark.parametrize(
    "column, value, message",
    [
        ("steps", "", "line 3: steps is missing or no number."),
        ("steps", "many", "line 3: steps is missing or no number."),
        ("seed", "one", "line 3: seed is missing or no number."),
        ("versions", "", "line 3: versions is missing or no number."),
        (None, None, "runs.csv has no run in it."),
    ],
)
def test_damaged_results(artifact, column, value, message, monkeypatch, tmp_path, capsys):
    runs = [("PPO", "Hopper-v5", seed, {}, 100) for seed in (1, 2)]
    folder = write_results(tmp_path / "results", runs)
    table = pd.read_csv(folder / "runs.csv", dtype=str)
    if column:
        table.loc[1, column] = value
    table[: None if column else 0].to_csv(folder / "runs.csv", index=False)
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, artifact, folder)
    error = capsys.readouterr().err
    assert error.endswith(f"{message}\n") and error.count("\n") == 1


@pytest.mark.parametrize("artifact", ["table2", "ppo-table1"])
@pytest.mark.parametrize("settings", ["3", "[]", '{"clip_coef": "abc"}', '{"kl_target": [1]}', "{"])
def test_settings_of_no_run(artifact, settings, monkeypatch, tmp_path, capsys):
    folder = write_results(tmp_path / "results", [("PPO", "Hopper-v5", 1, {}, 100)])
    table = pd.read_csv(folder / "runs.csv").assign(settings=settings)
    table.to_csv(folder / "runs.csv", index=False)
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, artifact, folder)
    error = capsys.readouterr().err
    assert "settings are not those of a run" in error and error.count("\n") == 1


def test_text_among_numbers_is_missing_and_numbers_among_names_are_names(monkeypatch, tmp_path):
    runs = [("PPO", "Hopper-v5", 1, {}, 100), ("PPO", "2048", 1, {}, 100)]
    columns = "max_ratio", "mean_kl", "heldout_max_ratio", "heldout_mean_kl"
    folder = write_results(tmp_path / "results", runs, columns=columns)
    table = pd.read_csv(folder / "updates.csv").astype({"heldout_mean_kl": str, "clip_coef": str})
    table[["heldout_mean_kl", "clip_coef"]] = "text"
    table.to_csv(folder / "updates.csv", index=False)
    rows = rows_of(make(monkeypatch, tmp_path, "figure2", folder))
    assert ["2048", "PPO", "1", "1.10", "1.10", "1.10", "1.100", "missing"] in rows
    folder = write_results(tmp_path / "others", runs[1:])
    assert "Hopper | missing" in make(monkeypatch, tmp_path, "cleanrl", folder)


def test_no_run_of_the_wanted_algorithms(monkeypatch, tmp_path, capsys):
    folder = write_results(tmp_path / "results", [("A2C", "Hopper-v5", 1, {}, 1)])
    with pytest.raises(SystemExit):
        make(monkeypatch, tmp_path, "table2", folder)
    assert capsys.readouterr().err.endswith("there are A2C.\n")
