"""Steps per second of whole training runs on Hopper-v5, beside a peer's and the bare environment's.

    python benchmark/throughput.py                   # 3 rounds, one core: about 13 minutes
    pip install -r benchmark/requirements-peers.txt  # else the peers are skipped

One process a measurement, one thread, one core; every other round goes backwards, and ratios are
taken within a round. Nothing else may run (the CSV's `load` tells). A row yields *marks*, (step,
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
RESULTS = REPOSITORY / "benchmark/results/throughput.csv"
PACKAGES = "torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "sb3-contrib", "sbx-rl"
BATCH = 2048  # steps between marks


def bare_environment(task, steps):
    """Marks of gymnasium's environment alone, under random actions drawn beforehand."""
    import gymnasium as gym

    env = gym.make(task)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(steps)]
    env.reset(seed=1)
    marks = []
    for step, action in enumerate(actions, start=1):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        if step % BATCH == 0:
            marks.append((step, time.perf_counter()))
    return marks


def our_script(script, *options, task, steps):
    """Marks of a script of ours, run as a command: its own updates.csv."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, REPOSITORY / script, "--env-id", task, *options]
        command += ["--total-timesteps", str(steps), "--runs-dir", runs]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        (path,) = Path(runs).glob("*/updates.csv")
        with open(path) as file:
            return [(int(x["global_step"]), float(x["seconds"])) for x in csv.DictReader(file)]


def stable_baselines3(module, algorithm, settings, task, steps):
    """Marks of an algorithm of stable_baselines3, sb3_contrib or sbx (JAX), with VecNormalize."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    marks = []

    class Marks(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):  # as far apart as the ends of updates
            marks.append((self.num_timesteps, time.perf_counter()))

    torch.set_num_threads(1)
    env = make_vec_env(task, n_envs=1, seed=1, vec_env_cls=DummyVecEnv)
    env = VecNormalize(env, clip_obs=10.0, clip_reward=10.0, gamma=0.99)
    common = {"n_steps": BATCH, "batch_size": 64, "gamma": 0.99, "gae_lambda": 0.95, "seed": 1}
    network = {"net_arch": [64, 64], "ortho_init": True}
    if module != "sbx":  # where tanh is the default
        network["activation_fn"] = torch.nn.Tanh
    common |= {"learning_rate": lambda remaining: 3e-4 * remaining, "device": "cpu"}
    model = getattr(importlib.import_module(module), algorithm)
    model("MlpPolicy", env, policy_kwargs=network, **common | settings).learn(steps, Marks())
    return marks


# `measure` gets task and steps, in a process of its own, and returns marks; `package` has to be
# installed for it. In each table the others are divided by the bare environment and by the peer.
Row = collections.namedtuple("Row", "table name measure package", defaults=[None])
TASK, BARE = "Hopper-v5", "bare environment"
# The settings of ppo_continuous.py and trpo_continuous.py, as Stable-Baselines3 names them.
PPO = {"n_epochs": 10, "clip_range": 0.2, "clip_range_vf": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
PPO |= {"max_grad_norm": 0.5}
TRPO = {"n_critic_updates": 10, "cg_max_steps": 10, "line_search_shrinking_factor": 0.5}
TRPO |= {"sub_sampling_factor": 10, "target_kl": 0.04}
partial, peer = functools.partial, functools.partial(functools.partial, stable_baselines3)
PPO_SCRIPT, TRPO_SCRIPT = "ppo_continuous.py", "trpo_continuous.py"
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
]


def measured(row, steps):
    """Measure a row in a fresh process -> columns of the CSV."""
    load, start = os.getloadavg()[0], time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        marks = pool.submit(row.measure, task=TASK, steps=steps).result()
    wall, (first_step, first), (last_step, last) = time.perf_counter() - start, marks[1], marks[-1]
    speed = (last_step - first_step) / (last - first)
    columns = {"table": row.table, "name": row.name, "load": round(load, 2), "steps": last_step}
    left_out = round(wall - last_step / speed, 1)
    return columns | {"steps_per_second": round(speed, 1), "seconds_left_out": left_out}


def print_table(table, speeds):
    """speeds: name -> steps per second of each round."""
    peer = next(row.name for row in ROWS if row.table == table and row.package)
    print(f"\n| {table} | steps/s: median (range) | ÷ {peer} | ÷ {BARE} |\n|---|---|---|---|")
    for name, own in speeds.items():
        line = f"| {name}"
        for other, form in (None, ".0f"), (peer, ".2f"), (BARE, ".2f"):
            x = [a / b for a, b in zip(own, speeds.get(other, []) if other else [1] * len(own))]
            texts = [f"{f(x):{form}}" for f in (statistics.median, min, max)] if x else ["–"] * 3
            line += " | {} ({} to {})".format(*texts)
        print(line + " |")


def main(
    repeats: int = 3,
    steps: int = 20 * BATCH,
    core: int = 0,
    tables: list[Literal["PPO", "TRPO"]] = ["PPO", "TRPO"],  # noqa: B006
    out: Path = RESULTS,
):
    """Measure every row `repeats` times over `steps` steps on this core, into the CSV `out`."""
    if repeats < 1 or steps % BATCH or steps < 3 * BATCH:
        sys.exit(f"--repeats starts at 1; --steps is a multiple of {BATCH}, at least {3 * BATCH}.")
    os.sched_setaffinity(0, {core})  # this and the next line hold for all processes started here
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    installed = {x.name.replace("_", "-"): x.version for x in importlib.metadata.distributions()}
    machine = {"python": sys.version.split()[0]} | {x: installed.get(x, "") for x in PACKAGES}
    machine |= {"cpu": re.search("model name.*: (.*)|$", Path("/proc/cpuinfo").read_text())[1]}

    wanted = [row for row in ROWS if row.table in tables]
    rows = [row for row in wanted if not row.package or row.package in installed]
    for row in [row for row in wanted if row not in rows]:
        print(f"skipped: {row.name}; pip install -r benchmark/requirements-peers.txt")
    out.parent.mkdir(parents=True, exist_ok=True)
    results, speeds = [], {row.table: {} for row in rows}
    for repeat in range(repeats):
        for row in rows[:: -1 if repeat % 2 else 1]:
            results.append({"round": repeat + 1} | measured(row, steps) | {"core": core} | machine)
            speed = results[-1]["steps_per_second"]
            speeds[row.table].setdefault(row.name, []).append(speed)
            print(f"round {repeat + 1}: {row.table}, {row.name}: {speed:.0f} steps/s", flush=True)
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, results[0])
        writer.writeheader()
        writer.writerows(results)
    for table, by_name in speeds.items():
        print_table(table, by_name)


if __name__ == "__main__":
    tyro.cli(main)
