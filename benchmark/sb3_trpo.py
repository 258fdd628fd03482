"""sb3-contrib's TRPO with the settings of our own TRPO in engstrom_table2: an independent check.

    pip install -r benchmark/requirements-peers.txt
    python benchmark/sb3_trpo.py --task Humanoid-v5    # 25 minutes on one core

Writes the episodes of the run to a CSV that `plot.py --peers` can draw, and prints the final reward
as `run.py` computes it. sb3-contrib averages its KL over the components of an action instead of
adding them up: its bound and its damping are ours divided by their number. Its time limits always
bootstrap; on Humanoid none is reached.
"""

import argparse
import csv
from pathlib import Path

import gymnasium
import torch
from experiment import BadInput, cells_of, parse_seeds, read_experiment
from jobs import REPOSITORY
from plot import fail, read_peer

try:
    from sb3_contrib import TRPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
except ImportError as error:
    fail(f"{error}; type pip install -r benchmark/requirements-peers.txt")

EXPERIMENT = REPOSITORY / "benchmark/experiments/engstrom_table2.toml"


class Unbounded(gymnasium.ActionWrapper):
    """Bounds that no action reaches: Stable-Baselines3 would clip to them, as ours doesn't here."""

    def __init__(self, env):
        super().__init__(env)
        space = env.action_space
        self.action_space = gymnasium.spaces.Box(-1e6, 1e6, space.shape, space.dtype)

    def action(self, action):
        return action


class Episodes(BaseCallback):
    """Keeps global_step, return and length of each episode."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def _on_step(self):
        for info in self.locals["infos"]:
            if "episode" in info:
                episode = info["episode"]
                self.rows.append((self.num_timesteps, round(episode["r"], 2), episode["l"]))
        return True


def model_with(args):
    """sb3-contrib's TRPO with our settings; those that it lacks are checked to be off."""
    assert args.reward_scaling == "none" and args.init == "xavier" and args.activation == "tanh"
    assert not (args.clip_vloss or args.anneal_lr or args.clip_actions)
    assert args.max_kl == args.max_kl_final and args.num_envs == 1
    env = DummyVecEnv([lambda: Monitor(Unbounded(gymnasium.make(args.env_id)))])
    env = VecNormalize(env, norm_reward=False, clip_obs=args.clip_obs, gamma=args.gamma)
    components = env.action_space.shape[0]
    network = {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh, "ortho_init": False}
    network |= {"optimizer_kwargs": {"eps": args.adam_eps}}
    model = TRPO(
        "MlpPolicy",
        env,
        learning_rate=args.value_learning_rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_critic_updates=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        target_kl=args.max_kl / components,
        cg_damping=args.cg_damping / components,
        cg_max_steps=args.cg_iterations,
        line_search_shrinking_factor=0.5,
        line_search_max_iter=args.max_halvings,
        sub_sampling_factor=round(1 / args.fisher_fraction),
        seed=args.seed,
        device="cpu",
        policy_kwargs=network,
    )
    for layer in model.policy.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="Humanoid-v5")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--steps", type=int, help="those of our run, if left out")
    folder = REPOSITORY / "benchmark/results/peers/matched"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the CSV")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; type 1 or more.")
    try:
        seeds = parse_seeds(options.seed)
        cells = cells_of(read_experiment(EXPERIMENT), EXPERIMENT.stem, seeds, Path("none"))
    except BadInput as error:
        parser.error(str(error))
    cells = [cell for cell in cells if (cell.algorithm, cell.task) == ("TRPO", options.task)]
    if len(cells) != 1:
        parser.error(f"--task {options.task}, --seed {options.seed}: type one task of {EXPERIMENT}")
    args, episodes = cells[0].args, Episodes()
    model_with(args).learn(options.steps or cells[0].total(), episodes)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"sb3_contrib_trpo__{args.env_id}__s{args.seed}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["global_step", "episodic_return", "episodic_length"])
        writer.writerows(episodes.rows)
    final = read_peer(path).mean_return.tail(5).mean()
    print(f"{path}: {len(episodes.rows)} episodes, final reward {final:.5g}")


if __name__ == "__main__":
    main()
