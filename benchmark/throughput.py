"""Steps per second of whole training runs, beside a peer's and the bare environment's.

    python benchmark/throughput.py                   # 3 rounds: about 20 minutes
    pip install -r benchmark/requirements-peers.txt  # else the peers are skipped

One process a measurement: on Hopper-v5 with one thread on one core, on Breakout with two on two.
Every other round goes backwards, and ratios are taken within a round. Nothing else may run (the
CSV's `load` tells). A row yields *marks*, (step,
seconds) at the end of each update; its speed is that from the second mark to the last, and
`seconds_left_out` is the rest: starting, compiling, shutting down.
"""

import collections
import concurrent.futures
import csv
import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import tyro

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmark/results/throughput"
PACKAGES = "torch", "gymnasium", "mujoco", "ale-py", "numpy"
PACKAGES += "stable-baselines3", "sb3-contrib", "sbx-rl"
# Of each table: the task, cores and threads, and steps between marks, which are those of an update.
Setting = collections.namedtuple("Setting", "task cores batch")
MUJOCO, ATARI = Setting("Hopper-v5", 1, 2048), Setting("BreakoutNoFrameskip-v4", 2, 1024)
SETTINGS = {"PPO": MUJOCO, "TRPO": MUJOCO, "Atari": ATARI}


def bare_environment(setting, steps):
    """Marks of gymnasium's environment alone, under random actions drawn beforehand."""
    import gymnasium as gym

    env = gym.make(setting.task)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(steps)]
    env.reset(seed=1)
    marks = []
    for step, action in enumerate(actions, start=1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        if step % setting.batch == 0:
            marks.append((step, time.perf_counter()))
    return marks


def bare_games(setting, steps):
    """Marks of ppo_atari.py's eight games alone, under random actions drawn beforehand."""
    sys.path.insert(0, str(REPOSITORY))
    import numpy as np

    import ppo_atari

    args = ppo_atari.Args(env_id=setting.task)
    games = [ppo_atari.Game(args, seed) for seed in range(args.num_envs)]
    actions = np.random.default_rng(1).integers(len(games[0].actions), size=steps).tolist()
    for game in games:
        game.reset()
    marks = []
    for step, action in enumerate(actions, start=1):
        game = games[step % len(games)]
        game.step(action)
        if game.is_over:
            game.reset()
        if step % setting.batch == 0:
            marks.append((step, time.perf_counter()))
    return marks


def our_script(script, *options, setting, steps):
    """Marks of a script of ours, run as a command: its own updates.csv."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, REPOSITORY / script, "--env-id", setting.task, *options]
        command += ["--total-timesteps", str(steps), "--runs-dir", runs]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        (path,) = Path(runs).glob("*/updates.csv")
        with open(path) as file:
            return [(int(x["global_step"]), float(x["seconds"])) for x in csv.DictReader(file)]


def learned(model, steps):
    """Marks of a model of Stable-Baselines3's kind."""
    from stable_baselines3.common.callbacks import BaseCallback

    marks = []

    class Marks(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):  # as far apart as the ends of updates
            marks.append((self.num_timesteps, time.perf_counter()))

    model.learn(steps, Marks())
    return marks


def stable_baselines3(module, algorithm, settings, setting, steps):
    """Marks of an algorithm of stable_baselines3, sb3_contrib or sbx (JAX), with VecNormalize."""
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(setting.cores)
    env = make_vec_env(setting.task, n_envs=1, seed=1, vec_env_cls=DummyVecEnv)
    env = VecNormalize(env, clip_obs=10.0, clip_reward=10.0, gamma=0.99)
    common = {"n_steps": setting.batch, "batch_size": 64, "seed": 1}
    common |= {"gamma": 0.99, "gae_lambda": 0.95}
    network = {"net_arch": [64, 64], "ortho_init": True}
    if module != "sbx":  # where tanh is the default
        network["activation_fn"] = torch.nn.Tanh
    common |= {"learning_rate": lambda remaining: 3e-4 * remaining, "device": "cpu"}
    model = getattr(importlib.import_module(module), algorithm)
    return learned(model("MlpPolicy", env, policy_kwargs=network, **common | settings), steps)


def stable_baselines3_cnn(setting, steps):
    """Marks of Stable-Baselines3's PPO with the settings of ppo_atari.py."""
    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    torch.set_num_threads(setting.cores)
    env = VecFrameStack(make_atari_env(setting.task, n_envs=8, seed=1), n_stack=4)
    settings = {"n_steps": setting.batch // 8, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.01}
    settings |= {"clip_range": 0.1, "clip_range_vf": 0.1, "vf_coef": 0.5, "max_grad_norm": 0.5}
    settings |= {"learning_rate": lambda remaining: 2.5e-4 * remaining, "gamma": 0.99}
    settings |= {"gae_lambda": 0.95, "seed": 1, "device": "cpu"}
    return learned(PPO("CnnPolicy", env, **settings), steps)


# `measure` gets setting and steps, in a process of its own, and returns marks; `package` has to be
# installed for it. In each table the others are divided by the bare environment and by the peer.
Row = collections.namedtuple("Row", "table name measure package", defaults=[None])
BARE = "bare environment"
# The settings of ppo_continuous.py and trpo_continuous.py, as Stable-Baselines3 names them.
PPO = {"n_epochs": 10, "clip_range": 0.2, "clip_range_vf": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
PPO |= {"max_grad_norm": 0.5}
TRPO = {"n_critic_updates": 10, "cg_max_steps": 10, "line_search_shrinking_factor": 0.5}
TRPO |= {"sub_sampling_factor": 10, "target_kl": 0.04}
partial, peer = functools.partial, functools.partial(functools.partial, stable_baselines3)
PPO_SCRIPT, TRPO_SCRIPT, ATARI_SCRIPT = "ppo_continuous.py", "trpo_continuous.py", "ppo_atari.py"
FAST = "--bf16", "--compile"
ROWS = [
    Row("PPO", BARE, bare_environment),
    Row("PPO", PPO_SCRIPT, partial(our_script, PPO_SCRIPT)),
    Row("PPO", f"{PPO_SCRIPT} --compile", partial(our_script, PPO_SCRIPT, "--compile")),
    Row("PPO", "Stable-Baselines3", peer("stable_baselines3", "PPO", PPO), "stable-baselines3"),
    Row("PPO", "SBX (JAX)", peer("sbx", "PPO", PPO), "sbx-rl"),
    Row("TRPO", BARE, bare_environment),
    Row("TRPO", TRPO_SCRIPT, partial(our_script, TRPO_SCRIPT)),
    Row("TRPO", f"{TRPO_SCRIPT} --compile", partial(our_script, TRPO_SCRIPT, "--compile")),
    Row("TRPO", "sb3-contrib", peer("sb3_contrib", "TRPO", TRPO), "sb3-contrib"),
    Row("Atari", BARE, bare_games),
    Row("Atari", ATARI_SCRIPT, partial(our_script, ATARI_SCRIPT)),
    Row("Atari", f"{ATARI_SCRIPT} {' '.join(FAST)}", partial(our_script, ATARI_SCRIPT, *FAST)),
    Row("Atari", "Stable-Baselines3", stable_baselines3_cnn, "stable-baselines3"),
]


def measured(row, updates, core):
    """Measure a row in a fresh process, on cores from this one on -> columns of the CSV."""
    setting = SETTINGS[row.table]
    os.sched_setaffinity(0, range(core, core + setting.cores))  # the new process's too
    load, start = os.getloadavg()[0], time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        marks = pool.submit(row.measure, setting=setting, steps=updates * setting.batch).result()
    wall, (first_step, first), (last_step, last) = time.perf_counter() - start, marks[1], marks[-1]
    speed = (last_step - first_step) / (last - first)
    columns = {"table": row.table, "name": row.name, "load": round(load, 2), "steps": last_step}
    columns |= {"task": setting.task, "core": core, "cores": setting.cores}
    left_out = round(wall - last_step / speed, 1)
    return columns | {"steps_per_second": round(speed, 1), "seconds_left_out": left_out}


def speed_table(table, speeds):
    """Markdown. speeds: name -> steps per second of each round."""
    peer = next(row.name for row in ROWS if row.table == table and row.package)
    lines = [f"| {table} | steps/s: median (range) | ÷ {peer} | ÷ {BARE} |", "|---|---|---|---|"]
    for name, own in speeds.items():
        line = f"| {name}"
        for other, form in (None, ".0f"), (peer, ".2f"), (BARE, ".2f"):
            x = [a / b for a, b in zip(own, speeds.get(other, []) if other else [1] * len(own))]
            texts = [f"{f(x):{form}}" for f in (statistics.median, min, max)] if x else ["–"] * 3
            line += " | {} ({} to {})".format(*texts)
        lines.append(line + " |")
    return "\n".join(lines)


def main(
    repeats: int = 3,
    updates: int = 20,
    core: int = 0,
    tables: list[Literal["PPO", "TRPO", "Atari"]] = ["PPO", "TRPO", "Atari"],  # noqa: B006
    out: Path = RESULTS,
):
    """Measure every row `repeats` times over so many updates, into CSVs in the folder `out`.

    core: the first of those that are used, one for MuJoCo and two for Atari.
    """
    if repeats < 1 or updates < 3:
        sys.exit(f"--repeats {repeats} starts at 1, --updates {updates} at 3.")
    if not tables:
        sys.exit(f"--tables names none; type some of {', '.join(SETTINGS)}.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out} is no folder and can't become one: {error.strerror}.")
    last = max(core + SETTINGS[table].cores for table in tables) - 1
    if not {core, last} <= os.sched_getaffinity(0):
        sys.exit(f"--core {core}: of cores {core} to {last} not all are there.")
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    installed = {x.name.replace("_", "-"): x.version for x in importlib.metadata.distributions()}
    machine = {"python": sys.version.split()[0]} | {x: installed.get(x, "") for x in PACKAGES}
    machine |= {"cpu": re.search("model name.*: (.*)|$", Path("/proc/cpuinfo").read_text())[1]}

    wanted = [row for row in ROWS if row.table in tables]
    rows = [row for row in wanted if not row.package or row.package in installed]
    for row in [row for row in wanted if row not in rows]:
        print(f"skipped: {row.name}; pip install -r benchmark/requirements-peers.txt")
    results, speeds = {row.table: [] for row in rows}, {row.table: {} for row in rows}
    for repeat in range(repeats):
        for row in rows[:: -1 if repeat % 2 else 1]:
            result = {"round": repeat + 1} | measured(row, updates, core) | machine
            results[row.table].append(result)
            speed = result["steps_per_second"]
            speeds[row.table].setdefault(row.name, []).append(speed)
            print(f"round {repeat + 1}: {row.table}, {row.name}: {speed:.0f} steps/s", flush=True)
    for table, lines in results.items():
        with open(out / f"{table.lower()}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
    for table, by_name in speeds.items():
        print(f"\n{speed_table(table, by_name)}")


if __name__ == "__main__":
    tyro.cli(main)
