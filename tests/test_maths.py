"""Every written equation of ppo_continuous.py against a slow loop, torch.distributions or numpy."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_catalogue_continuous import gradients_of, new_agent, new_minibatch
from torch.distributions import Normal, kl_divergence

import ppo_continuous as ppo

SEEDS = range(5)


def slow_gae(reward, value, next_value, terminated, ended, gamma, gae_lambda):
    """advantage[t] = sum over k of (gamma * gae_lambda)**k * delta[t + k], by environment and
    episode: the sum stops at the first end at or after t, or at the end of the segment."""
    T, N = reward.shape
    advantage = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(T - t):
                bootstrap = 0.0 if terminated[t + k, n] else gamma * next_value[t + k, n]
                delta = reward[t + k, n] + bootstrap - value[t + k, n]
                advantage[t, n] += (gamma * gae_lambda) ** k * delta
                if ended[t + k, n]:
                    break
    return advantage


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("last", ["running", "terminated", "truncated"])
def test_gae_equals_a_slow_loop_by_episode_on_random_ends(seed, last):
    draw = np.random.default_rng(seed)
    reward, value, next_value = draw.normal(size=(3, 20, 3))
    terminated, truncated = draw.random((2, 20, 3)) < 0.15
    terminated[-1], truncated[-1] = last == "terminated", last == "truncated"
    ended = terminated | truncated
    gamma, gae_lambda = draw.random(2)
    args = reward, value, next_value, terminated, ended, gamma, gae_lambda
    np.testing.assert_allclose(ppo.compute_gae(*args), slow_gae(*args), atol=1e-12)


def test_gae_equals_stable_baselines3():
    made = json.loads((Path(__file__).parent / "fixtures" / "gae_sb3.json").read_text())
    names = "reward", "value", "next_value", "terminated", "truncated", "advantage", "returns"
    reward, value, next_value, terminated, truncated, *expected = (
        np.array(made[name]) for name in names
    )
    ended = terminated | truncated
    settings = made["gamma"], made["gae_lambda"]
    advantage = ppo.compute_gae(reward, value, next_value, terminated, ended, *settings)
    np.testing.assert_allclose(advantage, expected[0], atol=1e-5)
    np.testing.assert_allclose(advantage + value, expected[1], atol=1e-5)
    assert terminated[-1].any() and truncated[-1].any() and not ended[-1].all()


def test_gae_of_a_single_step_is_its_delta():
    one, running = np.ones((1, 1)), np.zeros((1, 1), bool)
    args = one, 0.5 * one, 2 * one, running, running, 0.9, 0.8
    assert ppo.compute_gae(*args).item() == pytest.approx(1 + 0.9 * 2 - 0.5)


@pytest.mark.parametrize("clip_coef", [0.05, 0.2, 1.5, math.inf])
@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_policy_loss_equals_a_slow_loop(clip_coef, kl_coef):
    agent = new_agent()
    agent.log_std.data = torch.tensor([-0.2, 0.1, 0.3])
    minibatch = new_minibatch(agent)
    obs, action, log_prob, old_mean, _, advantage, _ = minibatch
    new, old = Normal(agent.policy(obs), agent.log_std.exp()), Normal(old_mean, 1.0)
    ratios = (new.log_prob(action).sum(-1) - log_prob).exp().tolist()
    divergences = kl_divergence(old, new).sum(-1).tolist()
    total = 0.0
    for ratio, a, kl in zip(ratios, advantage.tolist(), divergences):
        clipped = max(1 - clip_coef, min(ratio, 1 + clip_coef))
        total += min(ratio * a, clipped * a) - kl_coef * kl
    settings = {"clip_coef": clip_coef, "kl_coef": kl_coef, "norm_adv": False}
    losses = gradients_of(agent, minibatch, **settings)[1]
    assert losses[0].item() == pytest.approx(-total / len(ratios), rel=1e-4)


@pytest.mark.parametrize("clip_value_coef", [0.05, 0.2, math.inf])
def test_value_loss_equals_a_slow_loop(clip_value_coef):
    agent = new_agent()
    minibatch = new_minibatch(agent)
    total = 0.0
    values = agent.value(minibatch[0]).tolist()
    for v, old, target in zip(values, minibatch[4].tolist(), minibatch[6].tolist()):
        clipped = max(old - clip_value_coef, min(v, old + clip_value_coef))
        total += max((v - target) ** 2, (clipped - target) ** 2) / 2
    losses = gradients_of(agent, minibatch, clip_value_coef=clip_value_coef)[1]
    assert losses[1].item() == pytest.approx(total / len(values), rel=1e-5)


def test_gradients_are_those_of_the_written_loss():
    agent = new_agent(share_network=True)
    minibatch = new_minibatch(agent)
    obs, action, log_prob, old_mean, old_value, advantage, target = minibatch
    a = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    new, value = Normal(agent.policy(obs), agent.log_std.exp()), agent.value(obs)
    ratio = (new.log_prob(action).sum(-1) - log_prob).exp()
    kl = kl_divergence(Normal(old_mean, 1.0), new).sum(-1)
    objective = torch.min(ratio * a, ratio.clip(0.8, 1.2) * a) - 0.4 * kl
    clipped = old_value + (value - old_value).clip(-0.2, 0.2)
    value_loss = torch.max((value - target) ** 2, (clipped - target) ** 2).mean() / 2
    entropy = new.entropy().sum(-1).mean()
    loss = -objective.mean() - 0.1 * entropy + 0.5 * value_loss
    expected = torch.autograd.grad(loss, list(agent.parameters()))
    gradient = gradients_of(agent, minibatch, kl_coef=0.4, ent_coef=0.1)[0]
    torch.testing.assert_close(gradient, torch.cat([x.flatten() for x in expected]))


def test_tiny_advantages_and_gradients_are_not_blown_up():
    agent = new_agent()
    *rest, advantage, target = new_minibatch(agent)
    advantage = 1e-8 * torch.tensor([-1.0, 1.0]).repeat(32)  # their std is next to 1e-8
    normalized = advantage / (advantage.std() + 1e-8)
    assert normalized.max() == pytest.approx(0.5, rel=0.01)
    tiny = gradients_of(agent, (*rest, advantage, target))[1][0]
    by_hand = gradients_of(agent, (*rest, normalized, target), norm_adv=False)[1][0]
    torch.testing.assert_close(tiny, by_hand)
    settings = {"norm_adv": False, "vf_coef": 0.0}
    free = gradients_of(agent, (*rest, advantage, target), **settings)[0]
    assert 0 < free.norm() < 1e-6
    for limit in 1e-9, 0.5:  # as torch.nn.utils.clip_grad_norm_ does it
        clipped = gradients_of(agent, (*rest, advantage, target), **settings, max_grad_norm=limit)
        expected = free * min(1.0, limit / (free.norm().item() + 1e-6))
        torch.testing.assert_close(clipped[0], expected, rtol=1e-4, atol=0)


def test_kl_term_left_out_at_0_equals_the_full_formula():
    agent = new_agent()
    minibatch = new_minibatch(agent)
    left_out = gradients_of(agent, minibatch)
    args = ppo.Args(max_grad_norm=math.inf, kl_coef=1.0)  # the term is there, with the weight 0
    limits = [torch.tensor(x) for x in (args.clip_coef, args.clip_value_coef, 0.0)]
    parameters = list(agent.parameters())
    old = limits, torch.zeros(3), minibatch
    full = ppo.policy_and_value_gradients(agent, parameters, args, *old)
    torch.testing.assert_close(left_out, full, rtol=0, atol=1e-8)


def test_infinity_switches_clipping_off_bit_by_bit():
    agent = new_agent()
    minibatch = new_minibatch(agent)
    obs, action, log_prob, _, _, advantage, target = minibatch
    no_clip = {"clip_coef": math.inf, "clip_value_coef": math.inf, "max_grad_norm": math.inf}
    gradient, losses, _ = gradients_of(agent, minibatch, **no_clip, clip_vloss=False)
    # The same without a clip anywhere: PPO-NoClip.
    std, center = torch.std_mean(advantage)
    mean, value = agent.policy(obs), agent.value(obs)
    ratio = (ppo.gaussian_log_prob(action, mean, agent.log_std) - log_prob).exp()
    policy_loss = -(ratio * ((advantage - center) / (std + 1e-8))).mean()
    value_loss = 0.5 * (value - target).square().mean()
    parameters = list(agent.parameters())
    plain = torch.autograd.grad(policy_loss + 0.5 * value_loss, parameters)
    assert torch.equal(losses[0], policy_loss) and torch.equal(losses[1], value_loss)
    plain = torch.cat([x.flatten() for x in plain])
    assert torch.equal(gradient, plain)
    assert torch.equal(gradients_of(agent, minibatch, **no_clip)[0], plain)  # value clipping too


@pytest.mark.parametrize("seed", SEEDS)
def test_gaussian_functions_equal_torch_distributions(seed):
    draw = torch.Generator().manual_seed(seed)
    action, old_mean, mean = torch.randn(3, 9, 4, generator=draw, dtype=torch.float64)
    old_log_std, log_std = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    old, new = Normal(old_mean, old_log_std.exp()), Normal(mean, log_std.exp())
    log_prob = ppo.gaussian_log_prob(action, mean, log_std)
    kl = ppo.gaussian_kl(old_mean, old_log_std, mean, log_std)
    torch.testing.assert_close(log_prob, new.log_prob(action).sum(-1))
    torch.testing.assert_close(ppo.gaussian_entropy(log_std), new.entropy()[0].sum())
    torch.testing.assert_close(kl, kl_divergence(old, new).sum(-1))
    assert log_prob.shape == kl.shape == (9,)
    same = ppo.gaussian_kl(mean, log_std, mean, log_std)
    torch.testing.assert_close(same, torch.zeros(9, dtype=torch.float64))


def test_kl_and_ratio_are_mean_kl_and_maximum_ratio():
    agent = new_agent()
    obs, action, log_prob, old_mean, *_ = new_minibatch(agent)
    kl, ratio = ppo.kl_and_ratio(agent, obs, action, old_mean, torch.zeros(3))
    with torch.no_grad():
        new = Normal(agent.policy(obs), 1.0)
    expected = (new.log_prob(action).sum(-1) - log_prob).exp().max().item()
    assert kl == pytest.approx(
        kl_divergence(Normal(old_mean, 1.0), new).sum(-1).mean().item(), 1e-4
    )
    assert ratio == pytest.approx(expected, rel=1e-4)


def test_approximate_kl_equals_a_slow_loop_and_estimates_the_exact_kl():
    draw = torch.Generator().manual_seed(1)
    old, new = Normal(0.0, 1.0), Normal(torch.tensor(0.3, dtype=torch.float64), 0.9)
    action = torch.randn(200_000, generator=draw, dtype=torch.float64)
    log_ratio = new.log_prob(action) - old.log_prob(action)
    k1, k3 = ppo.approximate_kl(log_ratio)
    few = log_ratio[:50].tolist()
    slow = sum(-x for x in few) / 50, sum(math.exp(x) - 1 - x for x in few) / 50
    assert [x.item() for x in ppo.approximate_kl(log_ratio[:50])] == pytest.approx(slow)
    exact = kl_divergence(old, new).item()
    assert k1.item() == pytest.approx(exact, abs=0.003)
    assert k3.item() == pytest.approx(exact, abs=0.003)


def test_kl_coef_halves_below_and_doubles_above_the_target():
    borders = (0.01 / 1.5, 2), (0.01 * 1.5, 2)
    for mean_kl, expected in ((0.0066, 1), *borders, (0.01, 2), (0.0149, 2), (0.0151, 4)):
        assert ppo.adapted_kl_coef(2, mean_kl, 0.01) == expected


def test_kl_coef_stays_where_it_can_come_back_from():
    assert ppo.adapted_kl_coef(1.5e-4, 0.0, 0.01) == 1e-4
    assert ppo.adapted_kl_coef(9e3, 1.0, 0.01) == 1e4


def test_kl_coef_adapts_over_the_updates_of_a_run(observe):
    settings = {"clip_coef": math.inf, "kl_coef": 1.0, "total_timesteps": 18}
    for kl_target, factor in ((1e-12, 2.0), (1e12, 0.5), (None, 1.0)):
        seen = observe(**settings, kl_target=kl_target)
        assert [x["charts/kl_coef"] for x in seen.reports] == [1, factor, factor**2]
        assert [x.limits[2] for x in seen.calls[::4]] == [1, factor, factor**2]


@pytest.mark.parametrize("seed", SEEDS)
def test_running_statistics_equal_numpy_on_all_batches_together(seed):
    draw = np.random.default_rng(seed)
    batches = [draw.normal(1e3, 2, (size, 3)) for size in draw.integers(1, 20, 40)]
    statistics = ppo.RunningMeanStd(3)
    for batch in batches:
        statistics.update(batch)
    # The first guess, mean 0 and variance 1, has the weight of 1e-4 of a step.
    together, weight = np.concatenate(batches), 1e-4
    count = len(together) + weight
    mean = together.sum(0) / count
    squares = ((together - mean) ** 2).sum(0) + weight * (1 + mean**2)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(statistics.std, np.sqrt(squares / count), rtol=1e-7)
    np.testing.assert_allclose(statistics.mean, together.mean(0), rtol=1e-4)
    assert statistics.mean.dtype == statistics.std.dtype == np.float64


def test_running_statistics_have_a_std_of_at_least_1e_4():
    statistics = ppo.RunningMeanStd(1)
    statistics.count = 1e16
    statistics.update(np.zeros((1, 1)))
    assert statistics.std.item() == pytest.approx(1e-4)


def test_running_statistics_come_back_from_a_state_dict():
    statistics, loaded = ppo.RunningMeanStd(2), ppo.RunningMeanStd(2)
    statistics.update(np.array([[1.0, 2.0], [3.0, 5.0]]))
    ppo.load_part(loaded, ppo.part_state(statistics))
    for x in (statistics, loaded):
        x.update(np.array([[7.0, 1.0]]))
    assert np.array_equal(statistics.mean, loaded.mean)
    assert np.array_equal(statistics.std, loaded.std) and statistics.count == loaded.count


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_numpy_policy_equals_the_network_of_now(activation):
    agent = new_agent(activation=activation, init="default")
    obs = 3 * torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    policy, expected = ppo.numpy_policy(agent), agent.policy(obs).detach()
    assert expected.std() > 0.05
    for parameter in agent.parameters():
        parameter.data += 1
    np.testing.assert_allclose(policy(obs.numpy()), expected, rtol=1e-4, atol=1e-6)


class Line:
    """An observation that is the sum of the actions; an end where `ends` says so."""

    low, high = np.float32([-1.0]), np.float32([1.5])

    def __init__(self, *ends):
        self.ends, self.sent, self.resets = list(ends), [], 0

    def reset(self):
        self.resets += 1
        return np.array([10.0 * self.resets])

    def step(self, action):
        self.sent.append(action.item())
        end = self.ends[len(self.sent) - 1]
        return np.array([sum(self.sent)]), 1.0, end == "terminated", end == "truncated"


@pytest.mark.parametrize("clip_actions", [True, False])
def test_heldout_batch_is_what_the_policy_does_in_its_own_environments(clip_actions, monkeypatch):
    monkeypatch.setattr(ppo, "numpy_policy", lambda agent: lambda obs: 0.5 * obs)
    args = ppo.Args(num_envs=2, num_steps=32, clip_actions=clip_actions)
    args.num_steps = 4
    envs = Line(None, "truncated", None, None), Line("terminated", None, None, None)
    agent = torch.nn.Module()
    agent.log_std = torch.tensor([math.log(2)])
    statistics, generator = ppo.RunningMeanStd(1), torch.Generator().manual_seed(3)
    raw_obs = np.array([[1.0], [-2.0]])
    obs, action = ppo.collect_heldout(agent, envs, raw_obs, statistics, generator, args)
    noise = torch.Generator().manual_seed(3)
    now, sent = torch.tensor([[1.0], [-2.0]]), np.zeros((2, 0))
    low, high = (-1.0, 1.5) if clip_actions else (-math.inf, math.inf)
    for t in range(4):
        torch.testing.assert_close(obs[2 * t : 2 * t + 2], now)
        expected = 0.5 * now + 2 * torch.randn(2, 1, generator=noise)
        torch.testing.assert_close(action[2 * t : 2 * t + 2], expected)
        sent = np.hstack([sent, expected.numpy().clip(low, high)])
        now = sent.sum(1, keepdims=True)
        if t < 2:
            now[1 - t] = 10.0
        now = torch.from_numpy(now).clip(-10, 10).float()
    np.testing.assert_allclose([env.sent for env in envs], sent, rtol=1e-6)
    np.testing.assert_allclose(raw_obs, sent.sum(1, keepdims=True), rtol=1e-5)
    assert [env.resets for env in envs] == [1, 1] and (abs(sent) > 1).any()
    alone, raw_obs = [Line(*4 * [None])], np.zeros((1, 1))
    assert ppo.collect_heldout(agent, alone, raw_obs, statistics, noise, args)[0].shape == (4, 1)
