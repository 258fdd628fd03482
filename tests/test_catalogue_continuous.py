"""One test per catalogue entry of ppo_continuous.py; taken_out.py says what each must notice."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import toy_envs
from torch import nn
from torch.distributions import Normal

import ppo_continuous as ppo

TRUNCATED, TERMINATED = [2.82632, 2.606, 2.3], [1.8932, 1.31, 0.5]  # pitfalls.md, time limits


def new_agent(observation_size=5, action_size=3, **settings):
    torch.manual_seed(1)
    return ppo.Agent(observation_size, action_size, ppo.Args(**settings))


def new_minibatch(agent, size=64):
    """obs, action, log_prob, mean, value, advantage, target of a policy that `agent` has left."""
    draw = torch.Generator().manual_seed(2)
    obs = torch.randn(size, 5, generator=draw)
    with torch.no_grad():
        mean = agent.policy(obs) + 0.3 * torch.randn(size, 3, generator=draw)
        value = agent.value(obs) + 0.3 * torch.randn(size, generator=draw)
    action = mean + torch.randn(size, 3, generator=draw)
    log_prob = Normal(mean, 1.0).log_prob(action).sum(-1)
    advantage = 3 * torch.randn(size, generator=draw) + 2
    return obs, action, log_prob, mean, value, advantage, advantage + value


def gradients_of(agent, minibatch, **settings):
    """Gradients, [policy loss, value loss, entropy, norm] and log ratio; no clipping by norm."""
    args = ppo.Args(**{"max_grad_norm": math.inf} | settings)
    limits = [torch.tensor(x) for x in (args.clip_coef, args.clip_value_coef, args.kl_coef)]
    parameters = list(agent.parameters())
    old = limits, torch.zeros(3), minibatch
    return ppo.policy_and_value_gradients(agent, parameters, args, *old)


class ValueTable(nn.Module):
    """A value for each of Toy's observations 0, 1, 2, 3 (with --no-norm-obs)."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, obs):
        return self.values[obs[:, 0].long()]


def patch_agent(monkeypatch, change):
    """Have `train` make agents that went through `change(agent)`."""

    class Changed(ppo.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            change(self)

    monkeypatch.setattr(ppo, "Agent", Changed)


def test_core_01_segments_are_steps_by_environments_and_episodes_cross_their_borders(observe):
    seen = observe(num_envs=3, num_steps=4, total_timesteps=36, norm_obs=False)
    ended = np.concatenate([call[4] for call in seen.gae])
    assert [call[0].shape for call in seen.gae] == [(4, 3)] * 3
    np.testing.assert_array_equal(ended, np.repeat(np.arange(12) % 3 == 2, 3).reshape(12, 3))
    lines = (seen.directory / "episodes.csv").read_text().splitlines()[1:]
    rows = [[float(x) for x in line.split(",")] for line in lines]
    expected = [[step, 3, 3] for step in (9, 18, 27, 36) for _ in range(3)]
    assert [[step, *rest] for step, _, *rest in rows] == expected


def test_core_02_weights_are_orthogonal_with_their_gains_and_biases_zero():
    agent = new_agent()
    gains = [math.sqrt(2), math.sqrt(2), 0.01], [math.sqrt(2), math.sqrt(2), 1.0]
    for network, network_gains in zip((agent.policy, agent.value), gains):
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        for layer, gain in zip(layers, network_gains, strict=True):
            size = min(layer.weight.shape)
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full((size,), gain))
            assert not layer.bias.any()
    xavier = new_agent(init="xavier").policy[0]
    assert 0 < xavier.weight.abs().max() <= math.sqrt(6 / (5 + 64)) and not xavier.bias.any()
    assert new_agent(init="default").policy[0].bias.any()


def test_core_03_adam_epsilon_is_1e_5(observe):
    optimizer = observe().parts["optimizer"]
    assert isinstance(optimizer, torch.optim.Adam)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5]
    assert {g["eps"] for g in observe(adam_eps=1e-8).parts["optimizer"].param_groups} == {1e-8}


def test_core_04_learning_rate_falls_linearly_from_1_to_1_over_k(observe):
    seen = observe(total_timesteps=24, learning_rate=0.1, value_learning_rate=0.2)
    factors = np.array([[1.0], [3 / 4], [2 / 4], [1 / 4]])
    np.testing.assert_allclose(seen.rates, factors * [0.1, 0.2])
    logged = [report["charts/learning_rate"] for report in seen.reports]
    np.testing.assert_allclose(logged, 0.1 * factors[:, 0])
    assert observe(total_timesteps=12, anneal_lr=False, learning_rate=0.1).rates == [[0.1]] * 2


@pytest.mark.parametrize("reset_value", [0.5, 100.0])
@pytest.mark.parametrize(
    "end, bootstrap, expected",
    [("truncated", True, TRUNCATED), ("truncated", False, TERMINATED)]
    + [("terminated", True, TERMINATED)],
)
def test_core_05_gae_cuts_at_ends_and_bootstraps_time_limits(
    observe, monkeypatch, end, bootstrap, expected, reset_value
):
    values = np.array([reset_value, 0.5, 0.5, 2.0], np.float32)
    patch_agent(monkeypatch, lambda agent: setattr(agent, "value", ValueTable(*values.tolist())))
    settings = {"norm_obs": False, "reward_scaling": "none", "gamma": 0.9, "gae_lambda": 0.8}
    settings |= {"env_kwargs": f'{{"end": "{end}"}}', "bootstrap_on_truncation": bootstrap}
    seen = observe(**settings, num_steps=7, num_minibatches=1, update_epochs=1)
    (reward, *_, advantage), obs = seen.gae[0], seen.calls[0].minibatch[0][:, 0].numpy()
    assert (reward == 1).all()
    expected = np.array([*expected, *expected, 1 + 0.9 * 0.5 - 0.5])
    expected[[0, 3, 6]] += 0.5 - reset_value  # its own value is all that V(reset) changes
    np.testing.assert_allclose(advantage[:, 0], expected, rtol=0, atol=1e-5)
    # The target that the value learns is advantage + value.
    order = np.lexsort((seen.calls[0].minibatch[5], obs))
    mb_advantage, mb_target = (x.numpy()[order] for x in seen.calls[0].minibatch[5:])
    np.testing.assert_allclose(mb_target, mb_advantage + values[obs[order].astype(int)], rtol=1e-6)


def test_core_05_gae_equals_discounted_sum_of_deltas():
    zeros = np.zeros((3, 1))
    ended = np.array([[False], [False], [True]])
    for next_last, terminated, expected in ((2, ended & False, TRUNCATED), (2, ended, TERMINATED)):
        next_value = np.array([[0.5], [0.5], [next_last]])
        args = zeros + 1, zeros + 0.5, next_value, terminated, ended, 0.9, 0.8
        np.testing.assert_allclose(ppo.compute_gae(*args)[:, 0], expected, rtol=0, atol=1e-5)


def test_core_06_every_epoch_shuffles_and_visits_each_step_once(observe):
    args = ppo.Args(num_steps=12, num_minibatches=3, update_epochs=4)
    batch = torch.arange(12), 10 * torch.arange(12)
    parts = list(ppo.shuffled_minibatches(batch, args, torch.Generator().manual_seed(1)))
    assert [x.shape for x, _ in parts] == [(4,)] * 12
    assert all(torch.equal(10 * x, y) for x, y in parts)
    epochs = torch.stack([x for x, _ in parts]).reshape(4, 12)
    assert torch.equal(epochs.sort(1).values, torch.arange(12).expand(4, 12))
    assert len({tuple(epoch) for epoch in epochs.tolist()} | {tuple(range(12))}) == 5
    actions = torch.stack([call.minibatch[1][:, 0] for call in observe().calls]).reshape(2, 6)
    assert torch.equal(*actions.sort(1).values) and not torch.equal(*actions)


def test_core_07_advantages_are_normalized_by_minibatch(observe):
    agent = new_agent()
    *rest, advantage, target = new_minibatch(agent)
    normalized = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    on = gradients_of(agent, (*rest, advantage, target))
    by_hand = gradients_of(agent, (*rest, normalized, target), norm_adv=False)
    off = gradients_of(agent, (*rest, advantage, target), norm_adv=False)
    torch.testing.assert_close(on[:2], by_hand[:2])
    assert (on[1][0] - off[1][0]).abs() > 0.1
    seen = observe()  # what comes in is not normalized yet, by the batch
    raw = torch.cat([call.minibatch[5] for call in seen.calls[:2]])
    np.testing.assert_allclose(np.sort(raw), np.sort(seen.gae[0][-1][:, 0]), rtol=1e-6)


def test_core_08_objective_is_the_minimum_of_plain_and_clipped_and_the_first_ratio_is_1(observe):
    agent = new_agent()
    minibatch = new_minibatch(agent)
    obs, action, log_prob, _, _, advantage, _ = minibatch
    total = 0.0
    ratios = (Normal(agent.policy(obs), 1.0).log_prob(action).sum(-1) - log_prob).exp()
    for ratio, a in zip(ratios.tolist(), advantage.tolist()):
        total += min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
    loss = gradients_of(agent, minibatch, norm_adv=False)[1][0]
    assert loss.item() == pytest.approx(-total / len(ratios), rel=1e-5)
    assert ((ratios - 1).abs() > 0.2).any() and ((ratios - 1).abs() < 0.2).any()
    torch.testing.assert_close(observe().calls[0].log_ratio, torch.zeros(3), rtol=0, atol=1e-6)


def test_core_09_value_loss_is_the_worse_of_plain_and_clipped(observe):
    agent = new_agent()
    minibatch = new_minibatch(agent)
    value = agent.value(minibatch[0]).tolist()
    plain = worse = 0.0
    for v, old, target in zip(value, minibatch[4].tolist(), minibatch[6].tolist()):
        clipped = min(max(v, old - 0.2), old + 0.2)
        plain += (v - target) ** 2
        worse += max((v - target) ** 2, (clipped - target) ** 2)
    on, off = (gradients_of(agent, minibatch, clip_vloss=x)[1][1].item() for x in (True, False))
    assert on == pytest.approx(0.5 * worse / 64, rel=1e-5)
    assert off == pytest.approx(0.5 * plain / 64, rel=1e-5)
    assert worse > 1.01 * plain
    # Clipped around the values of the rollout: the same for a step in all epochs.
    stored = [call.minibatch[4] for call in observe(update_epochs=3, learning_rate=0.1).calls]
    first, *others = torch.stack(stored).reshape(3, 6).sort(1).values
    assert all(torch.equal(first, other) for other in others)


def test_core_10_one_loss_of_policy_entropy_and_value_and_one_optimizer(observe):
    agent = new_agent()
    minibatch = new_minibatch(agent)
    parameters = list(agent.parameters())

    def both(**settings):
        return gradients_of(agent, minibatch, **settings)[:2]

    policy, losses = both(vf_coef=0.0)
    entropy, value = both(vf_coef=0.0, ent_coef=1.0)[0] - policy, both(vf_coef=1.0)[0] - policy
    loss = both(vf_coef=0.7, ent_coef=0.3)[0]
    torch.testing.assert_close(loss, policy + 0.3 * entropy + 0.7 * value)
    # -entropy has the gradient -1 to each log std (the first parameter) and 0 to all else.
    assert parameters[0] is agent.log_std
    torch.testing.assert_close(entropy[:3], -torch.ones(3))
    assert not entropy[3:].any()
    assert value[-1].abs() > 1e-3 and not policy[-1]
    torch.testing.assert_close(losses[2], Normal(torch.zeros(3), 1.0).entropy().sum())
    default = both()[0]
    torch.testing.assert_close(default, policy + 0.5 * value)
    seen = observe()
    (group,) = seen.parts["optimizer"].param_groups
    sizes = [x.numel() for x in seen.parts["agent"].parameters()]
    assert [x.numel() for x in group["params"]] == [sum(sizes)]


def test_core_11_one_norm_over_all_gradients_is_at_most_half(observe):
    agent = new_agent()
    minibatch = new_minibatch(agent)
    free, losses, _ = gradients_of(agent, minibatch)
    clipped, same, _ = gradients_of(agent, minibatch, max_grad_norm=0.5)
    norm = free.norm()
    assert norm > 1 and losses[3] == same[3] == pytest.approx(norm.item(), rel=1e-5)
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(clipped, free * 0.5 / norm)
    assert torch.equal(gradients_of(agent, minibatch, max_grad_norm=1e6)[0], free)
    assert ppo.Args().max_grad_norm == 0.5
    seen = observe(max_grad_norm=0.01)
    (vector,) = seen.parts["optimizer"].param_groups[0]["params"]
    assert torch.equal(seen.calls[-1].gradient, vector.grad)


def test_core_11_a_value_network_with_a_rate_of_its_own_has_a_norm_of_its_own():
    """Or a large value loss would stop the policy: Adam's epsilon is larger than what is left."""
    agent = new_agent()
    minibatch = new_minibatch(agent)
    minibatch = (*minibatch[:-1], minibatch[-1] + 1000.0)
    settings = {"value_learning_rate": 1e-3, "max_grad_norm": 1e-2}
    free, clipped = gradients_of(agent, minibatch)[0], gradients_of(agent, minibatch, **settings)[0]
    size = sum(x.numel() for x in agent.value.parameters())
    for part in slice(-size), slice(-size, None):
        assert free[part].norm() > 2e-2
        torch.testing.assert_close(clipped[part], free[part] * 1e-2 / free[part].norm())
    together = gradients_of(agent, minibatch, max_grad_norm=1e-2)[0]
    assert together[:-size].norm() < 1e-4


def test_core_12_debug_variables_are_means_over_all_minibatches(observe):
    seen = observe(learning_rate=0.03, num_steps=12, num_minibatches=3, total_timesteps=24)
    assert [report["losses/minibatches"] for report in seen.reports] == [6, 6]
    calls, report = seen.calls[6:], seen.reports[1]
    losses = torch.stack([call.losses for call in calls])
    assert (losses.std(0) > 1e-6).all()  # else the last would do as well as the mean
    log_ratio = torch.cat([call.log_ratio for call in calls]).double()
    ratio = log_ratio.exp()
    value, target = (torch.cat([call.minibatch[i] for call in calls[:3]]) for i in (4, 6))
    expected = dict(zip(("policy_loss", "value_loss", "entropy", "grad_norm"), losses.mean(0)))
    expected |= {"old_approx_kl": -log_ratio.mean(), "approx_kl": (ratio - 1 - log_ratio).mean()}
    expected["clipfrac"] = ((ratio < 0.8) | (ratio > 1.2)).double().mean()
    expected["explained_variance"] = 1 - (target - value).var() / target.var()
    for name, x in expected.items():
        assert report[f"losses/{name}"] == pytest.approx(x.item(), rel=1e-3, abs=1e-6), name
    assert 0 < report["losses/clipfrac"] < 1
    head, *rows = (seen.directory / "updates.csv").read_text().splitlines()
    row = dict(zip(head.split(","), rows[1].split(",")))
    assert {name: float(row[name]) for name in expected} == {
        name: report[f"losses/{name}"] for name in expected
    }


def test_core_13_networks_are_separate_or_share_their_hidden_layers():
    def ids(network):
        return [id(parameter) for parameter in network.parameters()]

    separate, shared = new_agent(), new_agent(share_network=True)
    assert not set(ids(separate.policy)) & set(ids(separate.value))
    assert ids(shared.policy)[:4] == ids(shared.value)[:4]
    assert not set(ids(shared.policy)[4:]) & set(ids(shared.value)[4:])


@pytest.mark.parametrize("share", [False, True])
def test_core_13_the_value_learning_rate_reaches_only_what_the_value_network_has_alone(
    observe, share
):
    seen = observe(share_network=share, learning_rate=0.1, value_learning_rate=1e-30)
    agent, before = seen.parts["agent"], seen.calls[0].weights
    for name, x in agent.state_dict().items():
        frozen = name.startswith("value.4") or (name.startswith("value") and not share)
        assert ((x - before[name]).abs().max() < 1e-9) == frozen, name


def test_continuous_01_actions_come_from_a_normal_distribution_around_the_network(observe):
    seen = observe(num_steps=1024, num_minibatches=1, update_epochs=1)
    _, action, log_prob, mean, *_ = seen.calls[0].minibatch
    draw = action - mean  # std is 1 at the start
    assert draw.mean().abs() < 0.1 and (draw.std() - 1).abs() < 0.1
    assert (draw.abs() < 0.6745).float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(log_prob, Normal(mean, 1.0).log_prob(action).sum(-1))
    agent = new_agent(1, 1)
    agent.load_state_dict(seen.calls[0].weights)
    torch.testing.assert_close(agent.policy(seen.calls[0].minibatch[0]), mean)


def test_continuous_02_log_std_is_one_free_vector_from_0(observe):
    agent = new_agent()
    assert isinstance(agent.log_std, nn.Parameter) and torch.equal(agent.log_std, torch.zeros(3))
    seen = observe()
    assert seen.calls[0].weights["log_std"].shape == (1,)
    assert not torch.equal(seen.parts["agent"].log_std.detach(), torch.zeros(1))  # it learns
    assert "log_std" not in dict(agent.policy.named_parameters())


def test_continuous_03_log_probability_and_entropy_are_sums_over_components(observe):
    draw = torch.Generator().manual_seed(1)
    action, mean = torch.randn(2, 7, 3, generator=draw)
    log_std = torch.tensor([-1.0, 0.0, 0.5])
    components = Normal(mean, log_std.exp())
    log_prob = ppo.gaussian_log_prob(action, mean, log_std)
    torch.testing.assert_close(log_prob, components.log_prob(action).sum(-1))
    torch.testing.assert_close(ppo.gaussian_entropy(log_std), components.entropy()[0].sum())
    with pytest.raises(AssertionError):
        ppo.gaussian_log_prob(action, mean[:1], log_std)
    seen = observe(env_id="Bounds-v0")
    shapes = [tuple(x.shape) for x in seen.calls[0].minibatch]
    assert shapes == [(3, 1), (3, 4), (3,), (3, 4), (3,), (3,), (3,)]
    assert seen.calls[0].log_ratio.shape == (3,)


def test_continuous_04_two_hidden_layers_of_64_with_tanh():
    for network, size in zip((new_agent().policy, new_agent().value), (3, 1)):
        layers = list(network)[:5]
        kinds = [type(layer) for layer in layers]
        assert kinds == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
        assert [x.weight.shape for x in layers[::2]] == [(64, 5), (64, 64), (size, 64)]
    assert isinstance(new_agent(activation="relu").policy[1], nn.ReLU)
    assert new_agent().value(torch.zeros(7, 5)).shape == (7,)


@pytest.mark.parametrize("clip", [True, False])
def test_continuous_05_the_environment_gets_clipped_actions_and_the_batch_keeps_raw_ones(
    observe, monkeypatch, clip
):
    raw = [-3.0, 9.0, 7.0, 0.0]

    def act_raw(agent):
        nn.init.zeros_(agent.policy[-1].weight)
        agent.policy[-1].bias.data = torch.tensor(raw)
        agent.log_std.data.fill_(-30)

    patch_agent(monkeypatch, act_raw)
    toy_envs.Toy.sent.clear()
    seen = observe(env_id="Bounds-v0", clip_actions=clip, update_epochs=1)
    sent = [0.0, 5.0, 7.0, 2.0] if clip else raw  # no bounds: as it is; low == high: the constant
    np.testing.assert_allclose(toy_envs.Toy.sent, [sent] * 6, rtol=1e-6, atol=1e-6)
    action = torch.cat([call.minibatch[1] for call in seen.calls])
    torch.testing.assert_close(action, torch.tensor([raw] * 6))


def test_continuous_06_observations_are_normalized_by_running_statistics(observe):
    seen = observe(num_minibatches=1, update_epochs=1)
    stream = np.array([0.0, 1, 2, 0, 1, 2, 0])  # the last observation of an episode is left out
    assert [x.item() for x in seen.updates if x.ndim == 2] == stream.tolist()
    statistics = seen.parts["obs_statistics"]
    np.testing.assert_allclose([statistics.mean[0], statistics.std[0]], [6 / 7, stream.std()], 1e-4)
    means = [stream[: t + 1].mean() for t in range(6)]
    stds = [max(stream[: t + 1].std(), 1e-4) for t in range(6)]
    expected = ((stream[:6] - means) / stds).clip(-10, 10)
    obs = seen.calls[0].minibatch[0][:, 0].numpy()
    np.testing.assert_allclose(np.sort(obs), np.sort(expected), rtol=1e-3, atol=1e-3)
    assert sorted(observe(norm_obs=False, num_minibatches=1).calls[0].minibatch[0]) == [
        *(0, 0, 1, 1, 2, 2)
    ]


def test_continuous_06_the_last_observation_is_normalized_too(observe, monkeypatch):
    passes = []

    def watch(agent):
        agent.value.register_forward_hook(lambda module, x, y: passes.append(x[0].clone()))

    patch_agent(monkeypatch, watch)
    observe()
    stream = np.array([0.0, 1, 2])  # what the statistics hold when observation 3 comes
    np.testing.assert_allclose(passes[1][2, 0], (3 - 1) / stream.std(), rtol=1e-3)


def test_continuous_07_normalized_observations_are_clipped_to_10():
    statistics = ppo.RunningMeanStd(2)
    raw_obs = np.array([[-1e3, 3.0], [1e3, -3.0]])
    clipped = ppo.normalize_obs(raw_obs, statistics, ppo.Args().clip_obs)
    np.testing.assert_array_equal(clipped, np.float32([[-10, 3], [10, -3]]))
    assert clipped.dtype == np.float32
    assert np.array_equal(ppo.normalize_obs(raw_obs, statistics, math.inf), raw_obs)


@pytest.mark.parametrize("end", ["truncated", "terminated"])
def test_continuous_08_rewards_are_divided_by_the_std_of_their_discounted_sum(observe, end):
    seen = observe(gamma=0.5, env_kwargs=f'{{"end": "{end}"}}')
    sums = [x.item() for x in seen.updates if x.ndim == 1]
    assert sums == [1, 1.5, 1.75, 1, 1.5, 1.75]
    stds = [np.std(sums[: t + 1]) for t in range(6)]
    reward = seen.gae[0][0][:, 0]
    assert reward[0] == 10  # the first std is next to 0
    np.testing.assert_allclose(reward[1:], [1 / std for std in stds[1:]], rtol=1e-3)
    assert (observe(reward_scaling="none").gae[0][0] == 1).all()


def test_continuous_08_the_mean_is_never_subtracted():
    args = ppo.Args(num_envs=1000, num_steps=32, gamma=0.5, clip_reward=math.inf)
    reward = np.random.default_rng(1).normal(5, 2, (1, 1000))
    scaled = ppo.RewardScaling(args)(reward, np.zeros((1, 1000), bool))
    np.testing.assert_allclose(scaled, reward / reward.std(), rtol=1e-3)
    kept = dataclasses.replace(args, reward_scaling="rewards")
    scaled = ppo.RewardScaling(kept)(reward, np.zeros((1, 1000), bool))
    expected = reward.mean() + (reward - reward.mean()) / reward.std()
    np.testing.assert_allclose(scaled, expected, rtol=1e-3)


def test_continuous_09_scaled_rewards_are_clipped_to_10():
    for limit in (10.0, 3.0, math.inf):
        args = ppo.Args(num_envs=3, num_steps=32, reward_scaling="none", clip_reward=limit)
        reward = np.array([[-50.0, 2.0, 50.0]])
        scaled = ppo.RewardScaling(args)(reward, np.zeros((1, 3), bool))
        assert scaled.tolist() == [[-min(limit, 50), 2, min(limit, 50)]]
    assert ppo.Args().clip_reward == 10


def test_aux_01_clip_ranges_are_annealed_like_the_learning_rate(observe):
    settings = {"total_timesteps": 24, "clip_coef": 0.4, "clip_value_coef": 0.8}
    limits = np.array([x.limits for x in observe(**settings, anneal_clip=True).calls])[::4]
    factors = np.array([1, 3 / 4, 2 / 4, 1 / 4])
    np.testing.assert_allclose(limits[:, 0], 0.4 * factors, rtol=1e-6)
    np.testing.assert_allclose(limits[:, 1], 0.8 * factors, rtol=1e-6)
    constant = np.array([x.limits for x in observe(**settings).calls])
    np.testing.assert_allclose(constant[:, :2], [[0.4, 0.8]] * 16, rtol=1e-6)


def test_aux_03_the_smallest_target_kl_allows_exactly_one_step(observe, monkeypatch):
    seen = observe(target_kl=1e-7, num_minibatches=3, update_epochs=4)
    states = seen.parts["optimizer"].state.values()
    assert {state["step"].item() for state in states} == {1}
    assert len(seen.calls) == seen.reports[0]["losses/minibatches"] == 2
    for target_kl in (None, 1e9):
        seen = observe(target_kl=target_kl, num_minibatches=3, update_epochs=4)
        assert {x["step"].item() for x in seen.parts["optimizer"].state.values()} == {12}
    # A step at the target itself is taken, too.
    monkeypatch.setattr(ppo, "approximate_kl", lambda log_ratio: torch.tensor([0.0, 0.5]))
    for target_kl, minibatches in (0.5, 12), (0.4999, 1):
        seen = observe(target_kl=target_kl, num_minibatches=3, update_epochs=4)
        assert len(seen.calls) == minibatches
