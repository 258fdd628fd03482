"""The nine cells of PPO, PPO-M and PPO-NoClip that Engstrom et al. released, as command lines.

Every column is read back from what it acts on: optimizer, networks, loss, statistics.
"""

import copy
import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch

import ppo_continuous as script

SHARED = """--activation tanh --adam-eps 1e-5 --norm-obs --gamma 0.99 --no-clip-actions
--no-bootstrap-on-truncation"""
CELLS = {  # policy lr, value lr, reward norm, init, anneal, value clip, grad norm, lambda, entropy,
    # reward clip, observation clip, clip range
    "Hopper PPO": (3e-4, 2.5e-4, "returns", "orthogonal", 1, 0, math.inf, 0.95, 0, 10, 10, 0.2),
    "Hopper PPO-M": (
        *(1.7e-4, 4e-4, "none", "xavier", 0, 0, math.inf, 0.95, 0, math.inf, math.inf, 0.2),
    ),
    "Hopper PPO-NoClip": (
        *(6e-5, 4e-4, "rewards", "orthogonal", 1, 0, 4, 0.925, -0.005, 2.5, 10, math.inf),
    ),
    "Walker2d PPO": (4e-4, 3e-4, "returns", "orthogonal", 1, 1, math.inf, 0.95, 0, 10, 10, 0.2),
    "Walker2d PPO-M": (
        *(1e-4, 2e-4, "none", "xavier", 0, 0, math.inf, 0.95, 0, math.inf, math.inf, 0.2),
    ),
    "Walker2d PPO-NoClip": (
        *(7.25e-5, 6e-4, "rewards", "orthogonal", 1, 0, 0.1, 0.85, -0.01, 30, math.inf, math.inf),
    ),
    "Humanoid PPO": (1.5e-4, 1e-4, "returns", "orthogonal", 1, 1, math.inf, 0.95, 0, 10, 10, 0.2),
    "Humanoid PPO-M": (
        *(9e-5, 4e-4, "none", "xavier", 0, 0, math.inf, 0.95, 0, math.inf, math.inf, 0.2),
    ),
    "Humanoid PPO-NoClip": (
        *(2e-5, 5e-5, "returns", "xavier", 0, 1, 0.5, 0.85, 0.005, 10, 10, math.inf),
    ),
}
COLUMNS = """learning_rate value_learning_rate reward_scaling init anneal_lr clip_vloss
max_grad_norm gae_lambda ent_coef clip_reward clip_obs clip_coef""".split()


def command_line(cell):
    """Column names and values -> options of the script."""
    options = []
    for name, x in cell.items():
        option = name.replace("_", "-")
        if name in ("anneal_lr", "clip_vloss"):
            options.append(f"--{option}" if x else f"--no-{option}")
        else:
            options += [f"--{option}", str(x)]
    return options


@pytest.fixture(params=CELLS)
def played(request, monkeypatch, tmp_path):
    """Two updates of a cell, and what was seen in them."""
    task = request.param.split()[0]
    cell = dict(zip(COLUMNS, CELLS[request.param]))
    seen = {"rates": [], "calls": [], "gae": [], "raw": [], "sent": []}

    class Adam(torch.optim.Adam):
        def step(self, *args):
            seen["rates"].append([group["lr"] for group in self.param_groups])
            seen["eps"] = {group["eps"] for group in self.param_groups}
            return super().step(*args)

    class Agent(script.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            seen["initial"] = copy.deepcopy(self)

    class RewardScaling(script.RewardScaling):
        def __call__(self, reward, ended):
            seen["raw"].append((reward.copy(), ended.copy()))
            return super().__call__(reward, ended)

    class Environment(script.Environment):
        def step(self, action):
            seen["sent"].append(action.copy())
            seen["high"] = self.high
            return super().step(action)

    def spy(name, key):
        original = getattr(script, name)

        def spied(*args):
            seen[key].append(args)
            return original(*args)

        monkeypatch.setattr(script, name, spied)
        return original

    seen["gradients"] = spy("policy_and_value_gradients", "calls")
    spy("compute_gae", "gae")
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    for replacement in Agent, RewardScaling, Environment:
        monkeypatch.setattr(script, replacement.__name__, replacement)
    small = """--num-steps 64 --num-minibatches 2 --update-epochs 1 --total-timesteps 128
    --env-kwargs {"max_episode_steps":7}""".split()
    argv = ["--env-id", f"{task}-v5", *command_line(cell), *SHARED.split(), *small]
    args = script.parse_args(script.Args, [*argv, "--runs-dir", str(tmp_path)])
    run = script.train(args)
    seen["state"] = torch.load(run / "checkpoint.pt", weights_only=True)
    return cell, args, seen


def test_cell_acts_as_released(played):
    cell, args, seen = played
    check_rates(cell, seen)
    check_initialization(cell, seen["initial"])
    check_loss(cell, args, seen)
    check_statistics(cell, args, seen)
    assert np.abs(seen["sent"]).max() > seen["high"].max()  # actions are sent as drawn
    for _, _, _, no_bootstrap, ended, gamma, gae_lambda in seen["gae"]:
        assert (no_bootstrap == ended).all() and ended.any()  # time limits count as real ends
        assert (gamma, gae_lambda) == (0.99, cell["gae_lambda"])


def check_rates(cell, seen):
    rates = [cell["learning_rate"], cell["value_learning_rate"]]
    assert seen["eps"] == {1e-5} and len(seen["rates"]) == 4  # 2 updates of 2 minibatches
    assert seen["rates"][0] == pytest.approx(rates)
    factor = 0.5 if cell["anneal_lr"] else 1.0
    assert seen["rates"][-1] == pytest.approx([factor * rate for rate in rates])


def check_initialization(cell, agent):
    for network, head_gain in (agent.policy, 0.01), (agent.value, 1.0):
        linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        assert sum(isinstance(layer, torch.nn.Tanh) for layer in network) == 2
        for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), head_gain)):
            weight = layer.weight.detach()
            assert (layer.bias == 0).all()
            if cell["init"] == "orthogonal":
                rows = weight if weight.shape[0] <= weight.shape[1] else weight.T
                torch.testing.assert_close(
                    rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=1e-4
                )
            else:
                bound = math.sqrt(6 / sum(weight.shape))
                assert 0.9 * bound < weight.abs().max() <= bound


def check_loss(cell, args, seen):
    given = inspect.signature(seen["gradients"]).bind(*seen["calls"][-1]).arguments
    agent, limits, minibatch = given["agent"], given["limits"], given["minibatch"]
    assert limits[0].item() == pytest.approx(cell["clip_coef"])
    plain = dataclasses.replace(args, max_grad_norm=math.inf)

    def gradients(args, **changes):
        names = "obs action log_prob mean value advantage target".split()
        changed = dict(zip(names, minibatch)) | changes
        return seen["gradients"](**given | {"args": args, "minibatch": tuple(changed.values())})

    # Gradient clipping: the norm of all gradients together, at targets that are far away.
    far = minibatch[6] + 1000.0
    raw, clipped = gradients(plain, target=far)[0], gradients(args, target=far)[0]
    assert raw.norm().item() > 10
    expected = min(raw.norm().item(), cell["max_grad_norm"])
    assert clipped.norm().item() == pytest.approx(expected, rel=1e-4)
    # Value clipping, where it matters: old values far from the new ones.
    with torch.no_grad():
        value = agent.value(minibatch[0])
    square = (value - minibatch[6]) ** 2
    clipped = (value + 3 - 0.2 - minibatch[6]) ** 2
    square = torch.maximum(square, clipped) if cell["clip_vloss"] else square
    value_loss = gradients(args, value=value + 3)[1][1]
    torch.testing.assert_close(value_loss, 0.5 * square.mean())
    # The bonus adds -ent_coef to the gradient of each component of log_std.
    size = agent.log_std.numel()  # the vector begins with it
    without = gradients(dataclasses.replace(plain, ent_coef=0.0))[0][:size]
    bonus = gradients(plain)[0][:size] - without
    torch.testing.assert_close(bonus, torch.full_like(bonus, -cell["ent_coef"]), atol=1e-6, rtol=0)
    # The ratio, where the policy has moved far: the objective is bounded only with clipping.
    ones = torch.ones_like(minibatch[5])
    policy_loss = gradients(
        dataclasses.replace(plain, norm_adv=False), advantage=ones, log_prob=minibatch[2] - 2
    )[1][0].item()
    assert policy_loss < -5 if cell["clip_coef"] == math.inf else policy_loss > -1.21


def check_statistics(cell, args, seen):
    parts = seen["state"]["parts"]
    raw, ended = (np.concatenate(x)[:, 0] for x in zip(*seen["raw"]))
    steps = len(raw)
    assert steps == 128
    assert parts["obs_statistics"]["count"].item() == pytest.approx(steps + 1, abs=0.01)
    sums = []
    for reward, end in zip(raw, np.concatenate([[True], ended[:-1]])):
        sums.append(reward + (0 if end else 0.99 * sums[-1]))
    stream = {"none": [], "rewards": raw, "returns": sums}[cell["reward_scaling"]]
    statistics = parts["reward_statistics"]
    assert statistics["count"].item() == pytest.approx(len(stream), abs=0.01)
    if len(stream):
        assert statistics["mean"].item() == pytest.approx(np.mean(stream), rel=1e-3)
    scaled = script.RewardScaling(args)(np.array([[1e6]]), np.array([[False]])).item()
    # The first reward's own statistics give std 1e4, so that "returns" makes 100 of it.
    assert scaled == (1e6 if cell["clip_reward"] == math.inf else cell["clip_reward"])
    statistics = script.RunningMeanStd(3)
    far = script.normalize_obs(np.full((1, 3), 1e6), statistics, args.clip_obs)
    assert (far == min(cell["clip_obs"], 1e6)).all()
