"""TRPO for continuous actions, with PPO's code-level optimizations (TRPO+) or without (TRPO).

    python trpo_continuous.py                    # TRPO+, Hopper-v5: 6 minutes, returns 2400-3100
    python trpo_continuous.py --no-clip-vloss --no-anneal-lr --max-grad-norm inf --init xavier \\
        --reward-scaling none --clip-reward inf --clip-obs inf    # plain TRPO

Schulman et al. (2015), "Trust Region Policy Optimization", with the settings of Engstrom et al.
(2020), "Implementation Matters in Deep Policy Gradients", whose code-level optimizations are
E1-E9. E1, E4 and E9 act on the value network alone: the policy has no learning rate here.

    maximize mean(ratio * A) subject to mean KL(old || new) <= max_kl

Holds: core 1-7, core 9, core 11-13, continuous 1-9
Leaves out: core 8, core 10, atari 1-9, lstm 1-5, multidiscrete 1, aux 1-4

Not imitated of what Engstrom et al. released: there the clipping of gradients never reaches TRPO's
value network, the value loss has no 1/2 and leaves out terminal steps, the last step of a batch
bootstraps from its own state, and every batch begins with a reset of the environment.

Shapes: T steps of a rollout, N environments, B = T * N batch, M minibatch, O observation,
A action, P parameters of the policy. A bare name is (T, N, ...), b_ is the flat batch (B, ...),
mb_ a minibatch (M, ...). An *update* is one rollout and what is learned from it; an *epoch* is one
pass over its batch. A *step* is one action in one environment; `global_step` counts those of all
environments together. `terminated` (the task is over) and `truncated` (a time limit) stay apart:
both end an episode and cut the sum over lambda, only termination cuts the bootstrap from the next
observation's value.

Reading order: Args, then `train`, and each function when the loop calls it. What stands below the
line "Plumbing" may be skipped.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
import torch
from torch import nn


@dataclasses.dataclass
class Args:
    """Settings of a run. Numbers take "inf"; a value that switches a detail off is named."""

    env_id: str = "Hopper-v5"  # an id of gymnasium; "module:Env-v0" works too
    env_kwargs: str = "{}"  # keyword arguments of gymnasium.make, as JSON
    seed: int = 1  # of environments, initial weights, noise and minibatches
    total_timesteps: int = 1_000_000  # steps of all environments together, cut to whole updates
    num_envs: int = 1  # N, environments stepped in lockstep
    num_steps: int = 2048  # T, steps of each environment per update

    value_learning_rate: float | None = 3e-4  # of the value network; None, in PPO: as learning_rate
    anneal_lr: bool = True  # lower the rates linearly towards 0 over the run
    adam_eps: float = 1e-5  # PyTorch's own default is 1e-8
    max_grad_norm: float = 0.5  # largest L2 norm of all gradients that share a rate; inf: off
    gamma: float = 0.99  # discount per step
    gae_lambda: float = 0.95  # 1: return minus value; 0: one-step TD error
    bootstrap_on_truncation: bool = True  # off: a time limit counts as a real end (Baselines)
    num_minibatches: int = 32  # per epoch; 1: the whole batch at once
    update_epochs: int = 10  # passes over each batch

    max_kl: float = 0.04  # bound of an update's mean KL(old || new), before the first one
    max_kl_final: float = 0.07  # and at its last update; linear in between
    fisher_fraction: float = 0.1  # part of the batch that the Fisher matrix is estimated from
    cg_iterations: int = 10  # of conjugate gradients
    cg_damping: float = 0.1  # added to the diagonal of the Fisher matrix
    max_halvings: int = 10  # of a step in the line search, before it is given up
    min_gain: float = 0.1  # part of the predicted gain that a step must reach
    norm_adv: bool = True  # advantages to mean 0, std 1, over what a policy step sees
    clip_vloss: bool = True  # pessimistic value loss around the rollout's values
    clip_value_coef: float = 0.2  # its range
    init: Literal["orthogonal", "xavier", "default"] = "orthogonal"  # default: PyTorch's own
    activation: Literal["tanh", "relu"] = "tanh"  # of the hidden layers
    clip_actions: bool = True  # send actions clipped to the bounds of the environment
    norm_obs: bool = True  # observations to running mean 0, variance 1
    clip_obs: float = 10.0  # range of observations, normalized or not; inf: off
    reward_scaling: Literal["returns", "rewards", "none"] = "returns"  # by whose running std
    clip_reward: float = 10.0  # range of scaled rewards; inf: off

    heldout: bool = False  # measure KL and ratio on a second batch too, at twice the env steps
    compile: bool = False  # compile the minibatch step (needs a C++ compiler; pays after a minute)
    threads: int = 1  # of PyTorch; more is slower for small networks
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
        if self.value_learning_rate is None:
            raise BadInput("--value-learning-rate None: TRPO has no other rate; type a number.")


class RunningMeanStd:
    """Mean and standard deviation of a stream of arrays, float64 (Welford's update)."""

    def __init__(self, shape=()):
        self.count = 1e-4  # the weight of the first guess, mean 0 and variance 1
        self.mean, self.squares = np.zeros(shape), np.full(shape, self.count)
        self.std = np.ones(shape)

    def update(self, x):
        """Take in x: (N, ...)."""
        for row in x:
            self.count += 1
            deviation = row - self.mean
            self.mean = self.mean + deviation / self.count
            self.squares = self.squares + deviation * (row - self.mean)
        self.std = (self.squares / self.count + 1e-8) ** 0.5


def normalize_obs(raw_obs, statistics, clip_obs):
    """clip((raw_obs - mean) / std, +-clip_obs), as float32; (N, O) -> (N, O)."""
    # [continuous 6] [continuous 7] Observation normalization (E6) and clipping (E7): statistics
    # that were never updated have mean 0 and std 1 and change nothing.
    normalized = (raw_obs - statistics.mean) / statistics.std
    return normalized.clip(-clip_obs, clip_obs).astype(np.float32)


class RewardScaling:
    """Rewards as the learner sees them.

    "returns": sum = gamma * sum + reward;   scaled = reward / std(sum)
    "rewards": scaled = mean(reward) + (reward - mean(reward)) / std(reward)
    then clip(scaled, +-clip_reward). Engstrom et al. (2020), E2 and E5.
    """

    def __init__(self, args):
        self.args = args
        self.statistics = RunningMeanStd()
        self.carried_sum = np.zeros(args.num_envs)  # gamma * sum; 0 where an episode begins

    def __call__(self, reward, ended):
        """Scale the rewards of a rollout; `ended` says which steps ended an episode. (T, N) each"""
        # [continuous 8] Reward scaling (E2): divide by the running std of the discounted sum of
        # rewards, which starts anew at any end of an episode. Its mean is never subtracted.
        center, std = np.zeros_like(reward), np.ones_like(reward)
        decay = self.args.gamma * ~ended
        for t in range(len(reward)):
            discounted_sum = self.carried_sum + reward[t]
            self.carried_sum = decay[t] * discounted_sum
            if self.args.reward_scaling == "returns":
                self.statistics.update(discounted_sum)
            elif self.args.reward_scaling == "rewards":
                self.statistics.update(reward[t])
                center[t] = self.statistics.mean
            std[t] = self.statistics.std
        scaled = center + (reward - center) / std
        # [continuous 9] Reward clipping (E5).
        return scaled.clip(-self.args.clip_reward, self.args.clip_reward)


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
    """Policy and value networks over normalized observations."""

    def __init__(self, observation_size, action_size, args):
        super().__init__()
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[args.activation]

        def hidden():
            first = initialized(nn.Linear(observation_size, 64), math.sqrt(2), args.init)
            second = initialized(nn.Linear(64, 64), math.sqrt(2), args.init)
            return [first, activation(), second, activation()]

        # [continuous 1] The policy network gives the mean of a normal distribution.
        policy_hidden = hidden()
        mean_head = initialized(nn.Linear(64, action_size), 0.01, args.init)
        self.policy = nn.Sequential(*policy_hidden, mean_head)
        # [core 13] [continuous 4] Separate networks with two hidden layers of 64, tanh (E8).
        value_head = initialized(nn.Linear(64, 1), 1.0, args.init)
        self.value = nn.Sequential(*hidden(), value_head, nn.Flatten(0))
        # [continuous 2] The log standard deviation doesn't depend on the state: one vector, from 0.
        self.log_std = nn.Parameter(torch.zeros(action_size))


def gaussian_log_prob(action, mean, log_std):
    """log p(action) = -sum over A of ((action - mean) / std)**2 / 2 + log_std + log(2 pi) / 2"""
    assert action.shape == mean.shape and log_std.shape == mean.shape[-1:]
    # [continuous 3] Independent components: the joint log-probability is the sum of theirs.
    deviation = (action - mean) * (-log_std).exp()
    constant = 0.5 * math.log(2 * math.pi) * log_std.numel()
    return -(0.5 * deviation * deviation + log_std).sum(-1) - constant


def gaussian_entropy(log_std):
    """entropy = sum over A of log_std + log(2 pi e) / 2; (A,) -> ()"""
    return log_std.sum() + 0.5 * math.log(2 * math.pi * math.e) * log_std.numel()


def gaussian_kl(old_mean, old_log_std, mean, log_std):
    """sum over A of log_std - old_log_std + (old_std**2 + (old_mean - mean)**2) / (2 std**2) - 1/2

    It is KL(old || new). means: (B, A); log stds: (A,) -> (B,)
    """
    assert old_mean.shape == mean.shape and old_log_std.shape == log_std.shape == mean.shape[-1:]
    squares = (2 * old_log_std).exp() + (old_mean - mean).square()
    return (log_std - old_log_std + squares / (2 * (2 * log_std).exp()) - 0.5).sum(-1)


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


def value_gradient(agent, parameters, args, clip_value_coef, minibatch):
    """Gradient of the value loss on one minibatch by `parameters`, clipped, as one vector.

    value_loss = mean(max((V - target)**2, (clip(V, V_old +- clip_value_coef) - target)**2)) / 2

    clip_value_coef: tensor (). minibatch: (M, ...) tensors. -> gradient; value loss and norm (2,)
    """
    mb_obs, mb_value, mb_target = minibatch
    value = agent.value(mb_obs)
    error = value - mb_target
    square = error * error
    if args.clip_vloss:
        # [core 9] Value-loss clipping (E1), around the values of the rollout.
        clipped = value.clamp(mb_value - clip_value_coef, mb_value + clip_value_coef)
        clipped_error = clipped - mb_target
        square = torch.max(square, clipped_error * clipped_error)
    value_loss = 0.5 * square.mean()
    gradient = flat_gradient(value_loss, parameters)
    # [core 11] Global gradient clipping (E9): one norm over all parameters of the value network.
    norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    return gradient, torch.stack([value_loss, norm]).detach()


def flat_gradient(output, parameters, **kwargs):
    """Gradient of a scalar by the parameters, as one vector (P,)."""
    return torch.cat([x.flatten() for x in torch.autograd.grad(output, parameters, **kwargs)])


def surrogate(agent, obs, action, log_prob, advantage):
    """surrogate = mean(ratio * A), ratio = exp(log p_new(action) - log p_old(action))"""
    log_ratio = gaussian_log_prob(action, agent.policy(obs), agent.log_std) - log_prob
    return (log_ratio.exp() * advantage).mean()


def fisher_vector_product(kl_gradient, parameters, v, damping):
    """(F + damping * I) v, F v = gradient of (gradient of the mean KL . v); (P,) -> (P,)

    The Hessian of the mean KL(old || new) at new = old is the Fisher matrix F. kl_gradient is the
    gradient of that mean KL, with the graph it came from.
    """
    return flat_gradient(kl_gradient @ v, parameters, retain_graph=True) + damping * v


def conjugate_gradient(product, b, iterations):
    """Solve A x = b for a positive definite A (P, P), given v -> A v (Hestenes and Stiefel 1952).

    -> x (P,), and |b - A x| / |b|
    """
    x, residual, direction = torch.zeros_like(b), b, b
    square = residual @ residual
    for _ in range(iterations):
        along = product(direction)
        alpha = square / (direction @ along)
        x = x + alpha * direction
        residual = residual - alpha * along
        previous, square = square, residual @ residual
        if not square > 1e-20 * (b @ b):  # solved, or not finite
            break
        direction = residual + square / previous * direction
    return x, (residual.norm() / b.norm()).item()


def line_search(vector, step, gain_and_kl, predicted_gain, max_kl, args):
    """Move `vector` (P,) by the first of step, step / 2, step / 4, ... that serves, in place.

    It serves if gain >= min_gain * predicted_gain / 2**halvings, gain > 0 and KL <= max_kl. If none
    does, the vector is left as it was. -> halvings, or nan
    """
    old = vector.clone()
    for halvings in range(args.max_halvings + 1):
        fraction = 0.5**halvings
        vector.copy_(old + fraction * step)
        gain, kl = gain_and_kl()
        enough = max(args.min_gain * fraction * predicted_gain, 0.0)
        if gain >= enough and gain > 0 and kl <= max_kl:
            return halvings
    vector.copy_(old)
    return math.nan


def trpo_step(agent, parameters, vector, batch, old_mean, old_log_std, subset, max_kl, args):
    """One step of TRPO: x = F^-1 g by conjugate gradients, then sqrt(2 max_kl / x'Fx) x, halved
    until it serves. g is the surrogate's gradient at the old parameters.

    `vector` (P,), of which `parameters` are views, is moved in place or left bit by bit as it was.
    batch: what `surrogate` takes, (B, ...). subset: indices that F is estimated from.
    -> what is reported
    """
    before = surrogate(agent, *batch)
    gradient = flat_gradient(before, parameters)
    mean = agent.policy(batch[0][subset])
    kl = gaussian_kl(old_mean[subset], old_log_std, mean, agent.log_std).mean()
    kl_gradient = flat_gradient(kl, parameters, create_graph=True)

    def product(v):
        return fisher_vector_product(kl_gradient, parameters, v, args.cg_damping)

    @torch.no_grad()
    def gain_and_kl():
        kl = gaussian_kl(old_mean, old_log_std, agent.policy(batch[0]), agent.log_std).mean()
        return (surrogate(agent, *batch) - before).item(), kl.item()

    x, residual = conjugate_gradient(product, gradient, args.cg_iterations)
    curvature = (x @ product(x)).item()
    halvings = math.nan
    if curvature > 0 and math.isfinite(curvature):  # else there is no step: a zero gradient, say
        step = math.sqrt(2 * max_kl / curvature) * x
        predicted_gain = (gradient @ step).item()
        halvings = line_search(vector, step, gain_and_kl, predicted_gain, max_kl, args)
    gain = gain_and_kl()[0]
    return {
        "losses/surrogate_before": before.item(),
        "losses/surrogate_after": before.item() + gain,
        "losses/policy_grad_norm": gradient.norm().item(),
        "trust_region/accepted": int(halvings >= 0),
        "trust_region/halvings": halvings,  # nan: the step was given up
        "trust_region/curvature": curvature,
        "trust_region/cg_residual": residual,
        "trust_region/max_kl": max_kl,
    }


def train(args):
    """Train an agent and return the directory of the run."""
    torch.set_num_threads(args.threads)
    device = choose_device(args)
    T, N = args.num_steps, args.num_envs
    envs = [Environment(args) for _ in range(N)]
    O, A = envs[0].observation_size, envs[0].action_size
    bounds = (envs[0].low, envs[0].high) if args.clip_actions else (-math.inf, math.inf)

    torch.manual_seed(args.seed)  # of the initial weights
    agent = Agent(O, A, args).to(device)
    generator = torch.Generator().manual_seed(args.seed)  # of action noise and minibatches
    # One vector holds all parameters, and the network's own become views of it: the first part is
    # what TRPO's step moves, the second what Adam does.
    parameters = list(agent.parameters())  # log_std and the policy's come first
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)
    policy_parameters = [agent.log_std, *agent.policy.parameters()]
    value_parameters = list(agent.value.parameters())
    policy_size = sum(x.numel() for x in policy_parameters)
    policy_vector, value_vector = vector.tensor_split([policy_size])
    # [core 3] Adam's epsilon is 1e-5.
    rate = args.value_learning_rate
    optimizer = unprofiled(torch.optim.Adam([value_vector], lr=rate, eps=args.adam_eps, fused=True))
    obs_statistics, scale_reward = RunningMeanStd(O), RewardScaling(args)
    clip_value_coef = torch.tensor(args.clip_value_coef, device=device)
    compute_gradient = compiled(value_gradient, args.compile)
    parts = {"agent": agent, "optimizer": optimizer, "generator": generator}
    parts |= {"obs_statistics": obs_statistics, "reward_statistics": scale_reward.statistics}
    with Run(args, parts) as run:
        # [core 1] Vectorized architecture: N environments step in lockstep, and their episodes run
        # on over the borders of the rollouts.
        raw_obs = np.stack([env.reset(run.env_seed(n)) for n, env in enumerate(envs)])
        if args.norm_obs:
            obs_statistics.update(raw_obs)
        next_observation = normalize_obs(raw_obs, obs_statistics, args.clip_obs)
        trust_region = TrustRegion(agent, obs_statistics, args, run)

        for update in range(run.update + 1, args.num_updates + 1):
            # [core 4] Learning-rate annealing (E4): factor 1 at the first update, 1/K at the last.
            remaining = 1.0 - (update - 1) / args.num_updates
            optimizer.param_groups[0]["lr"] = rate * remaining if args.anneal_lr else rate
            # The bound of update k is max_kl + (max_kl_final - max_kl) * k / K.
            annealed = (args.max_kl_final - args.max_kl) * update / args.num_updates
            max_kl = args.max_kl + annealed

            # ---- Rollout ----
            obs, final_obs = np.zeros((T, N, O), np.float32), []
            raw_reward, (terminated, truncated) = np.zeros((T, N)), np.zeros((2, T, N), bool)
            policy, old_log_std = numpy_policy(agent), agent.log_std.detach().clone()
            std = old_log_std.exp().cpu()
            action = (torch.randn(T, N, A, generator=generator) * std).numpy()  # the noise of it
            for t in range(T):
                run.global_step += N
                obs[t] = next_observation
                action[t] += policy(next_observation)
                # [continuous 5] Action clipping: the environment gets the clipped action, the
                # batch keeps the one that was drawn.
                for n, sent in enumerate(action[t].clip(*bounds)):
                    outcome = envs[n].step(sent)
                    raw_obs[n], raw_reward[t, n], terminated[t, n], truncated[t, n] = outcome
                    if terminated[t, n] or truncated[t, n]:
                        run.episode(envs[n].episode_return, envs[n].episode_length)
                        last = normalize_obs(raw_obs[n], obs_statistics, args.clip_obs)
                        final_obs.append((t, n, last))
                        raw_obs[n] = envs[n].reset()
                if args.norm_obs:
                    obs_statistics.update(raw_obs)
                next_observation = normalize_obs(raw_obs, obs_statistics, args.clip_obs)

            # ---- Advantages ----
            ended = terminated | truncated
            reward = scale_reward(raw_reward, ended)
            # The network hasn't changed since the rollout, so what it says of the whole batch is
            # computed now, in three large passes instead of many small ones.
            next_obs = np.concatenate([obs[1:], next_observation[None]])
            for t, n, last in final_obs:
                next_obs[t, n] = last
            b_obs, b_action, b_next_obs = (
                torch.from_numpy(x).flatten(0, 1).to(device) for x in (obs, action, next_obs)
            )
            with torch.no_grad():
                b_mean, b_value = agent.policy(b_obs), agent.value(b_obs)
                b_next_value = agent.value(b_next_obs)
                b_log_prob = gaussian_log_prob(b_action, b_mean, old_log_std)
            trust_region.before(b_obs, b_action, b_mean, old_log_std)
            # [core 5] Generalized advantage estimation; the value's target is advantage + value.
            value, next_value = (x.cpu().numpy().reshape(T, N) for x in (b_value, b_next_value))
            no_bootstrap = terminated if args.bootstrap_on_truncation else ended
            ends, discounts = (no_bootstrap, ended), (args.gamma, args.gae_lambda)
            advantage = compute_gae(reward, value, next_value, *ends, *discounts)
            b_advantage = torch.from_numpy(advantage.astype(np.float32)).flatten().to(device)
            b_target = b_advantage + b_value

            # ---- Update ----
            # [core 6] Minibatch updates, of the value network. The advantages stand already, so it
            # makes no difference whether it or the policy moves first.
            losses = []
            for minibatch in shuffled_minibatches((b_obs, b_value, b_target), args, generator):
                step = compute_gradient(agent, value_parameters, args, clip_value_coef, minibatch)
                value_vector.grad, loss = step
                losses.append(loss)
                optimizer.step()
            # [no core 8] [no core 10] No clipped surrogate, no loss in common with the value: one
            # step for the policy, within the trust region.
            if args.norm_adv:
                # [core 7] Advantage normalization, over the batch.
                std, center = torch.std_mean(b_advantage)
                b_advantage = (b_advantage - center) / (std + 1e-8)
            subset = torch.randperm(args.batch_size, generator=generator)
            subset = subset[: math.ceil(args.fisher_fraction * args.batch_size)].to(device)
            batch = b_obs, b_action, b_log_prob, b_advantage
            old = b_mean, old_log_std
            policy = agent, policy_parameters, policy_vector
            report = trpo_step(*policy, batch, *old, subset, max_kl, args)

            # ---- Report ----
            # [core 12] Debug variables: means over all minibatches of the update.
            names = "value_loss", "grad_norm"
            losses = torch.stack(losses).cpu()
            check_losses(names, losses, args.num_minibatches)
            report |= {f"losses/{name}": x for name, x in zip(names, losses.mean(0).tolist())}
            unexplained = (b_target - b_value).var() / b_target.var()
            report |= {
                "losses/entropy": gaussian_entropy(old_log_std).item(),
                "losses/explained_variance": 1 - unexplained.item(),
                "charts/value_learning_rate": optimizer.param_groups[0]["lr"],
            }
            report |= trust_region.after()
            for name in (
                "losses/surrogate_before",
                "losses/policy_grad_norm",
                "trust_region/mean_kl",
            ):
                if not math.isfinite(report[name]):
                    raise RunFailed(f"{name.split('/')[1]} is {report[name]}")
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


# ==== Trust region ====
# Is there one (Engstrom et al. 2020, Figures 2 to 4)? Measured, not used but for the adaptive KL
# coefficient: the same to the letter in PPO and TRPO.


class TrustRegion:
    """The policy before and after an update, on its batch and, with --heldout, on a second one."""

    def __init__(self, agent, statistics, args, run):
        self.agent, self.statistics, self.args = agent, statistics, args
        if args.heldout:
            self.envs = [Environment(args) for _ in range(args.num_envs)]
            resets = [e.reset(run.env_seed(n, stream=1)) for n, e in enumerate(self.envs)]
            self.raw_obs = np.stack(resets)
            seed = run.env_seed(args.num_envs, stream=1) % 2**63
            self.generator = torch.Generator().manual_seed(seed)

    def before(self, *batch):
        """Take observations and actions (B, ...), and means (B, A) and log std of their policy."""
        self.batches = {"": batch}
        if self.args.heldout:
            own = self.envs, self.raw_obs, self.statistics, self.generator
            obs, action = collect_heldout(self.agent, *own, self.args)
            with torch.no_grad():
                self.batches["heldout_"] = obs, action, self.agent.policy(obs), batch[-1]

    def after(self):
        """-> what is reported of the update that was made since"""
        report = {}
        for name, batch in self.batches.items():
            mean_kl, max_ratio = kl_and_ratio(self.agent, *batch)
            report[f"trust_region/{name}mean_kl"] = mean_kl
            report[f"trust_region/{name}max_ratio"] = max_ratio
        return report


@torch.no_grad()
def kl_and_ratio(agent, obs, action, old_mean, old_log_std):
    """Mean of the exact KL(old || new) and maximum of the ratio new / old over a batch."""
    mean = agent.policy(obs)
    old_log_prob = gaussian_log_prob(action, old_mean, old_log_std)
    log_ratio = gaussian_log_prob(action, mean, agent.log_std) - old_log_prob
    kl = gaussian_kl(old_mean, old_log_std, mean, agent.log_std)
    return kl.mean().item(), log_ratio.max().exp().item()


def collect_heldout(agent, envs, raw_obs, statistics, generator, args):
    """A second batch of the same policy: own environments and noise, frozen statistics.

    raw_obs (N, O) is where the environments stand, and is moved on. -> obs (B, O), action (B, A)
    """
    policy, std = numpy_policy(agent), agent.log_std.detach().exp().cpu()
    obs = np.zeros((args.num_steps, *raw_obs.shape), np.float32)
    shape = args.num_steps, len(envs), len(std)
    action = (torch.randn(shape, generator=generator) * std).numpy()  # the noise of it
    bounds = (envs[0].low, envs[0].high) if args.clip_actions else (-math.inf, math.inf)
    for t in range(args.num_steps):
        obs[t] = normalize_obs(raw_obs, statistics, args.clip_obs)
        action[t] += policy(obs[t])
        for n, sent in enumerate(action[t].clip(*bounds)):
            raw_obs[n], _, terminated, truncated = envs[n].step(sent)
            if terminated or truncated:
                raw_obs[n] = envs[n].reset()
    arrays, device = (obs, action), agent.log_std.device
    return [torch.from_numpy(x).flatten(0, 1).to(device) for x in arrays]


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
