"""PPO, Algorithm 1 of its paper and nothing else: the place to start reading.

    python ppo_minimal_no_tricks.py  # InvertedPendulum-v5, 2 minutes: 1000 with seeds 1, 2 and 3

A tag [no ...] says where a trick of other code would stand. With all of them off, the weights of
`ppo_continuous.py` are the same bit for bit (tests/test_ladder.py): a diff shows the tricks. (One
of them, tanh, is the paper's own choice too.)

Holds: core 1, core 5-6, core 8, core 10, core 13, continuous 1-3, continuous 5
Leaves out: core 2-4, core 7, core 9, core 11-12, continuous 4, continuous 6-9, atari 1-9, lstm 1-5,
    multidiscrete 1, aux 1-4

T steps of N environments are a batch of B = T * N; O observation, A action. A bare name is
(T, N, ...), b_ the flat batch (B, ...), mb_ a minibatch of it. `terminated` and `truncated` both
end an episode and cut the sum over lambda; only termination cuts the bootstrap.
"""

import dataclasses
import math

import numpy as np
import torch
from torch import nn


@dataclasses.dataclass
class Args:
    """Settings of a run; the numbers are the PPO paper's for MuJoCo."""

    env_id: str = "InvertedPendulum-v5"  # an id of gymnasium; "module:Env-v0" works too
    env_kwargs: str = "{}"  # keyword arguments of gymnasium.make, as JSON
    seed: int = 1  # of environments, initial weights, noise and minibatches
    total_timesteps: int = 200_000  # steps of all environments together, cut to whole updates
    num_envs: int = 1  # N, environments stepped in lockstep
    num_steps: int = 2048  # T, steps of each environment per update
    learning_rate: float = 3e-4  # initial rate of Adam
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # 1: return minus value; 0: one-step TD error
    num_minibatches: int = 32  # per epoch; 1: the whole batch at once
    update_epochs: int = 10  # passes over each batch
    clip_coef: float = 0.2  # the ratio's range is 1 +- clip_coef; inf: off
    vf_coef: float = 0.5  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus; negative penalises entropy
    threads: int = 1  # of PyTorch; more is slower for small networks
    runs_dir: str = "runs"  # folder that gets the run's own directory
    checkpoint_every: int = 10  # updates between checkpoints; one is written at the end anyway
    resume: str | None = None  # directory of a run to go on with; its settings stay, but the total
    batch_size: int = dataclasses.field(init=False)  # B = T * N
    minibatch_size: int = dataclasses.field(init=False)  # M
    num_updates: int = dataclasses.field(init=False)  # K

    def __post_init__(self):
        self.batch_size, self.minibatch_size, self.num_updates = batch_sizes(self)


class Agent(nn.Module):
    """Policy and value networks over observations."""

    def __init__(self, observation_size, action_size, args):
        super().__init__()

        # [no core 2] PyTorch's own initialization. [no continuous 4] ReLU.
        def hidden():
            return [nn.Linear(observation_size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]

        # [continuous 1] The policy network gives the mean of a normal distribution.
        self.policy = nn.Sequential(*hidden(), nn.Linear(64, action_size))
        # [core 13] Separate networks.
        self.value = nn.Sequential(*hidden(), nn.Linear(64, 1), nn.Flatten(0))
        # [continuous 2] The log standard deviation doesn't depend on the state: one vector, from 0.
        self.log_std = nn.Parameter(torch.zeros(action_size))


def gaussian_log_prob(action, mean, log_std):
    """log p(action) = -sum over A of ((action - mean) / std)**2 / 2 + log_std + log(2 pi) / 2"""
    assert action.shape == mean.shape and log_std.shape == mean.shape[-1:]
    # [continuous 3] Independent components: the joint log-probability is the sum of theirs.
    deviation = (action - mean) * (-log_std).exp()
    constant = 0.5 * math.log(2 * math.pi) * log_std.numel()
    return -(0.5 * deviation * deviation + log_std).sum(-1) - constant


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


def train(args):
    """Train an agent and return the directory of the run."""
    torch.set_num_threads(args.threads)
    envs = [Environment(args) for _ in range(args.num_envs)]
    T, N, O, A = args.num_steps, args.num_envs, envs[0].observation_size, envs[0].action_size
    torch.manual_seed(args.seed)  # of the initial weights
    agent = Agent(O, A, args)
    generator = torch.Generator().manual_seed(args.seed)  # of action noise and minibatches
    parameters = list(agent.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()  # all of them in one tensor, which
    nn.utils.vector_to_parameters(vector, parameters)  # Adam moves faster than thirteen small ones
    # [no core 3] [no core 4] Adam with PyTorch's epsilon and a constant rate.
    optimizer = torch.optim.Adam([vector], lr=args.learning_rate, fused=True)
    with Run(args, {"agent": agent, "optimizer": optimizer, "generator": generator}) as run:
        # [core 1] Vectorized architecture: episodes run on over the borders of the rollouts.
        now = np.stack([env.reset(run.env_seed(n)) for n, env in enumerate(envs)])
        for _ in range(run.update, args.num_updates):
            # ---- Rollout ----
            # [no continuous 6] [no continuous 7] [no continuous 8] [no continuous 9] No statistics.
            obs, next_obs = np.zeros((2, T, N, O), np.float32)
            reward, (terminated, truncated) = np.zeros((T, N)), np.zeros((2, T, N), bool)
            policy, std = numpy_policy(agent), agent.log_std.detach().exp()
            action = (torch.randn(T, N, A, generator=generator) * std).numpy()  # the noise of it
            for t in range(T):
                run.global_step += N
                obs[t] = now
                action[t] += policy(obs[t])
                # [continuous 5] Action clipping: of what is sent, not of what is learned from.
                for n, sent in enumerate(action[t].clip(envs[0].low, envs[0].high)):
                    now[n], reward[t, n], terminated[t, n], truncated[t, n] = envs[n].step(sent)
                    next_obs[t, n] = now[n]
                    if terminated[t, n] or truncated[t, n]:
                        run.episode(envs[n].episode_return, envs[n].episode_length)
                        now[n] = envs[n].reset()

            # ---- Advantages ----
            arrays = obs, next_obs, action
            b_obs, b_next_obs, b_action = (torch.from_numpy(x).flatten(0, 1) for x in arrays)
            with torch.no_grad():
                b_value, b_next_value = agent.value(b_obs), agent.value(b_next_obs)
                b_log_prob = gaussian_log_prob(b_action, agent.policy(b_obs), agent.log_std)
            # [core 5] Generalized advantage estimation; the value's target is advantage + value.
            value, next_value = (x.numpy().reshape(T, N) for x in (b_value, b_next_value))
            ends, discounts = (terminated, terminated | truncated), (args.gamma, args.gae_lambda)
            advantage = compute_gae(reward, value, next_value, *ends, *discounts)
            # [no core 7] Advantages are used as they are.
            b_advantage = torch.from_numpy(advantage.astype(np.float32)).flatten()
            b_target = b_advantage + b_value

            # ---- Update ----
            losses = []
            for _ in range(args.update_epochs):
                # [core 6] Minibatch updates: every epoch visits each step of the batch once.
                order = torch.randperm(args.batch_size, generator=generator)
                for index in order.split(args.minibatch_size):
                    mb_obs, mb_advantage = b_obs[index], b_advantage[index]
                    # [core 8] Clipped surrogate objective.
                    mean = agent.policy(mb_obs)
                    log_prob = gaussian_log_prob(b_action[index], mean, agent.log_std)
                    ratio = (log_prob - b_log_prob[index]).exp()
                    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    policy_loss = -torch.min(ratio * mb_advantage, clipped * mb_advantage).mean()
                    # [no core 9] The value loss isn't clipped.
                    value_loss = 0.5 * (agent.value(mb_obs) - b_target[index]).square().mean()
                    # [core 10] One loss for both networks, with an entropy bonus.
                    entropy = (agent.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
                    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
                    gradients = torch.autograd.grad(loss, parameters)
                    # [no core 11] Gradients aren't clipped.
                    vector.grad = nn.utils.parameters_to_vector(gradients)
                    optimizer.step()
                    losses.append(torch.stack([policy_loss, value_loss, entropy]).detach())

            # ---- Report ----
            # [no core 12] Three means over the minibatches, and no more.
            losses, names = torch.stack(losses), ("policy_loss", "value_loss", "entropy")
            check_losses(names, losses, args.num_minibatches)
            run.end_update({f"losses/{n}": x for n, x in zip(names, losses.mean(0).tolist())})
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
# Any environment of gymnasium with continuous actions, checked, and a fast way to act in it: the
# same to the letter in every script for them.


class Environment:
    """gymnasium.make with flat float64 observations; what goes wrong in it ends in one line."""

    def __init__(self, args, render_mode=None):
        render = {"render_mode": render_mode} if render_mode else {}
        try:
            self.env = gym.make(args.env_id, **{**json.loads(args.env_kwargs), **render})
            space, actions = self.env.observation_space, self.env.action_space
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadInput(f"--env-id {args.env_id} {args.env_kwargs}: {reason}") from None
        if not space.is_np_flattenable or gym.spaces.flatdim(space) == 0:
            kinds = "Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict and Tuple of these"
            raise BadInput(f"{args.env_id} has observations {space}; allowed are {kinds}.")
        self.observation_size = gym.spaces.flatdim(space)
        self.is_flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        self.take_actions(actions, args)

    def take_actions(self, space, args):
        """Take up the space of the actions, or raise BadInput."""
        is_box = isinstance(space, gym.spaces.Box) and math.prod(space.shape) > 0
        if not is_box or space.dtype.kind != "f":
            raise BadInput(f"{args.env_id} has actions {space}; allowed is Box of floats.")
        self.action_shape, self.action_dtype = space.shape, space.dtype
        self.action_size = math.prod(space.shape)
        self.low, self.high = space.low.flatten(), space.high.flatten()

    def sent(self, action):
        """(A,) -> an action of the environment's own space"""
        return action.astype(self.action_dtype, copy=False).reshape(self.action_shape)

    @guarded
    def reset(self, seed=None):
        """-> observation (O,)"""
        self.episode_return = self.episode_length = 0
        self.obs, self.info = self.env.reset(seed=seed)
        return self.observe(self.obs)

    @guarded
    def step(self, action):
        """Act with (A,) -> observation (O,), raw reward, terminated, truncated"""
        self.obs, reward, terminated, truncated, self.info = self.env.step(self.sent(action))
        reward = float(np.asarray(reward).item())
        if not abs(reward) < 1e100:  # squares of more would overflow in the statistics
            raise RunFailed(f"the environment's reward is {reward}")
        self.episode_return += reward
        self.episode_length += 1
        return self.observe(self.obs), reward, bool(terminated), bool(truncated)

    @guarded
    def observe(self, obs):
        """An observation of the environment's own space -> (O,)"""
        if not self.is_flat:
            obs = gym.spaces.flatten(self.env.observation_space, obs)
        obs = np.asarray(obs, np.float64)
        if obs.shape != (self.observation_size,):
            raise RunFailed(f"the environment's observation has shape {obs.shape}")
        if not obs.dot(obs) < 1e200:
            raise RunFailed(f"the environment's observation has {obs[abs(obs).argmax()]} in it")
        return obs


def numpy_policy(agent):
    """The policy network in NumPy, (N, O) -> (N, A): several times faster for a few observations.

    mean = f(f(obs W1 + b1) W2 + b2) W3 + b3, f the activation, with copies of the weights of now.
    """
    is_tanh = any(isinstance(layer, nn.Tanh) for layer in agent.policy)
    f = np.tanh if is_tanh else lambda x: np.maximum(x, 0)
    parameters = [np.atleast_2d(p.detach().cpu().numpy().T) for p in agent.policy.parameters()]
    W1, b1, W2, b2, W3, b3 = (p.copy() for p in parameters)
    return lambda obs: f(f(obs.dot(W1) + b1).dot(W2) + b2).dot(W3) + b3


# For `uv run`, which installs what a script names.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#   "tensorboard==2.21.0", "tyro==1.0.17", "tqdm==4.70.1",
# ]
# ///


def main(argv=None):
    return launch(train, Args, argv)


if __name__ == "__main__":
    sys.exit(main())
