"""The written equations of trpo_continuous.py, and what its step may and may not do."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import trpo_continuous as trpo

SIZES = 3, 4, 2  # observation, hidden, action


def new_agent(seed=1):
    """A policy small enough for an explicit Hessian, in float64."""
    torch.manual_seed(seed)
    observation, hidden, action = SIZES
    policy = nn.Sequential(nn.Linear(observation, hidden), nn.Tanh(), nn.Linear(hidden, action))
    log_std = nn.Parameter(torch.tensor([-0.3, 0.2]))
    agent = nn.ParameterDict({"log_std": log_std}).double()
    agent.policy = policy.double()
    return agent


def parameters_of(agent):
    """-> parameters in the script's order, and the vector that they are views of"""
    parameters = [agent.log_std, *agent.policy.parameters()]
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)
    return parameters, vector


def new_batch(agent, size=40):
    """obs, action, log_prob, advantage of the agent's own policy; its mean and log std"""
    draw = torch.Generator().manual_seed(2)
    obs = torch.randn(size, SIZES[0], generator=draw, dtype=torch.float64)
    mean, log_std = agent.policy(obs).detach(), agent.log_std.detach().clone()
    action = mean + log_std.exp() * torch.randn(size, SIZES[2], generator=draw)
    log_prob = Normal(mean, log_std.exp()).log_prob(action).sum(-1)
    advantage = torch.randn(size, generator=draw, dtype=torch.float64)
    return (obs, action, log_prob, (advantage - advantage.mean()) / advantage.std()), mean, log_std


def mean_kl(agent, obs, old_mean, old_log_std):
    old, new = Normal(old_mean, old_log_std.exp()), Normal(agent.policy(obs), agent.log_std.exp())
    return kl_divergence(old, new).sum(-1).mean()


def product_of(agent, parameters, batch, old_mean, old_log_std, damping=0.0):
    kl = trpo.gaussian_kl(old_mean, old_log_std, agent.policy(batch[0]), agent.log_std).mean()
    kl_gradient = trpo.flat_gradient(kl, parameters, create_graph=True)
    return lambda v: trpo.fisher_vector_product(kl_gradient, parameters, v, damping)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_fisher_vector_product_equals_the_explicit_hessian_of_the_kl(damping):
    agent = new_agent()
    parameters, _ = parameters_of(agent)
    batch, *old = new_batch(agent)
    gradient = torch.autograd.grad(mean_kl(agent, batch[0], *old), parameters, create_graph=True)
    gradient = torch.cat([x.flatten() for x in gradient])
    assert gradient.norm() < 1e-14  # the KL is least where both are equal
    rows = [torch.autograd.grad(x, parameters, retain_graph=True) for x in gradient]
    hessian = torch.stack([torch.cat([x.flatten() for x in row]) for row in rows])
    hessian += damping * torch.eye(len(hessian))
    product = product_of(agent, parameters, batch, *old, damping)
    for v in torch.randn(5, len(hessian), dtype=torch.float64):
        error = (product(v) - hessian @ v).norm() / (hessian @ v).norm()
        assert error < 1e-6
        assert v @ product(v) > 0


def test_fisher_vector_product_equals_the_closed_form_of_a_gaussian():
    """F is 2 for each log std, 1 / variance for each bias of the mean, and 0 between the two."""
    agent = new_agent()
    parameters, vector = parameters_of(agent)
    batch, *old = new_batch(agent)
    product = product_of(agent, parameters, batch, *old)
    v = torch.zeros_like(vector)
    v[:2] = torch.tensor([0.7, -0.4])
    torch.testing.assert_close(product(v), 2 * v)
    v = torch.zeros_like(vector)
    v[-2:] = torch.tensor([0.7, -0.4])
    torch.testing.assert_close(product(v)[-2:], v[-2:] / (2 * agent.log_std.detach()).exp())
    assert not product(v)[:2].any()


@pytest.mark.parametrize("n", [1, 2, 10, 50])
@pytest.mark.parametrize("seed", range(3))
def test_n_iterations_of_conjugate_gradients_solve_n_dimensions(n, seed):
    draw = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=draw, dtype=torch.float64)
    A = A @ A.T + n * torch.eye(n)
    b = torch.randn(n, generator=draw, dtype=torch.float64)
    x, residual = trpo.conjugate_gradient(lambda v: A @ v, b, n)
    torch.testing.assert_close(x, torch.linalg.solve(A, b), atol=1e-8, rtol=0)
    assert residual == pytest.approx(((b - A @ x).norm() / b.norm()).item(), abs=1e-8)
    if n > 2:
        early, residual = trpo.conjugate_gradient(lambda v: A @ v, b, 2)
        assert residual == pytest.approx(((b - A @ early).norm() / b.norm()).item(), rel=1e-6)
        assert residual > 1e-3


def test_conjugate_gradients_stop_where_nothing_is_left_and_know_no_scale():
    b = torch.tensor([1.0, 2.0], dtype=torch.float64)
    x, residual = trpo.conjugate_gradient(lambda v: 2 * v, b, 5)
    assert torch.equal(x, b / 2) and residual == 0
    A, tiny = torch.tensor([1.0, 4.0], dtype=torch.float64), 1e-6 * b
    x, _ = trpo.conjugate_gradient(lambda v: A * v, tiny, 2)
    torch.testing.assert_close(x, tiny / A)


def test_gradient_of_the_surrogate_at_the_old_parameters_is_the_policy_gradient():
    agent = new_agent()
    parameters, _ = parameters_of(agent)
    batch, *_ = new_batch(agent)
    obs, action, _, advantage = batch
    new = Normal(agent.policy(obs), agent.log_std.exp())
    expected = (new.log_prob(action).sum(-1) * advantage).mean()
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(expected, parameters)])
    gradient = trpo.flat_gradient(trpo.surrogate(agent, *batch), parameters)
    torch.testing.assert_close(gradient, expected)
    # Away from them it is the mean of ratio * A.
    agent.log_std.data += 0.3
    new = Normal(agent.policy(obs), agent.log_std.exp())
    ratio = (new.log_prob(action).sum(-1) - batch[2]).exp()
    torch.testing.assert_close(trpo.surrogate(agent, *batch), (ratio * advantage).mean())


# gain of the i-th point that is looked at, KL there -> halvings that are accepted
SEARCHES = [
    ([1.0], [0.01], 0),
    ([0.1], [0.01], 0),  # as much as is asked for
    ([0.0999, 0.06], [0.01, 0.01], 1),
    ([1.0, 1.0, 1.0], [0.011, 0.02, 0.0099], 2),
    ([math.nan, 1.0], [0.0, 0.0], 1),
    ([1.0, 1.0], [math.nan, 0.0], 1),
    ([-1.0] * 10 + [1.0], [0.0] * 11, 10),
    ([-1.0] * 11, [0.0] * 11, None),
    ([1.0] * 11, [0.02] * 11, None),
]


@pytest.mark.parametrize("gains, divergences, accepted", SEARCHES)
def test_line_search_takes_the_first_halving_that_serves_or_restores(gains, divergences, accepted):
    old, step = torch.randn(2, 5)
    vector, looked_at = old.clone(), []

    def gain_and_kl():
        looked_at.append(vector.clone())
        return gains[len(looked_at) - 1], divergences[len(looked_at) - 1]

    args = trpo.Args(max_halvings=10, min_gain=0.05)  # 0.1 of the predicted gain of 2 at first
    halvings = trpo.line_search(vector, step, gain_and_kl, 2.0, 0.01, args)
    for i, x in enumerate(looked_at):
        torch.testing.assert_close(x, old + step / 2**i)
    assert len(looked_at) == len(gains)
    if accepted is None:
        assert math.isnan(halvings) and torch.equal(vector, old)
    else:
        assert halvings == accepted and torch.equal(vector, looked_at[-1])


def test_a_step_without_gain_is_never_taken():
    for min_gain, predicted, gain in (0.0, 1.0, 0.0), (0.1, -1.0, -0.01), (0.0, 1.0, -1e-9):
        vector, args = torch.zeros(5), trpo.Args(max_halvings=3, min_gain=min_gain)
        step = torch.ones(5)
        halvings = trpo.line_search(vector, step, lambda x=gain: (x, 0.0), predicted, 0.01, args)
        assert math.isnan(halvings) and not vector.any()


def test_a_policy_that_is_no_longer_finite_ends_the_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(trpo, "kl_and_ratio", lambda *args: (math.nan, 1.0))
    small = "--env-id InvertedPendulum-v5 --num-steps 64 --num-minibatches 4 --total-timesteps 128"
    assert trpo.main([*small.split(), "--runs-dir", str(tmp_path)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "mean_kl is nan" in line and "update 1" in line


def step_of(agent, max_kl=0.01, advantage=None, **settings):
    """trpo_step on the agent's own batch -> vector before and after, gradient, report"""
    parameters, vector = parameters_of(agent)
    batch, *old = new_batch(agent)
    batch = batch if advantage is None else (*batch[:3], advantage)
    before = vector.clone()
    gradient = trpo.flat_gradient(trpo.surrogate(agent, *batch), parameters)
    names = {"max_halvings": 10, "min_gain": 0.1, "cg_iterations": 10, "cg_damping": 0.1}
    args = SimpleNamespace(**names | settings)
    subset = torch.arange(len(old[0]))
    report = trpo.trpo_step(agent, parameters, vector, batch, *old, subset, max_kl, args)
    return before, vector, gradient, report, old, batch


@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 0.1])
def test_step_is_the_natural_gradient_as_long_as_max_kl_allows(max_kl):
    agent = new_agent()
    settings = {"cg_iterations": 50, "cg_damping": 0.01}
    settings |= {"advantage": torch.linspace(0, 2, 40, dtype=torch.float64)}
    before, after, gradient, report, old, batch = step_of(agent, max_kl, **settings)
    step = (after - before) * 2 ** report["trust_region/halvings"]
    fresh = new_agent()
    product = product_of(fresh, parameters_of(fresh)[0], batch, *old, damping=0.01)
    assert (step @ product(step)).item() / 2 == pytest.approx(max_kl, rel=1e-6)
    torch.testing.assert_close(
        nn.functional.normalize(product(step), dim=0) * gradient.norm(), gradient
    )
    assert report["trust_region/accepted"] == 1
    assert 0 < mean_kl(agent, batch[0], *old) <= max_kl
    gain = report["losses/surrogate_after"] - report["losses/surrogate_before"]
    assert gain >= 0.1 * (gradient @ (after - before)).item() > 0
    assert report["losses/surrogate_after"] == pytest.approx(trpo.surrogate(agent, *batch).item())
    assert report["trust_region/max_kl"] == max_kl
    at_once = after.clone()
    for halvings in range(report["trust_region/halvings"]):  # the longer ones didn't serve
        fraction = 0.5**halvings
        after.copy_(before + fraction * step)
        gain = trpo.surrogate(agent, *batch).item() - report["losses/surrogate_before"]
        enough = gain >= 0.1 * fraction * (gradient @ step).item()
        assert not enough or mean_kl(agent, batch[0], *old) > max_kl
    after.copy_(at_once)


def test_no_step_is_taken_along_nothing(monkeypatch):
    monkeypatch.setattr(trpo, "conjugate_gradient", lambda product, b, n: (torch.zeros_like(b), 0))
    before, after, _, report, *_ = step_of(new_agent())
    assert torch.equal(before, after) and report["trust_region/accepted"] == 0


REJECTED = {
    "negative curvature": {"product": lambda v: -v},
    "no curvature": {"product": lambda v: 0 * v},
    "not finite": {"product": lambda v: v * math.nan},
    "infinite": {"product": lambda v: v * math.inf},
    "zero gradient": {"advantage": torch.zeros(40, dtype=torch.float64)},
    "gradient not finite": {"advantage": torch.full((40,), math.nan, dtype=torch.float64)},
    "failed line search": {"min_gain": 1e9},
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_step_leaves_the_parameters_bit_by_bit_and_is_logged(case, monkeypatch):
    changes = dict(REJECTED[case])
    product = changes.pop("product", None)
    if product:
        monkeypatch.setattr(trpo, "fisher_vector_product", lambda g, p, v, damping: product(v))
    agent = new_agent()
    before, after, _, report, *_ = step_of(agent, **changes)
    assert torch.equal(before, after)
    assert report["trust_region/accepted"] == 0 and math.isnan(report["trust_region/halvings"])
    assert all(torch.equal(x, y) for x, y in zip(agent.parameters(), new_agent().parameters()))


def updates_of(tmp_path, *options):
    small = "--env-id InvertedPendulum-v5 --num-steps 256 --num-minibatches 4 --update-epochs 2"
    argv = [*small.split(), *options, "--runs-dir", str(tmp_path)]
    directory = trpo.train(trpo.parse_args(trpo.Args, argv))
    with open(directory / "updates.csv") as file:
        return directory, [{k: float(x) for k, x in row.items()} for row in csv.DictReader(file)]


def test_kl_never_exceeds_its_bound_over_a_run(tmp_path):
    bounds = "--max-kl 0.05 --max-kl-final 0.01 --total-timesteps 5120".split()
    updates = updates_of(tmp_path, *bounds)[1]
    expected = [0.05 + (0.01 - 0.05) * k / 20 for k in range(1, 21)]
    assert [x["max_kl"] for x in updates] == pytest.approx(expected)
    assert sum(x["accepted"] for x in updates) > 15
    for x in updates:
        assert 0 <= x["mean_kl"] <= x["max_kl"] * (1 + 1e-4) * x["accepted"] + 1e-7
        assert x["surrogate_after"] >= x["surrogate_before"] - 1e-6
        assert (x["max_ratio"] > 1.001) == x["accepted"]


def test_policy_moves_the_same_whatever_the_value_network_does(tmp_path):
    """E1, E4 and E9 reach the value network alone, until its values come back as advantages."""
    weights = []
    for options in [], ["--no-clip-vloss", "--max-grad-norm", "0.01", "--no-anneal-lr"]:
        options = [*options, "--total-timesteps", "256"]
        directory, _ = updates_of(tmp_path / str(len(weights)), *options)
        weights.append(torch.load(directory / "checkpoint.pt", weights_only=True)["parts"]["agent"])
    for name, x in weights[0].items():
        assert torch.equal(x, weights[1][name]) == (not name.startswith("value")), name


@pytest.mark.parametrize("fraction, size", [(0.1, 26), (1.0, 256), (1e-6, 1)])
def test_fisher_matrix_is_estimated_from_a_fraction_of_the_batch(
    tmp_path, monkeypatch, fraction, size
):
    subsets, original = [], trpo.trpo_step

    def trpo_step(*args):
        subsets.append(args[6])
        return original(*args)

    monkeypatch.setattr(trpo, "trpo_step", trpo_step)
    steps = ["--total-timesteps", "256", "--fisher-fraction", str(fraction)]
    updates_of(tmp_path, *steps)
    (subset,) = subsets
    assert len(subset) == size == len(set(subset.tolist())) and max(subset) < 256
    assert np.all(np.asarray(subset) >= 0)


def test_tiny_gradients_of_the_value_are_not_blown_up():
    """Clipped as torch.nn.utils.clip_grad_norm_ does it."""
    args = trpo.Args(max_grad_norm=math.inf)
    torch.manual_seed(1)
    agent, obs = trpo.Agent(5, 2, args), torch.randn(64, 5)
    nn.init.zeros_(agent.value[4].weight)
    parameters = list(agent.value.parameters())
    minibatch = obs, torch.zeros(64), torch.full((64,), 1e-8)
    free = trpo.value_gradient(agent, parameters, args, torch.tensor(0.2), minibatch)[0]
    assert 0 < free.norm() < 5e-7
    for limit in 1e-8, 0.5:
        args = trpo.Args(max_grad_norm=limit)
        clipped = trpo.value_gradient(agent, parameters, args, torch.tensor(0.2), minibatch)[0]
        expected = free * min(1.0, limit / (free.norm().item() + 1e-6))
        torch.testing.assert_close(clipped, expected, rtol=1e-4, atol=0)
