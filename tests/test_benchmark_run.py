"""benchmark/run.py: refusals, commands, resuming, failures, collecting; sweeps of tiny runs."""

import collections
import csv
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import collect
import run as benchmark
from experiment import BadInput, cells_of, named, parse_seeds, read_experiment
from test_engstrom_cells import CELLS
from test_run_directory import assert_same_training, wait_for

RELEASE = "benchmark.batch_reset:Release/Humanoid-v5"
EXPERIMENTS = sorted((ROOT / "benchmark/experiments").glob("*.toml"))
MODULE = """
import time
import gymnasium as gym
import toy_envs
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv

class Slow(toy_envs.Toy):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)

class Failing(toy_envs.Toy):
    def step(self, action):
        raise ZeroDivisionError("the wheel came off")

for cls in toy_envs.Toy, Slow, Failing, InvertedPendulumEnv:
    gym.register(f"{cls.__name__}-v0", cls, disable_env_checker=True)
"""
TINY = "num_steps = 8, num_minibatches = 2, update_epochs = 1, checkpoint_every = 1"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes an experiment of tiny runs -> the command line that trains it."""
    (tmp_path / "sweep_envs.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "tests")]))
    monkeypatch.syspath_prepend(tmp_path)

    def write(*tasks, seeds="1", steps=16, more="[algorithms.PPO]"):
        path = tmp_path / "tiny.toml"
        head = f'script = "ppo_continuous.py"\nseeds = "{seeds}"\n'
        head += f"tasks = {json.dumps([f'sweep_envs:{task}-v0' for task in tasks])}\n"
        path.write_text(f"{head}settings = {{ total_timesteps = {steps}, {TINY} }}\n{more}\n")
        folders = ["--runs-dir", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        return [str(path), *folders]

    return write


@pytest.fixture
def sweep(capsys, monkeypatch):
    """Run the command in this process -> status, stdout, stderr"""

    def sweep(*argv):
        handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", ["benchmark/run.py", *argv])
        try:
            status = benchmark.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return status, *capsys.readouterr()

    return sweep


def started(argv):
    """Run the command in a process of its own."""
    command = [sys.executable, ROOT / "benchmark/run.py", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def trainings(folder):
    """Processes that train into a folder: pid -> pids of its ancestors."""
    found, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[path.name] = (path / "stat").read_text().rpartition(")")[2].split()[1]
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if str(folder) in command and "ppo_continuous.py" in command and state != "Z":
            found[path.name] = []
    for pid, ancestors in found.items():
        while (pid := parents.get(pid, "0")) != "0":
            ancestors.append(int(pid))
    return found


# ---- Experiments ----


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_accepted_by_the_scripts(path, tmp_path):
    experiment = read_experiment(path)
    seeds = parse_seeds(experiment["seeds"])
    cells = cells_of(experiment, path.stem, seeds, tmp_path)
    assert len({cell.folder for cell in cells}) == len(cells) > 0
    counts = {"engstrom_table2": 75, "engstrom_figure1": 640}
    counts |= {"hopper_quick": 2, "mujoco_ppo": 30, "ppo_table1": 231, "ablation": 102}
    counts |= {"minimal": 3, "mujoco_trpo": 10, "time_limits": 6, "humanoid_v4": 2}
    counts |= {"engstrom_versions": 18}
    counts |= {"atari": 2, "atari_lstm": 1, "multidiscrete": 12, "taxi": 6}
    counts |= {"engstrom_humanoid": 10, "engstrom_batch_reset": 2}
    counts |= {"engstrom_release": 4, "engstrom_release_fisher": 4}
    assert len(cells) == counts[path.stem]


@pytest.mark.parametrize("name, number", [("engstrom_table2", 15), ("engstrom_versions", 6)])
def test_engstrom_cells_are_those_released(name, number, tmp_path):
    experiment = read_experiment(ROOT / f"benchmark/experiments/{name}.toml")
    cells = cells_of(experiment, name, [1], tmp_path)
    assert len(cells) == number
    for cell in cells:
        script, released = CELLS[f"{cell.task[:-3]} {cell.algorithm}"]
        settings = cell.settings()
        assert cell.script is script and released.items() <= settings.items()
        assert not settings["clip_actions"] and not settings["bootstrap_on_truncation"]
        in_figures = cell.algorithm in ("TRPO", "PPO", "PPO-M")  # 2 to 4
        in_figures &= name == "engstrom_table2" and cell.task != "Humanoid-v5"
        assert settings["heldout"] == in_figures


def test_engstrom_humanoid_changes_what_the_names_of_its_cells_say(tmp_path):
    whole = "Fisher matrix of the whole batch"
    changed = {
        f"TRPO, {whole}": {"fisher_fraction"},
        f"TRPO, {whole}, without contact forces": {"fisher_fraction", "env_kwargs"},
        f"TRPO+, {whole}": {"fisher_fraction"},
        "TRPO+, value gradients not clipped": {"max_grad_norm"},
        "PPO-NoClip, without contact forces": {"env_kwargs"},
        "TRPO": {"env_id", "bootstrap_on_truncation"},  # a reset at the start of every batch
    }
    cells = []
    for name in "engstrom_table2", "engstrom_humanoid", "engstrom_batch_reset":
        experiment = read_experiment(ROOT / f"benchmark/experiments/{name}.toml")
        cells += cells_of(experiment, name, [1], tmp_path)
    ours = {x.algorithm: x for x in cells if x.task == "Humanoid-v5"}
    assert {x.algorithm for x in cells[15:]} == set(changed)
    for cell in cells[15:]:
        other = ours[cell.algorithm.split(",")[0]].settings()
        differing = {name for name, x in cell.settings().items() if x != other[name]}
        assert differing == changed[cell.algorithm]


@pytest.mark.parametrize(
    "release, more",
    [("engstrom_release", set()), ("engstrom_release_fisher", {"fisher_fraction"})],
)
def test_engstrom_release_has_the_settings_but_for_what_was_beside_them(release, more, tmp_path):
    cells = []
    for name in "engstrom_table2", release:
        experiment = read_experiment(ROOT / f"benchmark/experiments/{name}.toml")
        cells += cells_of(experiment, name, [1], tmp_path)
    ours = {x.algorithm: x.settings() for x in cells if x.task == "Humanoid-v5"}
    for cell in cells[15:]:
        own, other = cell.settings(), ours[cell.algorithm]
        differing = {name for name, x in own.items() if x != other[name]}
        assert differing - {"max_grad_norm"} == {"env_id", "bootstrap_on_truncation"} | more
        assert own["max_grad_norm"] == math.inf and own["clip_obs"] == other["clip_obs"]


def test_engstrom_release_patches_the_script_of_today(tmp_path):
    """No loss at terminal steps, the last step's own value, statistics of last observations too."""
    shutil.copy(ROOT / "trpo_continuous.py", tmp_path)
    patch = ROOT / "benchmark/experiments/engstrom_release.patch"
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    spec = importlib.util.spec_from_file_location("patched", tmp_path / "trpo_continuous.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = script.Args(clip_vloss=False, max_grad_norm=math.inf)
    agent = script.Agent(3, 1, args)
    parameters, obs = list(agent.value.parameters()), torch.randn(4, 3)
    goes_on, target = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.randn(4)
    minibatch = obs, torch.zeros(4), target, goes_on
    gradient, _ = script.value_gradient(agent, parameters, args, torch.tensor(0.2), minibatch)
    kept = goes_on > 0
    loss = 0.5 * (agent.value(obs[kept]) - target[kept]).square().mean()
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(gradient, expected)

    given, counts = [], collections.Counter()

    def compute_gae(reward, value, next_value, terminated, ended, *rest):
        given.append((value, next_value, ended))
        return original(reward, value, next_value, terminated, ended, *rest)

    class Counted(script.RunningMeanStd):
        def update(self, x):
            counts[x.shape] += 1
            super().update(x)

    original, script.compute_gae = script.compute_gae, compute_gae
    script.RunningMeanStd = Counted
    options = ["--env-id", "InvertedPendulum-v5", "--num-steps", "64", "--total-timesteps", "64"]
    options += ["--num-minibatches", "4"]  # none of which has terminal steps only
    assert script.main([*options, "--runs-dir", str(tmp_path)]) == 0
    ((value, next_value, ended),) = given
    assert next_value[-1] == value[-1] and next_value[0] == value[1] != value[0]
    assert counts[1, 4] == 1 + 64 + ended.sum() > 65


def test_humanoid_of_the_release():
    env, new = (gymnasium.make(name) for name in (RELEASE, "Humanoid-v5"))
    obs, _ = env.reset(seed=1)
    size = new.observation_space.shape[0] - 13 * 6  # less the contact forces on 13 bodies
    assert obs.shape == env.observation_space.shape == (376,) and not obs[size:].any()
    np.testing.assert_array_equal(obs[:size], new.reset(seed=1)[0][:size])
    terminated = False
    while not terminated:
        action = np.full(17, 0.4)
        obs, reward, terminated, _, _ = env.step(action)
        _, other, _, _, info = new.step(action)
        contacts = info["reward_contact"]  # the cost, negative
        assert reward == pytest.approx(other - contacts + 5 * terminated)
    assert obs.shape == (376,)


def test_batch_reset_cuts_off_at_every_2048th_step():
    env = gymnasium.make("benchmark.batch_reset:BatchReset/Hopper-v5")
    env.action_space.seed(1)
    env.reset(seed=1)
    cuts = []
    for step in range(1, 5001):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if truncated:
            cuts.append(step)
        if terminated or truncated:
            env.reset()
    assert cuts == [2048, 4096]


@pytest.mark.parametrize("every", [0, -3, 2.5, "a", None])
def test_batch_reset_wants_a_whole_number(every):
    with pytest.raises(ValueError, match="type a whole number from 1 on"):
        gymnasium.make("benchmark.batch_reset:BatchReset/Hopper-v5", every=every)


@pytest.mark.skipif(bool(importlib.util.find_spec("sb3_contrib")), reason="sb3-contrib is there")
def test_sb3_trpo_says_what_to_install():
    command = [sys.executable, ROOT / "benchmark/sb3_trpo.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install -r benchmark/requirements-peers.txt" in done.stderr


def test_dry_run_prints_the_commands_and_writes_nothing(write, sweep, tmp_path):
    more = """[algorithms.A]
    settings = { anneal_lr = false, ent_coef = -0.01, env_kwargs = { end = "terminated" } }
    tasks."sweep_envs:Slow-v0".clip_coef = inf
    [algorithms.B]
    script = "trpo_continuous.py"
    grid = { init = ["orthogonal", "xavier"], clip_vloss = [true, false] }"""
    command = write("Toy", "Slow", seeds="3:4", more=more)
    status, out, _ = sweep(*command, "--dry-run")
    lines = [shlex.split(line) for line in out.splitlines()]
    assert status == 0 and len(lines) == 2 * 2 * 5 and not (tmp_path / "runs").exists()
    shared = "--total-timesteps 16 --num-steps 8 --num-minibatches 2 --update-epochs 1"
    shared += " --checkpoint-every 1"
    folder = f"{tmp_path}/runs/tiny/A__sweep_envs-Slow-v0__s3"
    own = ["--no-anneal-lr", "--ent-coef", "-0.01", "--env-kwargs", '{"end": "terminated"}']
    own += ["--clip-coef", "inf", "--runs-dir", folder]
    begin = ["python", "ppo_continuous.py", "--env-id", "sweep_envs:Slow-v0", "--seed", "3"]
    assert lines[1] == [*begin, *shared.split(), *own]
    status, out, _ = sweep(*command, "--dry-run", "--seeds", "7", "--only", "algorithm=B *=xavier*")
    assert status == 0 and len(out.splitlines()) == 4 and out.count("--init xavier") == 4
    status, out, _ = sweep(*command, "--dry-run", "--only", "algorithm=A", "env=*Toy*")
    assert [shlex.split(line)[3] for line in out.splitlines()] == ["sweep_envs:Toy-v0"] * 2


@pytest.mark.parametrize(
    "names, chosen",
    [
        ("A, with more", ["A, with more"]),
        ("A, with more,A", ["A", "A, with more"]),
        ("A,  B", ["A", "B"]),
        ("B,A*", ["A", "A, with more", "A1", "A[1]", "B"]),
        ("A[1]", ["A[1]"]),
        ("A?1?", ["A[1]"]),
        ("A,Z", []),
        ("", []),
    ],
)
def test_only_names_algorithms_with_commas_in_their_names(names, chosen):
    values = ["A", "A, with more", "A1", "A[1]", "B"]
    assert sorted(named(values, names.split(","))) == chosen


@pytest.mark.parametrize(
    "more, message",
    [
        ("wokers = 3\n[algorithms.PPO]", "has no key 'wokers'"),
        ("columns = 3\n[algorithms.PPO]", "columns is 3; it has to be a list"),
        ("reach = true\n[algorithms.PPO]", "reach is True; it has to be a number"),
        ("reach = nan\n[algorithms.PPO]", "reach is nan; it has to be a number"),
        ("last_updates = true\n[algorithms.PPO]", "it has to be a whole number"),
        ("last_updates = -1\n[algorithms.PPO]", "last_updates is -1; type 0 for all"),
        ("", "algorithms is missing"),
        ("[algorithms.PPO", "tiny.toml: "),
        ("[algorithms.PPO]\nsetings.gamma = 1", "has no key 'setings'"),
        ('[algorithms.PPO]\nscript = "evaluate.py"', "script is 'evaluate.py'; allowed is one of"),
        ("[algorithms.PPO]\nsettings.gama = 1", "ppo_continuous.py has no setting gama"),
        ("[algorithms.PPO]\nsettings.seed = 1", "no setting seed to be set here"),
        ("[algorithms.PPO]\nsettings.gamma = 2", "--gamma is 2.0; allowed is [0, 1]"),
        ('[algorithms.PPO]\nsettings.gamma = "a"', "a"),
        ('[algorithms.PPO]\nsettings.init = "zero"', "zero"),
        ("[algorithms.PPO]\nsettings.num_steps = 7", "can't be cut into"),
        ("[algorithms.PPO]\ntasks.Hopper-v5.gamma = 1", "tasks has no key 'Hopper-v5'"),
        ("[algorithms.PPO]\ngrid.gamma = []", "a list is empty"),
        ("[algorithms.PPO]\nsettings.env_kwargs = { wings = 2 }", "unexpected keyword"),
        ("[algorithms.PPO]\nsettings.env_kwargs = { d = 1979-05-27 }", "not JSON serializable"),
        (f"[algorithms.PPO]\nsettings.a = {'[' * 5000}", "tiny.toml: "),
        ('[algorithms]\n"a b" = {}\n"a  b" = {}', "would share the folder"),
        ('[algorithms]\n"" = {}', "an algorithm is named ''; type letters"),
        ('[algorithms]\n"a|b" = {}', "an algorithm is named 'a|b'; type letters, no | in it"),
        (f'[algorithms]\n"{"a" * 300}" = {{}}', "too long for the name of a folder"),
        (f"[algorithms.PPO]\nsettings.num_steps = {'9' * 5000}", "tiny.toml: "),
    ],
)
def test_what_cant_be_used_ends_in_one_line_before_anything_runs(
    write, sweep, tmp_path, more, message
):
    status, out, error = sweep(*write("Toy", more=more))
    assert status == 2 and out == "" and message in error
    assert error.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--seeds", "5:1"], "seeds are '5:1'"),
        (["--workers", "0"], "--workers is 0"),
        (["--only", "algorithm=TRPO"], "names what isn't there; there are PPO"),
        (["--only", "algorithm=PPO,TRPO"], "names what isn't there; there are PPO"),
        (["--only", "colour=red"], "type algorithm=NAME or env=NAME"),
    ],
)
def test_options_that_cant_be_used(write, sweep, argv, message):
    status, _, error = sweep(*write("Toy"), *argv)
    assert status == 2 and message in error and error.count("\n") == 1


def test_unknown_file_and_task(write, sweep):
    assert sweep("nowhere.toml")[::2] == (2, "run.py: nowhere.toml: No such file or directory.\n")
    status, _, error = sweep(*write("Nowhere"))
    assert status == 2 and "Nowhere" in error and error.count("\n") == 1


# ---- Sweeps ----


def test_finished_runs_are_collected_and_not_repeated(write, sweep, tmp_path):
    more = (
        '[algorithms.PPO]\nsettings.clip_coef = inf\n[algorithms.T]\nscript = "trpo_continuous.py"'
    )
    command = write("Toy", more=more)
    assert sweep(*command)[0] == 0
    runs, updates = (rows(tmp_path / f"results/tiny/{x}.csv") for x in ("runs", "updates"))
    assert [x["algorithm"] for x in runs] == ["PPO", "T"] and len(updates) == 4
    settings = json.loads(runs[0]["settings"])
    assert settings["clip_coef"] == "inf" and settings["num_steps"] == 8
    assert not {"env_id", "seed", "runs_dir", "resume"} & set(settings)
    assert [x["script"] for x in runs] == ["ppo_continuous", "trpo_continuous"]
    names = "steps", "last_100", "longest_episode", "final_reward"
    assert [[x[name] for name in names] for x in runs] == [["16", "3", "3", "3"]] * 2
    assert all(f"torch {torch.__version__}" in x["versions"] for x in runs)
    assert [x["global_step"] for x in updates] == ["8", "16"] * 2
    assert updates[0]["mean_kl"] and updates[0]["clipfrac"] and not updates[2]["clipfrac"]
    assert all(len(x) <= 11 for row in updates for x in list(row.values())[3:])

    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.pt")}
    status, out, _ = sweep(*command)
    assert status == 0 and "2 of 2 done" in out and len(files) == 2
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.pt")}

    # Settings that changed since make no mixture.
    assert sweep(*write("Toy", steps=32, more=more))[0] == 2
    status, _, error = sweep(*write("Toy", more=more.replace("inf", "0.1")))
    assert status == 2 and "clip_coef was inf" in error and error.count("\n") == 1

    # Rows of a run that was trained elsewhere stay, unless its settings are others now.
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    command = write("Toy", more=more)
    assert sweep(*command, "--only", "algorithm=T")[0] == 0
    runs, updates = (rows(tmp_path / f"results/tiny/{x}.csv") for x in ("runs", "updates"))
    assert [x["algorithm"] for x in runs] == ["PPO", "T"] and len(updates) == 4
    columns = 'columns = ["global_step"]\nlast_updates = 1\n'
    command = write("Toy", more=columns + more.replace("inf", "0.1"))
    assert sweep(*command, "--only", "algorithm=T")[0] == 0
    assert [x["algorithm"] for x in rows(tmp_path / "results/tiny/runs.csv")] == ["T"]
    (update,) = rows(tmp_path / "results/tiny/updates.csv")
    task = {"algorithm": "T", "task": "sweep_envs:Toy-v0", "seed": "1"}
    assert update == task | {"global_step": "16"}


@pytest.mark.parametrize("options", [[], pytest.param(["--ray", "local"], marks=pytest.mark.slow)])
def test_sweep_trains_what_its_commands_do_by_hand(write, sweep, tmp_path, options):
    if options:
        pytest.importorskip("ray", reason="pip install -r benchmark/requirements-ray.txt")
    more = '[algorithms.PPO]\n[algorithms.T]\nscript = "trpo_continuous.py"'
    command = write("InvertedPendulumEnv", steps=64, more=more)
    lines = sweep(*command, "--dry-run")[1].splitlines()
    assert sweep(*command, *options)[0] == 0 and len(lines) == 2
    for line in lines:
        _, *argv, folder = shlex.split(line)
        by_hand = tmp_path / "by_hand" / Path(folder).name
        subprocess.run([sys.executable, *argv, by_hand], cwd=ROOT, check=True)
        (one,), (other,) = (x.glob("*/checkpoint.pt") for x in (Path(folder), by_hand))
        assert_same_training(one.parent, other.parent)


def test_a_column_that_no_run_has_logged_costs_no_results(write, sweep, tmp_path):
    more = 'columns = ["global_step", "heldout_mean_kl"]\n[algorithms.PPO]'
    status, _, error = sweep(*write("Toy", more=more))
    assert status == 2 and "none of these runs has logged 'heldout_mean_kl'" in error
    assert len(rows(tmp_path / "results/tiny/runs.csv")) == 1
    assert [x["global_step"] for x in rows(tmp_path / "results/tiny/updates.csv")] == ["8", "16"]
    status, out, error = sweep(*write("Failing", more=more), "--results", str(tmp_path / "none"))
    assert status == 1 and "the wheel came off" in out and "go on with" in error


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("runs", "algorithm,task,seed\nPPO,Hopper-v5,1\n", "line 2: script is None"),
        ("runs", "{header}\nPPO,T,1,s,{{}},16,\n", "line 2: last_100 is ''"),
        ("runs", "{header}\nPPO,T,1,s,{{}},16,3,4\n", "line 2: too many fields"),
        (
            "runs",
            "{header}\nPPO,T,1,s,{{}},16,3\nPPO,T,2,s,{{}},many,3\n",
            "line 3: steps is 'many'",
        ),
        ("updates", "algorithm,task,seed\nPPO,T,x\n", "line 2: seed is 'x'"),
        ("updates", "algorithm,task,seed,global_step\nPPO,T,1,\n", "line 2: global_step is ''"),
        ("updates", "\xff", "cannot be read as a CSV"),
    ],
)
def test_damaged_results_are_said_before_the_training(write, sweep, tmp_path, name, text, message):
    header = "algorithm,task,seed,script,settings,steps,last_100"
    path = tmp_path / f"results/tiny/{name}.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.format(header=header).encode("latin-1"))
    status, _, error = sweep(*write("Toy"))
    assert status == 2 and f"{path}" in error and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_damaged_run_is_said_in_one_line(write, sweep, tmp_path):
    assert sweep(*write("Toy"))[0] == 0
    (path,) = (tmp_path / "runs").rglob("episodes.csv")
    shortened = "".join(path.read_text().splitlines(keepends=True)[:-1])
    for text in "global_step\n16\n", shortened:
        path.write_text(text)
        status, _, error = sweep(*write("Toy"))
        assert status == 2 and f"{path.parent} is damaged: " in error
        assert error.count("\n") == 1
    path.unlink()
    before = (tmp_path / "results/tiny/runs.csv").read_text()
    status, _, error = sweep(*write("Toy"))
    assert status == 2 and "episodes.csv is missing" in error and error.count("\n") == 1
    assert (tmp_path / "results/tiny/runs.csv").read_text() == before


def test_run_whose_updates_lack_a_row_is_not_collected(write, sweep, tmp_path):
    """It would be a silent gap in every curve. Other runs are collected."""
    assert sweep(*write("Toy"))[0] == 0
    (path,) = (tmp_path / "runs").rglob("updates.csv")
    (tmp_path / "results/tiny/runs.csv").unlink()
    header, first, last = path.read_text().splitlines(keepends=True)
    path.write_text(header + last)
    status, _, error = sweep(*write("Toy", seeds="1:2"))
    assert status == 2 and str(path.parent) in error and error.count("\n") == 1
    assert "updates.csv hasn't one row for each update" in error
    assert [row["seed"] for row in rows(tmp_path / "results/tiny/runs.csv")] == ["2"]

    path.write_text(header + first)  # as if it weren't trained to the end
    status, _, error = sweep(*write("Toy"))
    assert status == 2 and str(path.parent) in error and error.count("\n") == 1
    assert "updates.csv lacks its last rows; move that folder away" in error


def test_damaged_checkpoint_is_not_done(write, sweep, tmp_path):
    assert sweep(*write("Toy"))[0] == 0
    (path,) = (tmp_path / "runs").rglob("checkpoint.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    status, out, _ = sweep(*write("Toy"))
    assert status == 1 and "0 of 1 done" in out and "can't be used, train anew" in out


def test_run_that_cannot_be_started_fails_alone(write, sweep, tmp_path):
    folder = tmp_path / "runs/tiny/PPO__sweep_envs-Toy-v0__s1"
    folder.parent.mkdir(parents=True)
    folder.touch()
    status, out, _ = sweep(*write("Toy", seeds="1:2"))
    assert status == 1 and "1 of 2 done" in out and "s1 could not be started: " in out
    assert [row["seed"] for row in rows(tmp_path / "results/tiny/runs.csv")] == ["2"]


def test_sweep_goes_on_when_nobody_reads(write, tmp_path):
    process = started(write("Toy", seeds="1:2"))
    process.stdout.close()
    assert process.wait(120) == 0, process.stderr.read()
    assert len(rows(tmp_path / "results/tiny/runs.csv")) == 2


def test_results_folder_is_one_sweeps_at_a_time(tmp_path):
    entered = threading.Event()

    def second():
        with collect.locked(tmp_path):
            entered.set()

    with collect.locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.3)
    thread.join(10)
    assert entered.is_set()


@pytest.mark.parametrize("option", ["--results", "--runs-dir"])
def test_folder_that_is_a_file_is_said_before_the_training(write, sweep, tmp_path, option):
    (tmp_path / "file").touch()
    status, _, error = sweep(*write("Toy"), option, str(tmp_path / "file"))
    assert status == 2 and f"{tmp_path}/file/tiny can't be made" in error
    assert error.count("\n") == 1 and not list(tmp_path.rglob("checkpoint.pt"))


def test_seed_too_large_among_the_folders_is_one_line(write, sweep, tmp_path):
    folder = tmp_path / "runs/tiny/PPO__sweep_envs-Toy-v0__s99999999999999999999"
    folder.mkdir(parents=True)
    status, _, error = sweep(*write("Toy"), "--dry-run")
    assert status == 2 and f"Move {folder} away" in error and error.count("\n") == 1


def test_progress_of_a_damaged_run_is_none(tmp_path):
    (tmp_path / "updates.csv").write_text("global_step,mean_return\n16,x\n")
    assert benchmark.progress(tmp_path) == pytest.approx((0, math.nan), nan_ok=True)


def test_reach_that_is_added_later(write, sweep, tmp_path):
    """A row that was trained elsewhere, without it: unknown, now and when it is read again."""
    more = "[algorithms.PPO]\n[algorithms.Q]"
    assert sweep(*write("Toy", more=more), "--only", "algorithm=Q")[0] == 0
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    command = write("Toy", more=f"reach = 99\n{more}")
    for _ in range(2):
        out = sweep(*command, "--only", "algorithm=PPO")[1]
        assert [line.split(" | ")[-1] for line in out.splitlines() if "Toy-v0 | 16" in line] == [
            "never |",
            "unknown |",
        ]


def test_failing_run_stops_no_other(write, sweep, tmp_path):
    status, out, error = sweep(*write("Failing", "Toy"), "--workers", "1")
    assert status == 1 and "1 of 2 done" in out and "go on with: python benchmark/run.py" in error
    assert "PPO sweep_envs:Failing-v0 s1 failed with status 1; the end of" in out
    assert "the wheel came off" in out
    assert [x["task"] for x in rows(tmp_path / "results/tiny/runs.csv")] == ["sweep_envs:Toy-v0"]


def check_resumed(folder, updates):
    """The run in the cell's folder has each update once."""
    (path,) = folder.glob("*/updates.csv")
    assert [int(x["update"]) for x in rows(path)] == list(range(1, updates + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("platform", ["linux", "other"])
def test_process_dies_with_its_parent(platform, tmp_path):
    child = ["-c", "import time; time.sleep(99)", "ppo_continuous.py", str(tmp_path)]
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import jobs
sys.platform = {platform!r}
jobs.start({child!r}, ".", "/dev/null")
print(flush=True)
time.sleep(99)"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        parent.stdout.readline()
        # The parent names what its child does; so does the process that looks after it.
        wait_for(lambda: len(trainings(tmp_path)) == {"linux": 2, "other": 3}[platform])
    finally:
        parent.kill()
    parent.communicate()
    wait_for(lambda: not trainings(tmp_path), seconds=5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_sweep_leaves_no_orphan_and_goes_on(write, sweep, tmp_path):
    command = write("Toy", "Slow", steps=160)
    process = started(command)
    slow = tmp_path / "runs/tiny/PPO__sweep_envs-Slow-v0__s1"
    try:
        wait_for(lambda: any(len(rows(path)) >= 5 for path in slow.glob("*/updates.csv")))
        status, _, error = sweep(*command)
        assert status == 2 and "trained by another process" in error
        assert trainings(tmp_path)
    finally:
        process.kill()
    process.communicate()
    wait_for(lambda: not trainings(tmp_path), seconds=5)
    assert not list((tmp_path / "results").rglob("*.csv"))
    (checkpoint,) = slow.glob("*/checkpoint.pt")
    counters = torch.load(checkpoint, weights_only=True)["counters"]
    assert 4 <= counters["update"] < 20
    assert sweep(*command)[0] == 0
    log = (slow / "log.txt").read_text()
    assert log.count("20 updates") == 2  # begun, and gone on with
    check_resumed(slow, 20)
    assert [x["steps"] for x in rows(tmp_path / "results/tiny/runs.csv")] == ["160", "160"]


def test_ctrl_c_writes_checkpoints_and_says_how_to_go_on(write, tmp_path):
    command = write("Slow", steps=800)
    process = started(command)
    try:
        wait_for(lambda: any(len(rows(path)) >= 3 for path in tmp_path.rglob("updates.csv")))
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in error
    assert "stopping after their update: 1 running" in out and "0 of 1 done" in out
    assert f"go on with: python {ROOT}/benchmark/run.py {command[0]}" in error
    (log,) = tmp_path.rglob("log.txt")
    assert "ppo_continuous.py --resume" in log.read_text()
    (path,) = tmp_path.rglob("checkpoint.pt")
    counters = torch.load(path, weights_only=True)["counters"]
    assert counters["update"] == len(rows(path.with_name("updates.csv"))) >= 3


# ---- Ray ----


def test_ray_is_optional(write, sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, _, error = sweep(*write("Toy"), "--ray", "local")
    assert status == 2 and "pip install -r benchmark/requirements-ray.txt" in error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_run_of_a_node_that_dies_is_done_elsewhere(write, sweep, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="pip install -r benchmark/requirements-ray.txt")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    command = write("Slow", seeds="1:2", steps=800)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    process = None
    try:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        nodes = cluster.head_node, node
        raylets = [x.all_processes["raylet"][0].process.pid for x in nodes]
        process = started([*command, "--ray", cluster.address])

        def held():
            """The nodes, 0 and 1, of this cluster's trainings."""
            found = trainings("runs").values()
            return sorted(i for x in found for i, raylet in enumerate(raylets) if raylet in x)

        wait_for(lambda: held() == [0, 1], seconds=120)
        time.sleep(3)
        assert held() == [0, 1]
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: 1 not in held(), seconds=30)
        out, error = process.communicate(timeout=300)
    finally:
        if process:
            process.kill()
        cluster.shutdown()
    assert process.returncode == 0, out + error
    by_ray = rows(tmp_path / "results/tiny/updates.csv")
    (tmp_path / "results").rename(tmp_path / "by_ray")
    (tmp_path / "runs").rename(tmp_path / "runs_by_ray")
    assert sweep(*command)[0] == 0
    assert len(by_ray) == 200
    by_this_machine = rows(tmp_path / "results/tiny/updates.csv")
    assert [x | {"seconds": 0} for x in by_ray] == [x | {"seconds": 0} for x in by_this_machine]
    summaries = rows(tmp_path / "by_ray/tiny/runs.csv"), rows(tmp_path / "results/tiny/runs.csv")
    assert [x | {"minutes": 0} for x in summaries[0]] == [x | {"minutes": 0} for x in summaries[1]]


# ---- Arithmetic ----


def test_final_reward_by_hand():
    returns = [("100", 1), ("1", 2), ("nan", 0), ("2", 1), ("3", 1), ("nan", 0), ("4", 5), ("6", 1)]
    updates = [{"mean_return": x, "episodes": str(n)} for x, n in returns]
    assert collect.final_reward(updates) == (1 + 2 + 3 + 4 + 6) / 5
    assert collect.final_reward(updates[:2]) == 50.5
    assert str(collect.final_reward(updates[2:3])) == "nan"


def test_steps_to_reach_by_hand():
    episodes = [{"global_step": 10 * k, "episodic_return": float(k > 50)} for k in range(1, 201)]
    assert collect.steps_to_reach(0.5, episodes) == 1000
    assert collect.steps_to_reach(0.51, episodes) == 1010
    assert collect.steps_to_reach(1, episodes) == 1500
    assert collect.steps_to_reach(1.1, episodes) == "never"
    assert collect.steps_to_reach(0, episodes[:99]) == "never"


def test_rounding_keeps_whole_numbers():
    texts = ["1000000", "-365.71349", "0.000123456", "inf", "nan", "1e-7", "1234567.8"]
    rounded = ["1000000", "-365.71", "0.00012346", "inf", "nan", "1e-07", "1.2346e+06"]
    assert [collect.rounded(x) for x in texts] == rounded


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(benchmark.Args, args=["--help"])
    out = capsys.readouterr().out
    options = "--seeds --workers --ray --only --dry-run --runs-dir --results"
    assert all(option in out for option in options.split())
    with pytest.raises(BadInput):
        parse_seeds("a")
