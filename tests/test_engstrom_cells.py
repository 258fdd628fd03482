"""The fifteen cells that Engstrom et al. released, of five algorithms, as command lines.

Every column is read back from what it acts on: optimizer, networks, loss, statistics.
"""

import copy
import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch

import ppo_continuous as ppo
import trpo_continuous as trpo

SHARED = """--activation tanh --adam-eps 1e-5 --norm-obs --gamma 0.99 --no-clip-actions
--no-bootstrap-on-truncation"""
PPO = {  # policy lr, value lr, reward norm, init, anneal, value clip, grad norm, lambda, entropy,
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
PPO_COLUMNS = """learning_rate value_learning_rate reward_scaling init anneal_lr clip_vloss
max_grad_norm gae_lambda ent_coef clip_reward clip_obs clip_coef""".split()
TRPO = {  # value lr, max KL, final, reward norm, init, anneal, value clip, grad norm, lambda,
    # reward clip, observation clip
    "Hopper TRPO": (
        *(2e-4, 0.13, 0.13, "none", "xavier", 0, 0, math.inf, 0.95, math.inf, math.inf),
    ),
    "Hopper TRPO+": (2e-4, 0.04, 0.07, "returns", "orthogonal", 0, 0, 1, 0.95, 10, 10),
    "Walker2d TRPO": (
        *(3e-4, 0.04, 0.04, "none", "xavier", 0, 0, math.inf, 0.95, math.inf, math.inf),
    ),
    "Walker2d TRPO+": (1e-4, 0.07, 0.04, "returns", "orthogonal", 0, 0, 1, 0.95, 10, 10),
    "Humanoid TRPO": (
        *(3e-4, 0.07, 0.07, "none", "xavier", 0, 0, math.inf, 0.95, math.inf, math.inf),
    ),
    "Humanoid TRPO+": (5e-5, 0.1, 0.05, "returns", "xavier", 0, 1, 0.5, 0.85, 10, 10),
}
TRPO_COLUMNS = """value_learning_rate max_kl max_kl_final reward_scaling init anneal_lr clip_vloss
max_grad_norm gae_lambda clip_reward clip_obs""".split()
CELLS = {name: (ppo, dict(zip(PPO_COLUMNS, cell))) for name, cell in PPO.items()}
CELLS |= {name: (trpo, dict(zip(TRPO_COLUMNS, cell))) for name, cell in TRPO.items()}
GRADIENTS = {  # what computes them, and what is in its minibatches and its losses
    ppo: (
        "policy_and_value_gradients",
        "obs action log_prob mean value advantage target".split(),
        "policy_loss value_loss entropy grad_norm".split(),
    ),
    trpo: ("value_gradient", "obs value target".split(), "value_loss grad_norm".split()),
}


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
    """Two updates of a cell: its script, columns, settings, and what was seen in them."""
    task, (script, cell) = request.param.split()[0], CELLS[request.param]
    seen = {"rates": [], "raw": [], "sent": []}

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

    def spy(name):
        original, seen[name] = getattr(script, name), []

        def spied(*args):
            seen[name].append(inspect.signature(original).bind(*args).arguments)
            return original(*args)

        monkeypatch.setattr(script, name, spied)
        return original

    name = GRADIENTS[script][0]
    seen["function"], seen["calls"] = spy(name), seen[name]
    spy("compute_gae")
    if script is trpo:
        for name in "trpo_step", "conjugate_gradient", "fisher_vector_product", "line_search":
            spy(name)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    for replacement in Agent, RewardScaling, Environment:
        monkeypatch.setattr(script, replacement.__name__, replacement)
    small = """--num-steps 64 --num-minibatches 2 --update-epochs 1 --total-timesteps 128
    --env-kwargs {"max_episode_steps":7}""".split()
    argv = ["--env-id", f"{task}-v5", *command_line(cell), *SHARED.split(), *small]
    args = script.parse_args(script.Args, [*argv, "--runs-dir", str(tmp_path)])
    run = script.train(args)
    seen["state"] = torch.load(run / "checkpoint.pt", weights_only=True)
    return script, cell, args, seen


def test_cell_acts_as_released(played):
    script, cell, args, seen = played
    check_rates(cell, seen)
    check_initialization(cell, seen["initial"])
    check_value_loss(script, cell, args, seen)
    if script is ppo:
        check_policy_loss(cell, args, seen)
    else:
        check_policy_step(cell, seen)
    check_statistics(script, cell, args, seen)
    assert np.abs(seen["sent"]).max() > seen["high"].max()  # actions are sent as drawn
    for given in seen["compute_gae"]:
        ended = given["ended"]
        assert (given["terminated"] == ended).all() and ended.any()  # time limits are real ends
        assert (given["gamma"], given["gae_lambda"]) == (0.99, cell["gae_lambda"])


def check_rates(cell, seen):
    rates = [cell[x] for x in ("learning_rate", "value_learning_rate") if x in cell]
    factor = 0.5 if cell["anneal_lr"] else 1.0
    assert seen["eps"] == {1e-5} and len(seen["rates"]) == 4  # 2 updates of 2 minibatches
    for minibatch, now in enumerate(seen["rates"]):
        expected = rates if minibatch < 2 else [factor * rate for rate in rates]
        assert now == pytest.approx(expected)


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


def gradients(script, seen, args, **changes):
    """Gradient and losses by name, on the last minibatch with parts of it changed."""
    _, parts, losses = GRADIENTS[script]
    given = seen["calls"][-1]
    minibatch = dict(zip(parts, given["minibatch"])) | changes
    changed = given | {"args": args, "minibatch": tuple(minibatch.values())}
    gradient, values, *_ = seen["function"](**changed)
    return gradient, dict(zip(losses, values))


def check_value_loss(script, cell, args, seen):
    agent = seen["calls"][-1]["agent"]
    minibatch = dict(zip(GRADIENTS[script][1], seen["calls"][-1]["minibatch"]))
    target = minibatch["target"]
    # Gradient clipping: one norm for policy and one for value, at targets that are far away.
    plain, far = dataclasses.replace(args, max_grad_norm=math.inf), target + 1000.0
    raw, clipped = (gradients(script, seen, x, target=far)[0] for x in (plain, args))
    size = sum(x.numel() for x in agent.value.parameters())
    assert raw[-size:].norm().item() > 10
    for part in slice(-size), slice(-size, None):  # TRPO's gradient has no first part
        expected = min(raw[part].norm().item(), cell["max_grad_norm"])
        assert clipped[part].norm().item() == pytest.approx(expected, rel=1e-4)
    # Value clipping, where it matters: old values far from the new ones.
    with torch.no_grad():
        value = agent.value(minibatch["obs"])
    square = (value - target) ** 2
    clipped = (value + 3 - 0.2 - target) ** 2
    square = torch.maximum(square, clipped) if cell["clip_vloss"] else square
    value_loss = gradients(script, seen, args, value=value + 3)[1]["value_loss"]
    torch.testing.assert_close(value_loss, 0.5 * square.mean())


def check_policy_loss(cell, args, seen):
    given = seen["calls"][-1]
    agent, minibatch = given["agent"], dict(zip(GRADIENTS[ppo][1], given["minibatch"]))
    assert given["limits"][0].item() == pytest.approx(cell["clip_coef"])
    plain = dataclasses.replace(args, max_grad_norm=math.inf)
    # The bonus adds -ent_coef to the gradient of each component of log_std.
    size = agent.log_std.numel()  # the vector begins with it
    without = gradients(ppo, seen, dataclasses.replace(plain, ent_coef=0.0))[0][:size]
    bonus = gradients(ppo, seen, plain)[0][:size] - without
    torch.testing.assert_close(bonus, torch.full_like(bonus, -cell["ent_coef"]), atol=1e-6, rtol=0)
    # The ratio, where the policy has moved far: the objective is bounded only with clipping.
    moved = {"advantage": torch.ones_like(minibatch["advantage"])}
    moved |= {"log_prob": minibatch["log_prob"] - 2}
    plain = dataclasses.replace(plain, norm_adv=False)
    policy_loss = gradients(ppo, seen, plain, **moved)[1]["policy_loss"].item()
    assert policy_loss < -5 if cell["clip_coef"] == math.inf else policy_loss > -1.21


def check_policy_step(cell, seen):
    first, last = cell["max_kl"], cell["max_kl_final"]
    bounds = [(first + last) / 2, last]  # the bound moves before the step
    for name in "trpo_step", "line_search":
        assert [given["max_kl"] for given in seen[name]] == pytest.approx(bounds)
    for given in seen["trpo_step"]:
        *_, advantage = given["batch"]
        assert len(advantage) == 64 and len(given["subset"]) == 7  # a tenth, rounded up
        assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantage.std().item() == pytest.approx(1, abs=1e-5)
    assert {given["iterations"] for given in seen["conjugate_gradient"]} == {10}
    assert {given["damping"] for given in seen["fisher_vector_product"]} == {0.1}
    searched = [given["args"] for given in seen["line_search"]]
    assert {(x.max_halvings, x.min_gain) for x in searched} == {(10, 0.1)}


def check_statistics(script, cell, args, seen):
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
