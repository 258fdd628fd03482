"""PPO for Atari games from their pictures, with every implementation detail in plain sight.

    python ppo_atari.py --env-id PongNoFrameskip-v4 --bf16 --compile
    python ppo_atari.py --env-id ALE/Breakout-v5 --sticky-actions 0.25    # the modern protocol
    torchrun --nproc-per-node=2 ppo_atari.py    # two processes with half of the games each

The list of details: Huang et al. (2022), "The 37 Implementation Details of Proximal Policy
Optimization". Both kinds of ids mean the same here: the game, played at --sticky-actions 0 unless
told otherwise, each action repeated for 4 frames, and cut at 108,000 frames.

Holds: core 1-13, atari 1-9, aux 1-3
Leaves out: continuous 1-9, lstm 1-5, multidiscrete 1, aux 4

Shapes: T steps of a rollout, N games, B = T * N batch, M minibatch, C frames of a stack, A number
of actions. A bare name is (T, N, ...), b_ is the flat batch (B, ...), mb_ a minibatch (M, ...).
An *update* is one rollout and what is learned from it; an *epoch* is one pass over its batch. A
*step* is one action in one game, 4 frames; `global_step` counts those of all games together.
`terminated` (a life or the game is lost) and `truncated` (the frames are used up) stay apart: both
cut the sum over lambda, only termination cuts the bootstrap from the next observation's value.
A rollout of 128 * 8 observations takes 29 MB: 4 * 84 * 84 bytes each.

Reading order: Args, then `train`, and each function when the loop calls it. What stands below the
line "Plumbing" may be skipped.
"""

import dataclasses
import math
from typing import Literal

import ale_py
import cv2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn


@dataclasses.dataclass
class Args:
    """Settings of a run. Numbers take "inf"; a value that switches a detail off is named."""

    env_id: str = "BreakoutNoFrameskip-v4"  # an id of gymnasium; "module:Env-v0" works too
    seed: int = 1  # of environments, initial weights, noise and minibatches
    total_timesteps: int = 10_000_000  # steps of all environments together, cut to whole updates
    num_envs: int = 8  # N, environments stepped in lockstep
    num_steps: int = 128  # T, steps of each environment per update

    learning_rate: float = 2.5e-4  # initial rate of Adam
    anneal_lr: bool = True  # lower the rates linearly towards 0 over the run
    adam_eps: float = 1e-5  # PyTorch's own default is 1e-8
    max_grad_norm: float = 0.5  # largest L2 norm of all gradients that share a rate; inf: off
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # 1: return minus value; 0: one-step TD error
    bootstrap_on_truncation: bool = True  # off: a time limit counts as a real end (Baselines)
    num_minibatches: int = 4  # per epoch; 1: the whole batch at once
    update_epochs: int = 4  # passes over each batch

    clip_coef: float = 0.1  # the ratio's range is 1 +- clip_coef; inf: off
    anneal_clip: bool = False  # lower clip_coef and clip_value_coef like the learning rate
    target_kl: float | None = None  # no step above this KL (CleanRL looks once an epoch); None: off
    norm_adv: bool = True  # advantages to mean 0, std 1, over what a policy step sees
    clip_vloss: bool = True  # pessimistic value loss around the rollout's values
    clip_value_coef: float = 0.1  # its range
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.01  # weight of the entropy bonus; negative penalises entropy
    init: Literal["orthogonal", "xavier", "default"] = "orthogonal"  # default: PyTorch's own

    noop_max: int = 30  # up to so many idle frames begin a game; 0: off
    frame_skip: int = 4  # frames that an action is repeated for; 1: off
    sticky_actions: float = 0.0  # chance that a frame repeats the last action; modern: 0.25
    episodic_life: bool = True  # a lost life ends the episode, though the game goes on
    fire_reset: bool = True  # press FIRE where a game waits for it
    clip_rewards: bool = True  # learn from the sign of the reward
    frame_stack: int = 4  # C, frames of an observation; 1: off
    max_frames: int = 108_000  # of a game, 30 minutes; it is cut there

    bf16: bool = False  # networks in bfloat16, where the processor is faster at it
    compile: bool = False  # compile the minibatch step (needs a C++ compiler; pays after a minute)
    threads: int = 2  # of PyTorch; more is slower for small networks
    cuda: bool = False  # use a GPU; small networks train faster on a CPU
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    runs_dir: str = "runs"  # folder that gets the run's own directory
    checkpoint_every: int = 10  # updates between checkpoints; one is written at the end anyway
    resume: str | None = None  # directory of a run to go on with; its settings stay, but the total

    batch_size: int = dataclasses.field(init=False)  # B = T * N
    minibatch_size: int = dataclasses.field(init=False)  # M
    num_updates: int = dataclasses.field(init=False)  # K

    def __post_init__(self):
        self.batch_size, self.minibatch_size, self.num_updates = batch_sizes(self)


class Game:
    """An Atari game in the emulator; its screen as a stack of C frames of 84 x 84, uint8."""

    def __init__(self, args, seed):
        self.args, self.random = args, np.random.default_rng(seed)
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setInt("max_num_frames_per_episode", args.max_frames)
        self.ale.setFloat("repeat_action_probability", args.sticky_actions)
        self.ale.loadROM(rom_path(args.env_id))
        self.actions = self.ale.getMinimalActionSet()
        self.screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)  # the last two frames
        self.obs = np.zeros((args.frame_stack, 84, 84), np.uint8)

    def reset(self):
        """Begin a game -> observation (C, 84, 84)"""
        self.ale.reset_game()
        for screen in self.screens:  # they still show the end of the last game
            self.ale.getScreenGrayscale(screen)
        self.episode_return = self.episode_length = 0
        # [atari 1] No-op reset: 1 to 30 idle frames, so that no two games begin alike.
        for _ in range(self.random.integers(self.args.noop_max) + 1 if self.args.noop_max else 0):
            self.press(ale_py.Action.NOOP, frames=1)
        self.fire()
        self.lives = self.ale.lives()
        self.obs[:] = self.frame()
        return self.obs

    def step(self, action):
        """Act (an index) -> observation (C, 84, 84), reward, terminated, truncated"""
        # [atari 2] Max and skip: the action is repeated, and the rewards are summed.
        reward = self.press(self.actions[action], self.args.frame_skip)
        self.episode_return += reward
        self.episode_length += 1
        # [atari 3] Episodic life: a lost life ends the episode, and the game goes on.
        lost_life, self.lives = self.ale.lives() < self.lives, self.ale.lives()
        self.is_over = self.ale.game_over(with_truncation=False)
        terminated = self.is_over or (lost_life and self.args.episodic_life)
        if lost_life and not self.is_over:
            self.fire()
        # [atari 7] Frame stack: the oldest frame comes first. It is filled anew by `reset` alone.
        self.obs[:-1], self.obs[-1] = self.obs[1:], self.frame()
        # [atari 6] Reward clipping: its sign. The return of the game is that of raw rewards.
        learned = np.sign(reward) if self.args.clip_rewards else reward
        return self.obs, learned, terminated, self.ale.game_truncated()

    def press(self, action, frames):
        """Hold an action of the emulator for so many frames -> sum of rewards"""
        reward = 0
        for frame in range(frames):
            reward += self.ale.act(action)
            if frame >= frames - 2:  # the only ones that are seen
                self.screens = self.screens[::-1]
                self.ale.getScreenGrayscale(self.screens[1])
        return reward

    def fire(self):
        # [atari 4] Fire reset: some games wait for it, at the start and after a lost life.
        if self.args.fire_reset and ale_py.Action.FIRE in self.actions:
            self.episode_return += self.press(ale_py.Action.FIRE, self.args.frame_skip)

    def frame(self):
        """What is on the screen -> (84, 84)"""
        # [atari 5] Warp frame: the emulator's luminance, by area to 84 x 84; the maximum of the
        # last two frames (atari 2), as some sprites are drawn only in every other one.
        screen = self.screens.max(0)
        return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)


def initialized(layer, gain, init):
    """Initialize a linear layer: orthogonal with this gain, Xavier with gain 1, or not at all."""
    # [core 2] Orthogonal weights and zero biases (E3).
    if init == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
    elif init == "xavier":
        nn.init.xavier_uniform_(layer.weight)
    if init != "default":
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value of a stack of frames."""

    def __init__(self, num_actions, args):
        super().__init__()

        def scaled(layer):
            return initialized(layer, math.sqrt(2), args.init)

        # [core 13] [atari 8] The CNN of Mnih et al. (2015), shared by policy and value.
        self.body = nn.Sequential(
            scaled(nn.Conv2d(args.frame_stack, 32, 8, stride=4)),
            nn.ReLU(),
            scaled(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            scaled(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            scaled(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.policy_head = initialized(nn.Linear(512, num_actions), 0.01, args.init)
        self.value_head = initialized(nn.Linear(512, 1), 1.0, args.init)

    def forward(self, obs):
        """Frames (B, C, 84, 84), uint8 -> logits (B, A), value (B,), float32"""
        # [atari 9] Scale to [0, 1], inside the network: until here a pixel is one byte.
        hidden = self.body(obs.float() / 255.0)
        return self.policy_head(hidden).float(), self.value_head(hidden).float().flatten()


def autocast(bf16, device):
    """Context in which the network computes in bfloat16, if wanted; its weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def categorical_log_prob(logits, action):
    """log p(action) = logits[action] - log sum exp(logits); (B, A), (B,) -> (B,)"""
    assert action.shape == logits.shape[:-1]
    return logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]


def categorical_entropy(logits):
    """entropy = -sum over A of p * log p; (B, A) -> (B,)"""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def compute_gae(reward, value, next_value, terminated, ended, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2015), backwards over a rollout.

    delta[t] = reward[t] + gamma * next_value[t] * (not terminated[t]) - value[t]
    advantage[t] = delta[t] + gamma * gae_lambda * (not ended[t]) * advantage[t + 1]

    All (T, N). next_value[t] is the value of the observation that step t led to: of the last one
    of its episode where it ended, never of the reset that follows. -> advantage (T, N)
    """
    assert reward.shape == value.shape == next_value.shape == terminated.shape == ended.shape
    delta = reward + gamma * next_value * ~terminated - value
    decay = gamma * gae_lambda * ~ended
    advantage, following = np.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        advantage[t] = following = delta[t] + decay[t] * following
    return advantage


def shuffled_minibatches(batch, args, generator):
    """Yield tuples of minibatches of the tensors in `batch`, each (B, ...), epoch after epoch."""
    for _ in range(args.update_epochs):
        # [core 6] Minibatch updates: every epoch visits each step of the batch exactly once.
        order = torch.randperm(len(batch[0]), generator=generator).to(batch[0].device)
        shuffled = (x[order].unflatten(0, (args.num_minibatches, -1)) for x in batch)
        yield from zip(*shuffled)


def loss_gradient(agent, parameters, args, limits, minibatch):
    """Gradient of PPO's loss on one minibatch by all `parameters`, as one vector.

    loss = -mean(objective) - ent_coef * mean(entropy) + vf_coef * value_loss
    objective = min(ratio * A, clip(ratio, 1 +- clip_coef) * A)
    value_loss = mean(max((V - target)**2, (clip(V, V_old +- clip_value_coef) - target)**2)) / 2

    limits: clip_coef, clip_value_coef as tensors (). minibatch: (M, ...) tensors.
    -> gradient; policy loss, value loss and entropy (3,); log of the ratio (M,)
    """
    clip_coef, clip_value_coef = limits
    mb_obs, mb_action, mb_log_prob, mb_value, mb_advantage, mb_target = minibatch
    if args.norm_adv:
        # [core 7] Advantage normalization, by minibatch.
        std, center = torch.std_mean(mb_advantage)
        mb_advantage = (mb_advantage - center) / (std + 1e-8)

    # [core 8] Clipped surrogate objective.
    with autocast(args.bf16, mb_obs.device):
        logits, value = agent(mb_obs)
    log_ratio = categorical_log_prob(logits, mb_action) - mb_log_prob
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    objective = torch.min(ratio * mb_advantage, clipped_ratio * mb_advantage)
    policy_loss = -objective.mean()

    error = value - mb_target
    square = error * error
    if args.clip_vloss:
        # [core 9] Value-loss clipping (E1), around the values of the rollout.
        clipped = value.clamp(mb_value - clip_value_coef, mb_value + clip_value_coef)
        clipped_error = clipped - mb_target
        square = torch.max(square, clipped_error * clipped_error)
    value_loss = 0.5 * square.mean()

    # [core 10] One loss for policy and value, with an entropy bonus.
    entropy = categorical_entropy(logits).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters)])
    losses = torch.stack([policy_loss, value_loss, entropy]).detach()
    return gradient, losses, log_ratio.detach()


def approximate_kl(log_ratio):
    """k1 = mean(-log ratio) and k3 = mean((ratio - 1) - log ratio) of KL(old || new) (Schulman)."""
    return (-log_ratio).mean(), (log_ratio.exp() - 1 - log_ratio).mean()


def averaged(x):
    """A tensor's mean over all processes, in its place; as it is where there is but one."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def train(args):
    """Train an agent and return the directory of the run."""
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    device = choose_device(args)
    # [aux 2] Parallel gradient update: of W processes (torchrun's) each plays N games of its own,
    # and all of them move the same weights by the mean of their gradients.
    rank, W = join_processes(args)
    T, N = args.num_steps, args.num_envs // W
    A = len(Game(args, seed=0).actions)

    torch.manual_seed(args.seed)  # of the initial weights
    agent = Agent(A, args).to(device)
    generator = torch.Generator().manual_seed(args.seed + rank)  # of actions and minibatches
    # One vector holds all parameters, and the network's own become views of it: so Adam moves one
    # tensor.
    parameters = list(agent.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)
    # [core 3] Adam's epsilon is 1e-5.
    optimizer = torch.optim.Adam([vector], lr=args.learning_rate, eps=args.adam_eps, fused=True)
    compute_gradient = compiled(loss_gradient, args.compile)
    parts = {"agent": agent, "optimizer": optimizer, "generator": generator}
    with SharedRun(args, parts) as run:
        # [core 1] Vectorized architecture: N games step in lockstep, and they go on over the
        # borders of the rollouts.
        games = [Game(args, run.env_seed(rank * N + n) % 2**31) for n in range(N)]
        # In memory the C values of a pixel lie side by side ("channels last"): so a processor
        # convolves fastest.
        next_obs = np.zeros((N, 84, 84, args.frame_stack), np.uint8).transpose(0, 3, 1, 2)
        next_obs[:] = [game.reset() for game in games]

        for update in range(run.update + 1, args.num_updates + 1):
            # [core 4] Learning-rate annealing (E4): factor 1 at the first update, 1/K at the last.
            remaining = 1.0 - (update - 1) / args.num_updates
            rate = args.learning_rate
            optimizer.param_groups[0]["lr"] = rate * remaining if args.anneal_lr else rate
            # [aux 1] Clip-range annealing, by the same factor.
            clip_factor = remaining if args.anneal_clip else 1.0
            clips = args.clip_coef * clip_factor, args.clip_value_coef * clip_factor
            limits = torch.tensor(clips).to(device).unbind()

            # ---- Rollout ----
            obs = np.zeros((T, N, 84, 84, args.frame_stack), np.uint8).transpose(0, 1, 4, 2, 3)
            reward, (terminated, truncated) = np.zeros((T, N)), np.zeros((2, T, N), bool)
            action, log_prob, value, cut = [], [], [], {}
            # One context for all steps, as it keeps the weights that it has rounded to bfloat16.
            with torch.no_grad(), autocast(args.bf16, device):
                for t in range(T):
                    run.global_step += args.num_envs
                    obs[t] = next_obs
                    logits, state_value = agent(torch.from_numpy(next_obs).to(device))
                    logits = logits.cpu()
                    drawn = logits.softmax(-1).multinomial(1, generator=generator)[:, 0]
                    action.append(drawn)
                    log_prob.append(categorical_log_prob(logits, drawn))
                    value.append(state_value)
                    outcomes = [game.step(a) for game, a in zip(games, drawn.tolist())]
                    frames, reward[t], terminated[t], truncated[t] = zip(*outcomes)
                    next_obs[:] = frames
                    for n in np.flatnonzero([game.is_over for game in games] | truncated[t]):
                        run.episode(games[n].episode_return, games[n].episode_length)
                        cut[t, n] = next_obs[n].copy()
                        next_obs[n] = games[n].reset()

            # ---- Advantages ----
            # The value of what a step led to is that of the next step's observation, but for the
            # last of a game that was cut.
            with torch.inference_mode(), autocast(args.bf16, device):
                value.append(agent(torch.from_numpy(next_obs).to(device))[1])
                values = torch.stack(value).cpu().numpy()
                next_value = values[1:].copy()
                for (t, n), last in cut.items():
                    next_value[t, n] = agent(torch.from_numpy(last[None]).to(device))[1].item()
            # [core 5] Generalized advantage estimation; the value's target is advantage + value.
            ended = terminated | truncated
            no_bootstrap = terminated if args.bootstrap_on_truncation else ended
            ends, discounts = (no_bootstrap, ended), (args.gamma, args.gae_lambda)
            advantage = compute_gae(reward, values[:-1], next_value, *ends, *discounts)
            b_obs = torch.from_numpy(obs).flatten(0, 1).to(device)
            b_action, b_log_prob = (torch.cat(x).to(device) for x in (action, log_prob))
            b_value = torch.from_numpy(values[:-1].copy()).flatten().to(device)
            b_advantage = torch.from_numpy(advantage.astype(np.float32)).flatten().to(device)
            b_target = b_advantage + b_value

            # ---- Update ----
            batch = b_obs, b_action, b_log_prob, b_value, b_advantage, b_target
            losses, log_ratios = [], []
            for minibatch in shuffled_minibatches(batch, args, generator):
                step = compute_gradient(agent, parameters, args, limits, minibatch)
                gradient, loss, log_ratio = step
                gradient = averaged(gradient)
                # [core 11] Global gradient clipping (E9): one norm over all parameters.
                norm = gradient.norm()
                gradient = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                losses.append(torch.cat([loss, norm[None]]))
                log_ratios.append(log_ratio)
                # [aux 3] Early stopping by KL: before the step, and out of all epochs.
                approx_kl = averaged(approximate_kl(log_ratio)[1])
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break
                vector.grad = gradient
                optimizer.step()

            # ---- Report ----
            # [core 12] Debug variables: means over all minibatches of the update.
            names = "policy_loss", "value_loss", "entropy", "grad_norm"
            losses, log_ratio = torch.stack(losses).cpu(), torch.stack(log_ratios)
            check_losses(names, losses, args.num_minibatches)
            old_approx_kl, approx_kl = approximate_kl(log_ratio)
            clipped = (log_ratio.exp() - 1).abs() > limits[0]
            unexplained = (b_target - b_value).var() / b_target.var()
            report = {f"losses/{name}": x for name, x in zip(names, losses.mean(0).tolist())}
            report |= {
                "losses/old_approx_kl": old_approx_kl.item(),
                "losses/approx_kl": approx_kl.item(),
                "losses/clipfrac": clipped.float().mean().item(),
                "losses/explained_variance": 1 - unexplained.item(),
                "losses/minibatches": len(losses),
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/clip_coef": clips[0],
            }
            run.end_update(report)
    return run.directory


# ==== Plumbing ====
# Settings, run directory, checkpoint and resume: nothing about the algorithm, and the same to the
# letter in every script.

import argparse
import collections
import copy
import fcntl
import functools
import importlib.metadata
import io
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import typing
import zipfile
from pathlib import Path

import gymnasium as gym
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class BadInput(Exception):
    """What was given can't be used: one line, exit status 2."""


class RunFailed(Exception):
    """The run can't go on (non-finite value, failing environment): one line, exit status 1."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, after the update that was running: exit status 130 or 143."""


def check_settings(args):
    """Raise BadInput unless numbers lie in their interval and choices are known ones."""
    intervals = {
        "[1, 1e12]": "total_timesteps num_envs num_steps num_minibatches update_epochs",
        "[1, inf)": "checkpoint_every cg_iterations",
        "[1, 2147483647]": "max_frames",
        "[1, 64]": "frame_skip frame_stack",
        "[1, 1024]": "threads",
        "[0, 1]": "gamma gae_lambda min_gain sticky_actions",
        "(0, 1]": "fisher_fraction",
        "[0, 1000]": "max_halvings noop_max",
        "[0, inf)": "kl_coef vf_coef cg_damping",
        "[0, 1e18]": "seed",
        "(-inf, inf)": "ent_coef",
        "(0, inf)": "learning_rate value_learning_rate adam_eps kl_target target_kl "
        "max_kl max_kl_final",
        "(0, inf]": "max_grad_norm clip_coef clip_value_coef clip_obs clip_reward",
    }
    for interval, names in intervals.items():
        low, high = (float(end) for end in interval[1:-1].split(","))
        for name in names.split():
            x = getattr(args, name, None)  # not every script has every field
            above = x is None or x > low or (x == low and interval[0] == "[")
            below = x is None or x < high or (x == high and interval[-1] == "]")
            if not (above and below):
                raise BadInput(f"--{name.replace('_', '-')} is {x}; allowed is {interval}.")
    for field in dataclasses.fields(args):
        if typing.get_origin(field.type) is typing.Literal:
            x, choices = getattr(args, field.name), typing.get_args(field.type)
            if x not in choices:
                raise BadInput(f"--{field.name} is {x}; allowed is one of {', '.join(choices)}.")


def batch_sizes(args):
    """Check all settings -> steps of a batch (B) and of a minibatch (M), number of updates (K)."""
    check_settings(args)
    B = args.num_envs * args.num_steps
    M, K = B // args.num_minibatches, args.total_timesteps // B
    batch = f"the batch of --num-envs x --num-steps = {B} steps"
    if B % args.num_minibatches or M < 2:
        parts = f"--num-minibatches {args.num_minibatches} equal parts of at least 2 steps"
        cure = f"type a divisor of {B} up to {B // 2}" if B > 1 else "type a larger --num-steps"
        raise BadInput(f"{batch} can't be cut into {parts}; {cure}.")
    if K < 1:
        total = f"--total-timesteps is {args.total_timesteps}"
        raise BadInput(f"{total}, less than {batch}; type {B} or more.")
    return B, M, K


def parse_args(args_class, argv):
    """Command line -> settings. With --resume the run's own are the defaults and must stay."""
    video, log = "record a video later: python evaluate.py RUN --video DIR", "TensorBoard files"
    saved, sweep = "checkpoint.pt is always in the run directory", "name the run by --runs-dir"
    elsewhere = {"capture-video": video, "save-model": saved, "upload-model": saved}
    elsewhere |= {"track": log + " are always in the run directory", "exp-name": sweep}
    for option in argv:
        name = re.sub("=.*", "", option).replace("_", "-").removeprefix("--").removeprefix("no-")
        name = "track" if name.startswith("wandb-") else name.replace("hf-entity", "upload-model")
        if option.startswith("--") and name in elsewhere:
            raise BadInput(f"{option} is not an option here: {elsewhere[name]}.")
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", nargs="?")
    resume = finder.parse_known_args(argv)[0].resume
    if resume is None:
        return tyro.cli(args_class, args=argv)
    if not resume:
        raise BadInput("--resume is empty; type a directory below --runs-dir.")
    saved = load_config(args_class, resume)
    args = dataclasses.replace(tyro.cli(args_class, args=argv, default=saved))  # derived anew
    for field in dataclasses.fields(args):
        before, now = getattr(saved, field.name), getattr(args, field.name)
        free = field.name in ("total_timesteps", "resume", "checkpoint_every", "runs_dir")
        if field.init and not free and now != before:
            option = "--" + field.name.replace("_", "-")
            raise BadInput(f"{option} is {now}, but this run has {before}; leave {option} out.")
    return args


def load_config(args_class, run):
    """Settings of the run in this directory, which must be one of this script."""
    try:
        config = json.loads(Path(run, "config.json").read_text())
        script, settings = config["script"], config["settings"]
        own = Path(__file__).stem
        if script != own and not re.fullmatch(r"\w+", script):  # or one would be told to type it
            raise ValueError(script)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        reason = "it has no readable config.json; type one of those below --runs-dir"
        raise BadInput(f"{run} is no run directory: {reason}.") from None
    if script != own:
        name = shlex.quote(str(run))
        raise BadInput(f"{run} is a run of {script}.py; type python {script}.py --resume {name}")
    types = {field.name: str(field.type) for field in dataclasses.fields(args_class) if field.init}
    if not isinstance(settings, dict) or set(settings) != set(types):
        raise BadInput(f"{run}/config.json has not the settings of this version of {script}.py.")
    for name, x in settings.items():
        kind = types[name]
        if x == "inf" and "float" in kind:
            settings[name] = math.inf
        elif isinstance(x, bool) or "bool" in kind:
            fits = isinstance(x, bool) and "bool" in kind
        elif x is None or isinstance(x, str):
            fits = "None" in kind if x is None else "str" in kind or "Literal" in kind
        else:
            fits = isinstance(x, int | float if "float" in kind else int)
        if settings[name] is x and not fits:
            raise BadInput(f"{run}/config.json: {name} is {x!r}, which is no {kind}.")
    return args_class(**settings)


def guarded(method):
    """The method, with what an environment raises in it as RunFailed."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except RunFailed:
            raise
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(where.filename).name}, line {where.lineno}"
            text = " ".join("".join(traceback.format_exception_only(error)).split())
            raise RunFailed(f"the environment raised {text} in {where}") from error

    return wrapper


def choose_device(args):
    """The device that the networks live on, deterministic or not as asked."""
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.cuda and not torch.cuda.is_available():
        print("--cuda: there is no CUDA device, so this runs on the CPU")
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def unprofiled(optimizer):
    """The optimizer, its steps without the profiler's record, which is a third of their time."""
    optimizer.step = functools.partial(type(optimizer).step.__wrapped__, optimizer)
    return optimizer


def compiled(function, wanted):
    """The function as one compiled graph, torch.autograd.grad in it, or an error; or as it is."""
    if not wanted:
        return function
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise BadInput(f"--compile needs a C++ compiler, and there is no {compiler}; install it.")
    torch._dynamo.config.trace_autograd_ops = True
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # one graph needs no pool
    options = {"cpp_wrapper": True}  # the calls of the kernels too, not only the kernels
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def check_losses(names, losses, num_minibatches):
    """Raise RunFailed at the first non-finite entry of losses (minibatches, names)."""
    for i, name in (~losses.isfinite()).nonzero()[:1].tolist():
        where = f"epoch {i // num_minibatches + 1}, minibatch {i % num_minibatches + 1}"
        raise RunFailed(f"{names[name]} is {losses[i, name]} in {where}")


class Run:
    """The directory of a run: config.json, two CSVs, TensorBoard events, checkpoint.pt, lock.

    `parts` is what a checkpoint holds beside the counters: modules, optimizers, statistics,
    generators, tensors. The checkpoint is always that of the last completed update.
    """

    def __init__(self, args, parts):
        self.args, self.parts, self.script = args, parts, Path(__file__).stem
        self.update = self.global_step = self.signal = 0
        self.start, self.seconds, self.episodes = time.perf_counter(), 0.0, []
        self.last_returns = collections.deque(maxlen=100)
        name = f"{args.env_id}__{self.script}__s{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        name = re.sub(r"[^\w.-]+", "-", f"{name}-{secrets.token_hex(3)}")
        self.directory = Path(args.resume or Path(args.runs_dir, name))

    def __enter__(self):
        args, script = self.args, self.script
        if not args.resume:
            try:
                str(self.directory).encode()  # TensorBoard takes no other names
                self.directory.mkdir(parents=True)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", error)
                raise BadInput(f"--runs-dir {args.runs_dir}: {reason}.") from None
        self.lock = open(self.directory / "lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{self.directory} is being trained by another process.") from None
        if args.resume:
            self.restore()
        packages = "torch", "gymnasium", "mujoco", "ale-py", "numpy"
        installed = {d.name: d.version for d in importlib.metadata.distributions()}
        versions = {name: installed[name] for name in packages if name in installed}
        commit, folder = None, Path(__file__).parent
        if shutil.which("git"):
            git = ["git", "-C", folder, "rev-parse", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        settings = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init}
        infinite = {name: "inf" for name, x in settings.items() if x == math.inf}
        config = {"script": script, "settings": settings | infinite | {"resume": None}}
        config |= {"command": shlex.join(sys.argv), "git_commit": commit or None}
        config |= {"versions": {"python": sys.version.split()[0]} | versions}
        text = json.dumps(config, indent=1, allow_nan=False)
        write_file(self.directory / "config.json", text.encode())
        self.files = [open(self.directory / f"{x}.csv", "a") for x in ("episodes", "updates")]
        after = self.global_step + 1 if args.resume else None  # points from there on are dropped
        self.writer = SummaryWriter(self.directory, purge_step=after)
        self.restart, total = self.update, args.num_updates * args.batch_size
        print(f"{script}.py on {args.env_id}, seed {args.seed}, into {self.directory}")
        updates = f"{args.num_updates} updates × {args.batch_size} steps"
        print(f"{updates} = {total:,} steps", flush=True)
        seconds = 0.2 if sys.stderr.isatty() else 30  # between lines of the bar
        bar = {"unit": "step", "unit_scale": True, "mininterval": seconds}
        self.bar = tqdm(total=total, initial=self.global_step, **bar)
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():
            numbers = signal.SIGINT, signal.SIGTERM
            self.handlers = {number: signal.signal(number, self.interrupt) for number in numbers}
        self.snapshot()
        if not args.resume:
            self.save()
        return self

    def env_seed(self, environment, stream=0):
        """A 128-bit seed; the restarts and streams (1: held-out) of a run never share one."""
        entropy = self.args.seed, environment, self.restart
        words = np.random.SeedSequence(entropy, spawn_key=(stream,)).generate_state(4)
        return int.from_bytes(words.tobytes(), "little")

    def episode(self, episodic_return, episodic_length):
        self.last_returns.append(episodic_return)
        row = self.global_step, self.elapsed(), float(episodic_return), int(episodic_length)
        self.episodes.append(row)

    def elapsed(self):
        return round(self.seconds + time.perf_counter() - self.start, 3)

    def end_update(self, report):
        """Write the rows of an update, move the checkpoint on, and stop if a signal came."""
        self.update += 1
        returns = [row[2] for row in self.episodes]
        head = {"global_step": self.global_step, "update": self.update, "seconds": self.elapsed()}
        head |= {"episodes": len(returns), "mean_return": np.mean(returns) if returns else math.nan}
        columns = "global_step", "seconds", "episodic_return", "episodic_length"
        row = head | {name.split("/")[-1]: x for name, x in report.items()}
        tables = (columns, self.episodes), (row, [tuple(row.values())])
        for file, (names, rows) in zip(self.files, tables):
            lines = rows if file.tell() else [names, *rows]
            file.writelines(",".join(map(str, line)) + "\n" for line in lines)
            file.flush()
        for step, _, episodic_return, episodic_length in self.episodes:
            self.writer.add_scalar("charts/episodic_return", episodic_return, step)
            self.writer.add_scalar("charts/episodic_length", episodic_length, step)
        done = self.global_step - self.restart * self.args.batch_size
        report["charts/SPS"] = done / (time.perf_counter() - self.start)
        for name, x in report.items():
            self.writer.add_scalar(name, x, self.global_step)
        self.episodes = []
        self.snapshot()
        if self.update % self.args.checkpoint_every == 0 or self.update == self.args.num_updates:
            self.save()
        mean = f"{np.mean(self.last_returns):.1f}" if self.last_returns else "-"
        self.bar.set_postfix_str(f"return {mean}", refresh=False)
        self.bar.update(self.args.batch_size)
        if self.signal and self.update < self.args.num_updates:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")

    def snapshot(self):
        parts = {name: part_state(part) for name, part in self.parts.items()}
        counters = {"update": self.update, "global_step": self.global_step}
        counters |= {"seconds": self.elapsed(), "last_returns": list(map(float, self.last_returns))}
        self.state = copy.deepcopy({"script": self.script, "counters": counters, "parts": parts})

    def save(self):
        """Have the checkpoint on the disk, and before it the rows that it covers."""
        for file in self.files:
            os.fsync(file.fileno())
        buffer = io.BytesIO()
        torch.save(self.state, buffer)
        write_file(self.directory / "checkpoint.pt", buffer.getbuffer())

    def restore(self):
        """Take up the checkpoint, and drop the rows beyond it (and a torn one) from the CSVs."""
        try:
            state = load_checkpoint(self.directory)
            for name, part in self.parts.items():
                load_part(part, state["parts"][name])
            counters = state["counters"]
            self.update, self.global_step = int(counters["update"]), int(counters["global_step"])
            self.seconds = float(counters["seconds"])
            self.last_returns.extend(map(float, counters["last_returns"]))
            if self.update < 0 or self.update * self.args.batch_size != self.global_step:
                raise ValueError(f"update {self.update} at step {self.global_step}")
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            path = f"{self.directory}/checkpoint.pt"
            raise BadInput(f"{path} can't be used, train anew: {reason}") from None
        total = self.args.num_updates * self.args.batch_size
        if self.global_step >= total:
            done = f"{self.directory} has done {self.global_step} of {total} steps"
            raise BadInput(f"{done}; type a larger --total-timesteps to go on.")
        for path in (self.directory / "episodes.csv", self.directory / "updates.csv"):
            lines = (
                path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
            )
            lines = [line for line in lines if line.endswith("\n")]
            steps = [re.match(r"\d+(?=,)", line) for line in lines[1:]]
            kept = [
                x for x, step in zip(lines[1:], steps) if step and int(step[0]) <= self.global_step
            ]
            write_file(path, "".join(lines[:1] + kept).encode())

    def interrupt(self, number, frame):
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        print("\nstopping after this update", file=sys.stderr)

    def __exit__(self, kind, error, trace):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        try:
            self.save()
            self.writer.close()
        finally:
            for file in [*self.files, self.lock]:
                file.close()
        resume = f"python {self.script}.py --resume {shlex.quote(str(self.directory))}"
        if isinstance(error, RunFailed):
            where = f"at global step {self.global_step}, update {self.update + 1}"
            error.args = (f"{error} ({where}, seed {self.args.seed})",)
        elif error is None:
            count, mean = len(self.last_returns), np.mean(self.last_returns or math.nan)
            ended = f"mean return of the last {count} episodes: {mean:.1f}"
            print(ended if count else "no episode has ended yet")
            if Path(__file__).with_name("evaluate.py").exists():
                print(f"python evaluate.py {shlex.quote(str(self.directory))}")
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            print(f"go on with: {resume}", file=sys.stderr)


def write_file(path, content):
    """Have this content in a file, or, if that fails, what was there before."""
    new = path.with_suffix(".tmp")
    try:
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise RunFailed(f"{path} can't be written: {error.strerror}") from error


def load_checkpoint(directory):
    """The state of this script's run that is kept there, or an exception."""
    path = Path(directory, "checkpoint.pt")
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()  # torch doesn't compare the checksums
    if damaged:
        raise ValueError(f"{damaged} in it is damaged")
    state = torch.load(path, "cpu", weights_only=True)
    if state["script"] != Path(__file__).stem:
        raise ValueError(f"it is of {state['script']}.py")
    return state


def part_state(part):
    """What a checkpoint keeps of a module, optimizer, generator, tensor, or object of arrays."""
    if isinstance(part, torch.Tensor):
        return part
    if isinstance(part, torch.Generator):
        return part.get_state()
    if hasattr(part, "state_dict"):
        return part.state_dict()
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in vars(part).items()}


def load_part(part, state):
    """Give a part what part_state took from it."""
    if isinstance(part, torch.Tensor):
        part.copy_(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, torch.optim.Optimizer):  # its settings are those of the run
        part.load_state_dict({**part.state_dict(), "state": state["state"]})
        parameters = [x for group in part.param_groups for x in group["params"]]
        for x, moments in part.state.items():
            shapes = {"step": (), "exp_avg": x.shape, "exp_avg_sq": x.shape}
            if {name: moment.shape for name, moment in moments.items()} != shapes:
                raise ValueError("the optimizer's moments don't fit the network")
        if part.state and set(part.state) != set(parameters):
            raise ValueError("the optimizer's moments aren't complete")
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    else:
        arrays = {name: state[name].numpy().copy() for name in vars(part)}
        if any(x.shape != np.shape(vars(part)[name]) for name, x in arrays.items()):
            raise ValueError("the statistics don't fit the environment")
        if not all(np.isfinite(x).all() for x in arrays.values()):
            raise ValueError("the statistics aren't finite")
        vars(part).update(arrays)


def launch(train, args_class, argv):
    """Train with the settings of a command line; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # where it can't show a ×
    try:
        train(parse_args(args_class, sys.argv[1:] if argv is None else argv))
    except (BadInput, RunFailed, Interrupted, KeyboardInterrupt, OSError, MemoryError) as error:
        line = " ".join(str(error).splitlines())  # an argument may hold a line break
        print(f"{Path(__file__).name}: {line or 'stopped at once'}", file=sys.stderr)
        if isinstance(error, Interrupted) and "SIGTERM" in str(error):
            return 143
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            return 130
        return 2 if isinstance(error, BadInput) else 1
    return 0


# ==== Environment ====
# The game of an id, whole games for evaluate.py, several processes, and memory.

import ctypes
import difflib

from ale_py import roms

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def rom_path(env_id):
    """The file of an Atari id's game, or BadInput with the closest names."""
    gym.register_envs(ale_py)
    games = {x: spec.kwargs["game"] for x, spec in gym.registry.items() if "game" in spec.kwargs}
    name = env_id.removeprefix("ale_py:")
    if name not in games:
        close = difflib.get_close_matches(name, games, cutoff=0.5) or sorted(games)[:3]
        raise BadInput(f"--env-id {env_id!r} is no Atari game; close are {', '.join(close)}.")
    return roms.get_rom_path(games[name])


class WholeGames(gym.Env):
    """Whole games with their raw rewards, for evaluate.py and one's own code."""

    metadata = {"render_fps": 15, "render_modes": ["rgb_array"]}  # of 60, every fourth is seen

    def __init__(self, args, render_mode=None):
        self.args = dataclasses.replace(args, episodic_life=False, clip_rewards=False)
        self.forgets, self.lost_life, self.render_mode = args.episodic_life, False, render_mode
        self.env, self.num_actions = self, len(Game(self.args, 0).actions)
        self.action_space = gym.spaces.Discrete(self.num_actions)
        self.observation_space = gym.spaces.Box(0, 255, (args.frame_stack, 84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.lost_life = Game(self.args, int(self.np_random.integers(2**31))), False
        return self.game.reset(), {}

    def step(self, action):
        lives = self.game.lives
        outcome = self.game.step(action)
        self.lost_life = self.forgets and self.game.lives < lives  # an episode's end in training
        return *outcome, {}

    def render(self):
        return self.game.ale.getScreenRGB()


def join_processes(args):
    """This process's rank and the number of processes; 0 and 1 unless torchrun started it."""
    given = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch(r"\d+ [1-9]\d*", " ".join(given)):
        cure = "start with torchrun, or unset them"
        raise BadInput(f"RANK is {given[0]!r} and WORLD_SIZE {given[1]!r}; {cure}.")
    rank, world = map(int, given)
    steps = args.num_envs // world * args.num_steps
    if args.num_envs % world or steps % args.num_minibatches or steps // args.num_minibatches < 2:
        each = f"{world} processes with {args.num_minibatches} equal minibatches each"
        cure = f"type a multiple of {2 * world * args.num_minibatches}"
        raise BadInput(f"--num-envs {args.num_envs} can't be shared by {each}; {cure}.")
    if world > 1 and not dist.is_initialized():
        for name in "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT":
            if name not in os.environ:
                cure = f"start with torchrun --nproc-per-node={world}, or unset WORLD_SIZE"
                raise BadInput(f"WORLD_SIZE is {world}, but there is no {name}; {cure}.")
        on_gpu = args.cuda and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return rank, world


class SharedRun(Run):
    """The Run of all processes: rank 0 keeps the directory, and the others write nothing."""

    def __enter__(self):
        self.rank, self.parent = dist.get_rank() if dist.is_initialized() else 0, os.getppid()
        if self.rank == 0:
            super().__enter__()
        if dist.is_initialized():
            counters_and_parts = [self.state if self.rank == 0 else None]
            dist.broadcast_object_list(counters_and_parts)
        if self.rank > 0:
            for number in signal.SIGINT, signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)  # rank 0 decides, after its update
            counters, parts = (counters_and_parts[0][name] for name in ("counters", "parts"))
            self.update, self.global_step = counters["update"], counters["global_step"]
            self.restart = self.update
            for name in "agent", "optimizer":
                load_part(self.parts[name], parts[name])
            if self.args.resume:  # the checkpoint has only that of rank 0
                self.parts["generator"].manual_seed(self.env_seed(self.rank, stream=2) % 2**63)
        return self

    def end_update(self, report):
        """As Run's, with the episodes of all processes and the means of what they report."""
        if dist.is_initialized():
            episodes = [None] * dist.get_world_size()
            dist.all_gather_object(episodes, self.episodes)
            self.episodes = sorted(sum(episodes, []))
            self.last_returns.extend(row[2] for rows in episodes[1:] for row in rows)
            values = averaged(torch.tensor(list(report.values()), dtype=torch.float64))
            report = dict(zip(report, values.tolist()))
            if os.getppid() != self.parent:  # torchrun is gone
                self.signal = self.signal or signal.SIGTERM
        stops = [True]
        try:
            if self.rank == 0:
                super().end_update(report)
            else:
                self.update, self.episodes = self.update + 1, []
            stops = [False]
        finally:
            if dist.is_initialized():
                dist.broadcast_object_list(stops)
        if stops[0]:
            raise Interrupted("rank 0 has stopped")

    def __exit__(self, kind, error, trace):
        if self.rank == 0:
            super().__exit__(kind, error, trace)
        if dist.is_initialized() and isinstance(error, RuntimeError):
            raise RunFailed("another process of this run has ended") from None


def keep_freed_memory():
    """Let the C library keep what is freed for the next tensor: with Linux's glibc a big one else
    comes from the system each time, and filling its pages takes longer than computing it.
    """
    if hasattr(ctypes.CDLL(None), "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
        ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# For `uv run`, which installs what a script names.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "opencv-python-headless==5.0.0.93",
#   "numpy==2.4.6", "tensorboard==2.21.0", "tyro==1.0.17", "tqdm==4.70.1",
# ]
# ///


def main(argv=None):
    return launch(train, Args, argv)


if __name__ == "__main__":
    sys.exit(main())
