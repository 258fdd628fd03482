"""benchmark/plot.py: its statistics by hand, its figures from made-up runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmark"))

import plot


def updates_of(seed, returns, task="Hopper-v5", algorithm="PPO"):
    """Rows as plot.read gives them, an update every 1000 steps and 60 seconds."""
    table = pd.DataFrame({"mean_return": np.asarray(returns, float)})
    table["global_step"] = 1000 * np.arange(1, len(returns) + 1)
    table["seconds"] = table.global_step * 0.06
    return table.assign(algorithm=algorithm, task=task, seed=seed, versions="torch 2")


def write_run(folder, seed, returns, **settings):
    folder.mkdir(parents=True)
    settings = {"env_id": "Hopper-v5", "clip_coef": 0.2} | settings | {"seed": seed}
    config = {"script": "ppo_continuous", "settings": settings, "versions": {"torch": "2.13.0"}}
    (folder / "config.json").write_text(json.dumps(config))
    columns = ["global_step", "seconds", "mean_return"]
    updates_of(seed, returns)[columns].to_csv(folder / "updates.csv", index=False)
    return folder


def run_plot(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, arguments)])
    plot.main()


def test_interquartile_mean_by_hand():
    iqm = plot.STATISTICS["iqm"]
    assert iqm(np.array([-100, 1, 2, 3, 4, 5, 6, 1000])) == 3.5
    assert iqm(np.array([[0, 0], [1, 2], [3, 4], [9, 9]])).tolist() == [2, 3]
    assert iqm(np.array([1, 2, 9])) == 4  # as the mean below 4 seeds


@pytest.mark.parametrize("statistic", plot.STATISTICS.values())
def test_bootstrap_of_a_constant_is_that_constant(statistic):
    low, high = plot.bootstrap_interval(statistic, np.full((5, 3), 7.0))
    assert low.tolist() == high.tolist() == [7, 7, 7]


def test_bootstrap_interval_of_two_seeds_by_hand():
    """Means of two draws from {0, 1}: 0, ½, 1 with probabilities ¼, ½, ¼."""
    assert plot.bootstrap_interval(np.mean, np.array([0.0, 1.0])) == (0, 1)


def test_bootstrap_draws_whole_curves():
    curves = np.array([[0.0, 10.0], [1.0, 11.0], [5.0, 15.0]])
    low, high = plot.bootstrap_interval(np.mean, curves)
    assert low[1] - low[0] == pytest.approx(10) and high[1] - high[0] == pytest.approx(10)


def test_bootstrap_is_stratified():
    def pooled(*tasks, axis=0):
        return np.mean(np.concatenate(tasks, axis=axis), axis=axis)

    between_tasks_only = np.zeros(4), np.full(4, 10.0)
    assert plot.bootstrap_interval(pooled, *between_tasks_only) == (5, 5)


@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_smoothing_keeps_a_constant_to_its_ends(window):
    assert plot.smoothed(np.full(20, 3.7), window).tolist() == [3.7] * 20


def test_smoothing_by_hand():
    assert plot.smoothed([0, 3, 6, 0], 3).tolist() == [1.5, 3, 3, 3]


def test_the_grid_spans_what_every_seed_has():
    seeds = [(np.array([1.0, 5.0]), np.array([0.0, 4.0])), (np.array([2.0, 3.0]), np.ones(2))]
    grid, values = plot.on_grid(seeds, points=3)
    assert grid.tolist() == [2, 2.5, 3]
    assert values.tolist() == [[1, 1.5, 2], [1, 1, 1]]
    disjoint = [(np.array([1.0, 2.0]), np.ones(2)), (np.array([3.0, 4.0]), np.ones(2))]
    assert len(plot.on_grid(disjoint)[0]) == 0


@pytest.mark.parametrize("x, end", [("steps", 0.004), ("minutes", 4)])
def test_line_and_band_end_with_the_shortest_seed(x, end):
    updates = pd.concat([updates_of(1, [1] * 9), updates_of(2, [3] * 4), updates_of(3, [5] * 9)])
    curve = plot.summarize(updates, x=x)
    assert curve.seeds == 3 and curve.x[-1] == pytest.approx(end)
    np.testing.assert_allclose(curve.line, 3)
    assert (curve.low >= 1).all() and (curve.high <= 5).all() and (curve.low < 3).all()


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_fewer_than_three_seeds_have_no_band(seeds):
    updates = pd.concat([updates_of(seed, [1, 2, 3]) for seed in range(seeds)])
    curve = plot.summarize(updates, smooth=1)
    assert (curve.low is None) == (seeds < 3) and curve.line[[0, -1]].tolist() == [1, 3]


def test_updates_in_which_no_episode_ended_are_bridged():
    curve = plot.summarize(updates_of(1, [np.nan, 2, np.nan, 4]), smooth=1)
    assert curve.x[0] == 0.002 and curve.x[-1] == 0.004
    np.testing.assert_allclose(curve.line, 1000 * curve.x)


def test_gaps_names_missing_and_short_seeds():
    tables = [updates_of(s, [1] * 9, task) for s in (1, 2, 3) for task in ("A", "B")]
    tables += [updates_of(1, [1] * 9, "A", "TRPO"), updates_of(2, [1] * 5, "A", "TRPO")]
    assert plot.gaps(pd.concat(tables)) == [
        "TRPO on A: missing seed 3.",
        "TRPO on A: drawn to 5,000 steps, where seed 2 ends.",
    ]  # and on B, where TRPO may not have been asked for, nothing is drawn


def test_steps_count_to_the_end_though_no_episode_ended_there(monkeypatch, tmp_path):
    notes = []
    monkeypatch.setattr(plot, "save", lambda figure, path, note: notes.append(note))
    run_plot(monkeypatch, write_run(tmp_path / "a", 1, [1, 2, np.nan]))
    assert " 3,000 steps a seed." in notes[0]


def test_run_directories_to_figure(monkeypatch, tmp_path, capsys):
    write_run(tmp_path / "a", 1, [1, 2, 3, 4])
    write_run(tmp_path / "b", 2, [1, 2, 3, 4])
    write_run(tmp_path / "c", 1, [2, 2, 2, 2], clip_coef="inf")
    write_run(tmp_path / "d", 1, [9, 9])  # shorter than a, of the same seed
    write_run(tmp_path / "e", 3, [])
    pd.DataFrame(
        {"global_step": [100, 2500, 6000], "episodic_return": [1.0, 2, 3], "episodic_length": 9}
    ).to_csv(tmp_path / "peer__Hopper-v5__s1.csv", index=False)
    runs, peer = [tmp_path / x for x in "abcde"], tmp_path / "peer__Hopper-v5__s1.csv"
    run_plot(monkeypatch, *runs, "--peers", peer, "--out", tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 5000 and "<svg" in (tmp_path / "f.svg").read_text()
    assert capsys.readouterr().err.splitlines() == [
        f"left out: {tmp_path / 'e'}: no episode has ended yet",
        f"left out: {tmp_path / 'd'}: another run of that seed is as long",
        "ppo_continuous clip_coef=inf on Hopper-v5: missing seed 2.",
    ]


def test_results_folder_is_read(tmp_path):
    updates = pd.concat([updates_of(1, [1, 2]), updates_of(2, [3, 4])])
    updates.drop(columns="versions").to_csv(tmp_path / "updates.csv", index=False)
    runs = updates.drop_duplicates(plot.KEY)[[*plot.KEY, "versions"]]
    runs.assign(steps=updates.global_step.max()).to_csv(tmp_path / "runs.csv", index=False)
    read = plot.read([tmp_path], ["global_step", "mean_return"])
    assert read.mean_return.tolist() == [1, 2, 3, 4] and set(read.versions) == {"torch 2"}


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 6, 7], [0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 3]])
def test_results_folder_that_lacks_rows(tmp_path, capsys, rows):
    """In its middle, at its end, or all of a seed."""
    updates = pd.concat([updates_of(seed, [1, 2, 3, 4]) for seed in (1, 2)])
    runs = updates.drop_duplicates(plot.KEY)[[*plot.KEY, "versions"]]
    runs.assign(steps=updates.global_step.max()).to_csv(tmp_path / "runs.csv", index=False)
    updates = updates.drop(columns="versions")
    updates.iloc[rows].to_csv(tmp_path / "updates.csv", index=False)
    with pytest.raises(SystemExit):
        plot.read_updates(tmp_path, ["global_step"])
    error = f"{tmp_path}/updates.csv lacks rows of PPO on Hopper-v5, seed "
    assert error in capsys.readouterr().err


def test_results_folder_may_hold_the_last_rows_alone(tmp_path):
    updates = updates_of(1, [1, 2, 3, 4])
    runs = updates[:1].assign(steps=updates.global_step.max())
    runs.to_csv(tmp_path / "runs.csv", index=False)
    updates[2:].drop(columns="versions").to_csv(tmp_path / "updates.csv", index=False)
    assert len(plot.read_updates(tmp_path, ["global_step"])) == 2
    with pytest.raises(SystemExit):
        plot.read_updates(tmp_path, ["global_step"], whole=True)


def test_algorithm_may_be_named_none(tmp_path):
    updates = updates_of(1, [1, 2], algorithm="None")
    updates.to_csv(tmp_path / "updates.csv", index=False)
    table = plot.read_csv(tmp_path / "updates.csv", plot.KEY)
    assert table.algorithm.tolist() == ["None", "None"]


def test_algorithm_whose_name_is_a_number(monkeypatch, tmp_path):
    updates = updates_of(1, [1, 2], algorithm=1)
    runs = updates[:1].assign(steps=updates.global_step.max())
    runs.to_csv(tmp_path / "runs.csv", index=False)
    updates.drop(columns="versions").to_csv(tmp_path / "updates.csv", index=False)
    assert plot.read([tmp_path], ["global_step", "mean_return"]).algorithm.tolist() == ["1", "1"]
    run_plot(monkeypatch, tmp_path, "--out", tmp_path / "f.png")
    assert (tmp_path / "f.svg").exists()


def test_dollars_in_names_are_dollars(monkeypatch, tmp_path):
    run = write_run(tmp_path / "run", 1, [1, 2], env_id=r"$\q$")
    run_plot(monkeypatch, run, "--out", tmp_path / "f.png")
    assert (tmp_path / "f.svg").exists()


def test_peer_without_a_number_draws_nothing(monkeypatch, tmp_path):
    run = write_run(tmp_path / "run", 1, [1, 2])
    peer = tmp_path / "peer__Hopper-v5__s1.csv"
    peer.write_text("global_step,episodic_return\n1,x\n")
    run_plot(monkeypatch, run, "--peers", peer, "--out", tmp_path / "f.png")
    assert (tmp_path / "f.svg").exists()


def test_bad_input_is_one_line_and_status_2(monkeypatch, tmp_path, capsys):
    run = write_run(tmp_path / "run", 1, [1, 2])
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "a__b__s1.csv").write_text("x\n1\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "list").mkdir()
    settings = {"env_id": ["Hopper-v5"], "seed": 1}
    config = {"script": "ppo_continuous", "settings": settings, "versions": {}}
    (tmp_path / "list/config.json").write_text(json.dumps(config))
    empty = write_run(tmp_path / "empty", 1, [])
    endless = write_run(tmp_path / "endless", 1, [1])
    table = pd.read_csv(endless / "updates.csv").assign(global_step=np.inf)
    table.to_csv(endless / "updates.csv", index=False)
    cases = {
        (tmp_path / "list",): "is not that of a run",
        (endless,): "nothing to draw",
        (run, "--smooth", "9" * 20): "1 for none",
        (tmp_path / "none",): "is no run directory",
        (tmp_path / "broken",): "is not that of a run",
        (empty,): "nothing to draw",
        (run, "--out", "figure.pdf"): ".png or .svg",
        (run, "--out", run / "config.json/f.png"): "cannot be written",
        (run, "--smooth", "0"): "1 for none",
        (run, "--peers", tmp_path / "a.csv"): "<peer>__<task>__s<seed>.csv",
        (run, "--peers", tmp_path / "a__b__s1.csv"): "has no column global_step",
        (run, "--peers", tmp_path / "a__b__s1.csv", "--x", "minutes"): "hold no minutes",
    }
    for arguments, text in cases.items():
        with pytest.raises(SystemExit) as stop:
            run_plot(monkeypatch, *arguments)
        error = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and error.startswith("plot.py: ") and text in error
