"""One test per entry that ppo_atari.py has for itself; what it shares with ppo_continuous.py to the
letter is guarded by test_catalogue_continuous.py."""

import dataclasses
import fcntl
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ale_py
import cv2
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical

import ppo_atari as ppo
import ppo_multidiscrete

RANDOM = np.random.default_rng(1)


def new_game(env_id="BreakoutNoFrameskip-v4", seed=1, **settings):
    return ppo.Game(ppo.Args(env_id=env_id, **settings), seed)


def play(game, steps):
    """Random play -> what each step returned, observations copied; reset when a game is over"""
    seen = []
    for _ in range(steps):
        obs, reward, terminated, truncated = game.step(RANDOM.integers(len(game.actions)))
        seen.append((obs.copy(), reward, terminated, truncated, game.is_over, game.lives))
        if game.is_over or truncated:
            game.reset()
    return seen


class Recorder:
    """An emulator that writes down the actions it gets."""

    def __init__(self, ale):
        self.ale, self.sent = ale, []

    def __getattr__(self, name):
        return getattr(self.ale, name)

    def act(self, action):
        self.sent.append(action)
        return self.ale.act(action)


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """A function that trains on Breakout, on tiny settings, and watches.

    -> calls: limits, minibatch, gradient, losses and log ratio, by minibatch;
       gradients: those that Adam gets, by minibatch;
       gae: arguments of compute_gae, rates and reports, by update; parts: of the run, at its end
    """

    def run(**settings):
        seen = SimpleNamespace(calls=[], gradients=[], gae=[], reports=[], rates=[], eps=None)
        original = {name: getattr(ppo, name) for name in ("loss_gradient", "compute_gae")}
        end_update, move = ppo.Run.end_update, torch.optim.Adam.step

        def loss_gradient(agent, parameters, args, limits, minibatch):
            result = original["loss_gradient"](agent, parameters, args, limits, minibatch)
            call = SimpleNamespace(minibatch=minibatch, limits=[x.item() for x in limits])
            call.gradient, call.losses, call.log_ratio = result
            seen.calls.append(call)
            return result

        def compute_gae(*args):
            seen.gae.append(args)
            return original["compute_gae"](*args)

        def watched(self, report):
            seen.reports.append(dict(report))
            seen.parts = self.parts
            (group,) = self.parts["optimizer"].param_groups
            seen.rates.append(group["lr"])
            seen.eps = group["eps"]
            return end_update(self, report)

        def step(self):
            seen.gradients.append(self.param_groups[0]["params"][0].grad.clone())
            return move(self)

        tiny = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
        settings = {"total_timesteps": 16, "runs_dir": str(tmp_path)} | tiny | settings
        with monkeypatch.context() as patch:
            patch.setattr(ppo, "loss_gradient", loss_gradient)
            patch.setattr(ppo, "compute_gae", compute_gae)
            patch.setattr(ppo.Run, "end_update", watched)
            patch.setattr(torch.optim.Adam, "step", step)
            seen.directory = ppo.train(ppo.Args(**settings))
        return seen

    return run


class Small(nn.Module):
    """Logits and a value of one number an observation, in place of the CNN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.policy_head, self.value_head = nn.Linear(1, 4), nn.Linear(1, 1)

    def forward(self, obs):
        return self.policy_head(obs), self.value_head(obs).flatten()


def gradient_of(**settings):
    """A policy that left the rollout's -> gradient, losses, log ratio, and agent and minibatch"""
    args = ppo.Args(**settings)
    agent, draw = Small(), torch.Generator().manual_seed(2)
    obs = torch.randn(64, 1, generator=draw)
    logits, value = (x.detach() for x in agent(obs))
    logits = logits + 0.5 * torch.randn(64, 4, generator=draw)
    action = logits.softmax(-1).multinomial(1, generator=draw)[:, 0]
    log_prob = Categorical(logits=logits).log_prob(action)
    old_value = value + torch.linspace(-1, 1, 64)
    advantage = 3 * torch.randn(64, generator=draw) + 2
    minibatch = obs, action, log_prob, old_value, advantage, advantage + old_value
    limits = [torch.tensor(x) for x in (args.clip_coef, args.clip_value_coef)]
    result = ppo.loss_gradient(agent, list(agent.parameters()), args, limits, minibatch)
    return *result, agent, minibatch


class Counted:
    """A game whose frames count its steps: a life lost at the second, cut or over at the third."""

    actions = range(4)
    end = "over"

    def __init__(self, args, seed):
        self.seed, self.resets, self.is_over = seed, 0, False
        Counted.made.append(self)

    def reset(self):
        self.steps = self.episode_return = self.episode_length = 0
        self.resets += 1
        return np.full((4, 84, 84), 100, np.uint8)

    def step(self, action):
        self.steps += 1
        self.episode_return = self.episode_length = self.steps
        last = self.steps == 3
        self.is_over = last and self.end == "over"
        terminated = self.is_over or (self.steps == 2 and self.end == "over")
        frames = np.full((4, 84, 84), self.steps, np.uint8)
        return frames, 1.0, terminated, last and self.end == "cut"


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(Counted, "made", [], raising=False)
    monkeypatch.setattr(ppo, "Game", Counted)
    return Counted


def test_core_01_games_step_in_lockstep_and_go_on_over_rollouts(observe, counted):
    seen = observe(num_steps=4, num_envs=3, num_minibatches=2, total_timesteps=24)
    games = counted.made[1:]  # the first one was asked for its actions
    assert len({game.seed for game in games}) == len(games) == 3
    assert all(0 <= game.seed < 2**31 for game in games)
    # Steps 1 2 3, 1 | 2 3, 1 2 in each game: the second rollout goes on where the first stood.
    assert [game.resets for game in games] == [3, 3, 3] and len(seen.gae) == 2
    assert seen.gae[1][4].tolist() == [[True] * 3, [True] * 3, [False] * 3, [True] * 3]


def test_core_01_each_game_gets_what_its_policy_wants(observe, monkeypatch):
    class Sure(ppo.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.policy_head.bias.data[2] = 99.0

    monkeypatch.setattr(ppo, "Agent", Sure)
    assert (observe().calls[0].minibatch[1] == 2).all()


def test_core_02_layers_are_initialized_orthogonally():
    torch.manual_seed(1)
    agent = ppo.Agent(6, ppo.Args())
    layers = [x for x in agent.modules() if isinstance(x, nn.Linear | nn.Conv2d)]
    gains = [math.sqrt(2)] * 4 + [0.01, 1.0]
    for layer, gain in zip(layers, gains, strict=True):
        assert not layer.bias.any()
        rows = layer.weight.detach().flatten(1)
        rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
        expected = gain**2 * torch.eye(len(rows))
        torch.testing.assert_close(rows @ rows.T, expected, atol=1e-4, rtol=1e-3)
    assert ppo.Agent(6, ppo.Args(init="default")).body[0].bias.any()


def test_core_03_adam_has_the_epsilon_and_all_parameters(observe):
    seen = observe()
    assert seen.eps == 1e-5 and observe(adam_eps=1e-8).eps == 1e-8
    (group,) = seen.parts["optimizer"].param_groups
    sizes = [x.numel() for x in seen.parts["agent"].parameters()]
    assert [x.numel() for x in group["params"]] == [sum(sizes)]


def test_core_04_learning_rate_is_annealed(observe):
    settings = {"total_timesteps": 64, "learning_rate": 0.001}
    assert observe(**settings).rates == pytest.approx([0.001, 0.00075, 0.0005, 0.00025])
    assert observe(**settings, anneal_lr=False).rates == [0.001] * 4


@pytest.mark.parametrize("bootstrap", [True, False])
def test_core_05_values_follow_the_game_and_a_cut_one_keeps_its_last(
    observe, counted, monkeypatch, bootstrap
):
    """A game cut at its third step: next_value is that of its last frames, not of the reset."""

    class Counting(ppo.Agent):
        def forward(self, obs):
            mean = obs.float().mean((1, 2, 3))
            nothing = 0 * sum(x.sum() for x in self.parameters())
            return torch.zeros(len(obs), 4) + nothing, mean

    monkeypatch.setattr(ppo, "Agent", Counting)
    monkeypatch.setattr(counted, "end", "cut")
    seen = observe(bootstrap_on_truncation=bootstrap, update_epochs=1)
    reward, value, next_value, no_bootstrap, ended, gamma, gae_lambda = seen.gae[0]
    assert value[:, 0].tolist() == [100, 1, 2, 100, 1, 2, 100, 1]
    assert next_value[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert ended[:, 0].tolist() == [False, False, True] * 2 + [False] * 2
    assert np.array_equal(no_bootstrap, ended & (not bootstrap))
    assert (gamma, gae_lambda) == (0.99, 0.95) and (reward == 1).all()
    batch = [torch.cat([x.minibatch[i] for x in seen.calls]) for i in (3, 4, 5)]
    torch.testing.assert_close(batch[0] + batch[1], batch[2])


def test_core_06_every_epoch_visits_each_step_once(observe):
    calls = observe(num_steps=6, total_timesteps=12, num_minibatches=3, update_epochs=2).calls
    epochs = [torch.cat([x.minibatch[5] for x in calls[i : i + 3]]) for i in (0, 3)]
    assert len(calls) == 6 and torch.equal(*(x.sort().values for x in epochs))
    assert not torch.equal(*epochs)


def test_core_07_advantages_are_normalized_by_minibatch():
    _, losses, log_ratio, _, minibatch = gradient_of(clip_coef=math.inf)
    advantage = minibatch[4]
    normalized = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    assert losses[0] == pytest.approx(-(log_ratio.exp() * normalized).mean().item(), rel=1e-5)
    raw = gradient_of(clip_coef=math.inf, norm_adv=False)[1]
    assert raw[0] == pytest.approx(-(log_ratio.exp() * advantage).mean().item(), rel=1e-5)


def test_core_08_objective_is_the_lesser_of_clipped_and_not():
    _, losses, log_ratio, agent, minibatch = gradient_of(norm_adv=False)
    new = Categorical(logits=agent(minibatch[0])[0])
    torch.testing.assert_close(log_ratio, new.log_prob(minibatch[1]) - minibatch[2])
    total = 0.0
    for ratio, advantage in zip(log_ratio.exp().tolist(), minibatch[4].tolist()):
        total += min(ratio * advantage, max(0.9, min(ratio, 1.1)) * advantage)
    assert losses[0] == pytest.approx(-total / 64, rel=1e-5)


def test_core_09_value_loss_is_clipped_around_the_values_of_the_rollout():
    on, off = (gradient_of(clip_vloss=x) for x in (True, False))
    value, (*_, old_value, _, target) = on[3](on[4][0])[1].detach(), on[4]
    clipped = old_value + (value - old_value).clip(-0.1, 0.1)
    square, other = (value - target) ** 2, (clipped - target) ** 2
    assert off[1][1] == pytest.approx(0.5 * square.mean().item(), rel=1e-5)
    expected = 0.5 * torch.maximum(square, other).mean().item()
    assert on[1][1] == pytest.approx(expected, rel=1e-5) and on[1][1] > off[1][1]


def test_core_10_one_loss_of_policy_entropy_and_value():
    def gradient(**weights):
        return gradient_of(**{"vf_coef": 0.0, "ent_coef": 0.0} | weights)[0]

    policy = gradient()
    assert not policy[-1]  # the bias of the value
    value, entropy = gradient(vf_coef=1.0) - policy, gradient(ent_coef=1.0) - policy
    together = gradient(vf_coef=0.7, ent_coef=0.3)
    torch.testing.assert_close(together, policy + 0.7 * value + 0.3 * entropy)
    torch.testing.assert_close(gradient_of()[0], policy + 0.5 * value + 0.01 * entropy)
    _, losses, _, agent, minibatch = gradient_of()
    expected = Categorical(logits=agent(minibatch[0])[0]).entropy().mean()
    torch.testing.assert_close(losses[2], expected.detach())
    bonus = torch.autograd.grad(-expected, agent.policy_head.weight)[0].flatten()
    torch.testing.assert_close(entropy[:4], bonus)


class Linear(nn.Module):
    """A policy and a value that both scripts can ask for."""

    def __init__(self):
        super().__init__()
        self.policy, self.value_layer = nn.Linear(4, 3), nn.Linear(4, 1)

    def value(self, obs):
        return self.value_layer(obs)[:, 0]

    def forward(self, obs):
        return self.policy(obs), self.value(obs)


@pytest.mark.parametrize("settings", [{}, {"clip_vloss": False, "norm_adv": False, "vf_coef": 2.0}])
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_core_07_to_core_10_loss_is_that_of_ppo_multidiscrete(settings, scale):
    draw, agent = torch.Generator().manual_seed(1), Linear().double()
    obs = torch.randn(20, 4, generator=draw, dtype=torch.float64)
    action = torch.randint(3, (20,), generator=draw)
    others = torch.randn(4, 20, generator=draw, dtype=torch.float64)
    others[0] = 0.4 * others[0] - math.log(3)  # ratios around 1
    rest = others[0], others[1], scale * others[2], others[3]
    limits, found = torch.tensor([0.2, 0.15], dtype=torch.float64), []
    mask = torch.ones(20, 1, 3, dtype=torch.bool)
    for script, minibatch in (
        (ppo, (obs, action, *rest)),
        (ppo_multidiscrete, (obs, action[:, None], mask, *rest)),
    ):
        args = script.Args(ent_coef=0.01, max_grad_norm=math.inf, **settings)
        name = "loss_gradient" if script is ppo else "multidiscrete_gradient"
        inputs = agent, list(agent.parameters()), args, limits, minibatch
        gradient, losses, log_ratio = getattr(script, name)(*inputs)
        found.append((gradient, losses[:3], log_ratio))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-15)


def test_core_11_one_norm_over_all_gradients_is_at_most_half(observe):
    assert ppo.Args().max_grad_norm == 0.5
    seen = observe(max_grad_norm=1e-3)
    for call, clipped in zip(seen.calls, seen.gradients, strict=True):
        norm = call.gradient.norm()
        assert norm > 2e-3
        torch.testing.assert_close(clipped, call.gradient * 1e-3 / norm)
    free = observe(max_grad_norm=math.inf)
    assert all(torch.equal(x.gradient, y) for x, y in zip(free.calls, free.gradients, strict=True))
    norms = [call.gradient.norm().item() for call in free.calls]
    assert free.reports[0]["losses/grad_norm"] == pytest.approx(np.mean(norms))


def test_core_12_debug_variables_are_means_over_all_minibatches(observe):
    seen = observe(learning_rate=1e-3, num_steps=16, total_timesteps=32, clip_coef=1e-4)
    report, losses = seen.reports[0], torch.stack([x.losses for x in seen.calls])
    names = "policy_loss", "value_loss", "entropy"
    for name, x in zip(names, losses.mean(0).tolist()):
        assert report[f"losses/{name}"] == pytest.approx(x, rel=1e-4, abs=1e-7)
    log_ratio = torch.cat([x.log_ratio for x in seen.calls]).double()
    expected = {"old_approx_kl": -log_ratio.mean()}
    expected["approx_kl"] = (log_ratio.exp() - 1 - log_ratio).mean()
    expected["clipfrac"] = ((log_ratio.exp() - 1).abs() > 1e-4).double().mean()
    value, target = (torch.cat([x.minibatch[i] for x in seen.calls[:2]]) for i in (3, 5))
    expected["explained_variance"] = 1 - (target - value).var() / target.var()
    for name, x in expected.items():
        assert report[f"losses/{name}"] == pytest.approx(x.item(), rel=1e-2, abs=1e-6), name


def test_core_13_policy_and_value_share_the_cnn():
    agent = ppo.Agent(4, ppo.Args())
    obs = torch.randint(256, (1, 4, 84, 84), dtype=torch.uint8)
    for output in agent(obs):
        (gradient,) = torch.autograd.grad(output.sum(), agent.body[0].bias, retain_graph=True)
        assert gradient.any()


def test_atari_01_a_game_begins_with_1_to_30_idle_frames():
    counts = set()
    game = new_game(fire_reset=False)
    game.ale = Recorder(game.ale)
    for _ in range(300):
        game.ale.sent.clear()
        game.reset()
        assert set(game.ale.sent) == {ale_py.Action.NOOP}
        counts.add(len(game.ale.sent))
    assert counts == set(range(1, 31))
    idle = new_game(noop_max=0, fire_reset=False)
    idle.ale = Recorder(idle.ale)
    idle.reset()
    assert idle.ale.sent == []


def test_atari_02_four_frames_of_one_action_rewards_summed_and_the_maximum_of_the_last_two():
    game, twin = new_game(clip_rewards=False), new_game(clip_rewards=False)
    game.reset()
    twin.reset()
    game.ale = Recorder(game.ale)
    for _ in range(100):
        action = RANDOM.integers(4)
        game.ale.sent.clear()
        obs, reward, terminated, _ = game.step(action)
        rewards, frames = [], []
        for _ in range(4):
            rewards.append(twin.ale.act(twin.actions[action]))
            frames.append(twin.ale.getScreenGrayscale())
        assert reward == sum(rewards)
        if terminated:
            break
        assert game.ale.sent == [game.actions[action]] * 4
        screen = np.maximum(*frames[-2:]).reshape(210, 160)
        expected = cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(obs[-1], expected)
    game.ale.act = lambda action: 1.0
    assert game.step(0)[1] == 4


def test_atari_03_a_lost_life_ends_the_episode_and_the_log_has_whole_games(observe, counted):
    seen = observe()
    assert seen.gae[0][3][:, 0].tolist() == [False, True, True] * 2 + [False, True]
    lines = (seen.directory / "episodes.csv").read_text().splitlines()[1:]
    assert [line.split(",")[2:] for line in lines] == [["3.0", "3"]] * 4


def test_atari_03_a_lost_life_ends_the_episode_and_the_game_goes_on():
    game = new_game()
    game.reset()
    lives, total = [], 0.0
    for steps in range(1, 3000):
        _, reward, terminated, _ = game.step(RANDOM.integers(len(game.actions)))
        total += reward  # Breakout's are 1 in the lowest rows
        assert game.episode_length == steps
        if terminated:
            lives.append(game.lives)
        if game.is_over:
            break
    assert lives == [4, 3, 2, 1, 0]
    assert game.episode_return >= total
    whole = new_game(episodic_life=False)
    whole.reset()
    ends = [(terminated, over) for _, _, terminated, _, over, _ in play(whole, 400)]
    assert all(terminated == over for terminated, over in ends) and (True, True) in ends


def test_atari_04_fire_is_pressed_at_the_start_and_after_a_lost_life():
    game = new_game()
    game.ale = Recorder(game.ale)
    game.reset()
    fire = [ale_py.Action.FIRE] * 4
    assert game.ale.sent[-4:] == fire
    for _ in range(300):  # doing nothing loses the ball
        game.ale.sent.clear()
        _, _, terminated, _ = game.step(0)
        assert game.ale.sent[4:] == (fire if terminated and not game.is_over else [])
        if game.is_over:
            break
    assert game.is_over  # so the ball came again after each life
    for settings in {"fire_reset": False}, {"env_id": "FreewayNoFrameskip-v4"}:
        game = new_game(**settings)
        game.ale = Recorder(game.ale)
        game.reset()
        assert ale_py.Action.FIRE not in game.ale.sent


def test_atari_05_frame_is_the_luminance_by_area():
    game = new_game()
    game.screens = np.zeros((2, 210, 160), np.uint8)
    game.screens[0, :6, :40] = 200  # 2.4 rows and 21 columns of 84
    frame = game.frame()
    assert frame.shape == (84, 84) and frame.dtype == np.uint8
    assert (frame[:2, :21] == 200).all() and (frame[2, :21] == 80).all()
    assert not frame[3:].any() and not frame[:, 21:].any()
    game.reset()
    screen = game.ale.getScreenGrayscale().reshape(210, 160)
    np.testing.assert_array_equal(game.screens[1], screen)
    red, green, blue = np.moveaxis(game.ale.getScreenRGB().astype(float), -1, 0)
    luminance = 0.2989 * red + 0.5870 * green + 0.1140 * blue
    np.testing.assert_allclose(screen, luminance, atol=1)


def test_atari_06_reward_is_its_sign_and_the_return_is_raw():
    game, raw = (new_game("SeaquestNoFrameskip-v4", clip_rewards=x) for x in (True, False))
    rewards = []
    for g in game, raw:
        g.reset()
        draw = np.random.default_rng(3)
        rewards.append([g.step(draw.integers(18))[1] for _ in range(150)])
    assert np.array_equal(np.sign(rewards[1]), rewards[0]) and max(rewards[1]) > 1
    assert game.episode_return == raw.episode_return == sum(rewards[1])
    pong = new_game("PongNoFrameskip-v4")
    pong.reset()
    assert {-1} <= {reward for _, reward, *_ in play(pong, 400)} <= {-1, 0, 1}


def test_atari_07_the_oldest_frame_comes_first_and_a_reset_alone_fills_the_stack():
    game = new_game()
    obs = game.reset().copy()
    assert all(np.array_equal(frame, obs[0]) for frame in obs)
    for _ in range(300):
        before = obs
        obs, _, terminated, _ = game.step(RANDOM.integers(4))
        obs = obs.copy()
        np.testing.assert_array_equal(obs[:3], before[1:])  # after a lost life too
        np.testing.assert_array_equal(obs[3], game.frame())
        if game.is_over:
            obs = game.reset().copy()
            assert all(np.array_equal(frame, obs[0]) for frame in obs)


def test_atari_08_network_has_the_shapes_of_the_nature_cnn():
    agent = ppo.Agent(6, ppo.Args())
    assert sum(x.numel() for x in agent.body.parameters()) == 1_684_128
    shapes = [tuple(x.weight.shape) for x in agent.body if isinstance(x, nn.Conv2d)]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert [x.stride[0] for x in agent.body if isinstance(x, nn.Conv2d)] == [4, 2, 1]
    assert sum(isinstance(x, nn.ReLU) for x in agent.body) == 4
    logits, value = agent(torch.zeros(3, 4, 84, 84, dtype=torch.uint8))
    assert logits.shape == (3, 6) and value.shape == (3,)


def test_atari_09_pixels_are_divided_by_255_inside_the_network(observe):
    agent = ppo.Agent(4, ppo.Args())
    seen = []
    agent.body.register_forward_hook(lambda module, x, y: seen.append(x[0]))
    obs = torch.randint(256, (2, 4, 84, 84), dtype=torch.uint8)
    agent(obs)
    torch.testing.assert_close(seen[0], obs / 255)
    assert observe().calls[0].minibatch[0].dtype == torch.uint8


def test_aux_01_clip_ranges_are_annealed_like_the_learning_rate(observe):
    settings = {"total_timesteps": 64, "clip_coef": 0.4, "clip_value_coef": 0.8}
    limits = np.array([x.limits for x in observe(**settings, anneal_clip=True).calls])[::4]
    np.testing.assert_allclose(limits, np.outer([1, 0.75, 0.5, 0.25], [0.4, 0.8]), rtol=1e-6)
    constant = np.array([x.limits for x in observe(**settings).calls])
    np.testing.assert_allclose(constant, [[0.4, 0.8]] * 16, rtol=1e-6)


# Trains twice, as the one process or as one of torchrun's: as it is, and on minibatches prepared
# for all processes together, of which each gets its share. What it ends with goes to a file.
SHARED_TRAINING = """
import os, sys, torch, ppo_atari as ppo
rank, world = (int(os.environ.get(name, x)) for name, x in (("RANK", 0), ("WORLD_SIZE", 1)))
folder = sys.argv[1]
saved = {"games": []}

class Kept(ppo.SharedRun):
    def __exit__(self, *error):
        saved["weights", kind] = self.parts["optimizer"].param_groups[0]["params"][0].clone()
        saved["generator", kind] = self.parts["generator"].initial_seed()
        super().__exit__(*error)

class Seeded(ppo.Game):
    def __init__(self, args, seed):
        saved["games"].append(seed)
        super().__init__(args, seed)

def prepared(batch, args, generator):
    draw = torch.Generator().manual_seed(5)
    for _ in range(args.num_minibatches):
        M = args.minibatch_size
        obs = torch.randint(256, (M, 4, 84, 84), dtype=torch.uint8, generator=draw)
        action = torch.randint(4, (M,), generator=draw)
        rest = torch.randn(4, M, generator=draw).unbind()
        yield [x.chunk(world)[rank] for x in (obs, action, *rest)]

ppo.SharedRun, ppo.Game = Kept, Seeded
tiny = dict(num_envs=4, num_steps=4, num_minibatches=2, threads=1, runs_dir=folder + "/runs")
kind = "own"
if world > 1:
    ppo.train(ppo.Args(total_timesteps=32, target_kl=1e-3, **tiny))
kind, ppo.shuffled_minibatches = "prepared", prepared
ppo.train(ppo.Args(total_timesteps=16, update_epochs=1, norm_adv=False, **tiny))
torch.save(saved, f"{folder}/{world}-{rank}.pt")
"""


def test_aux_02_processes_move_one_set_of_weights_by_the_mean_of_their_gradients(tmp_path):
    (tmp_path / "child.py").write_text(SHARED_TRAINING)
    environment = os.environ | {"PYTHONPATH": str(Path(ppo.__file__).parent)}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    for launcher in [], torchrun:
        command = [sys.executable, *launcher, tmp_path / "child.py", tmp_path]
        subprocess.run(command, env=environment, check=True, capture_output=True)
    one, first, second = (torch.load(tmp_path / f"{x}.pt") for x in ("1-0", "2-0", "2-1"))
    for kind in "own", "prepared":
        assert torch.equal(first["weights", kind], second["weights", kind])
        assert first["generator", kind] != second["generator", kind]
    united = first["weights", "prepared"]
    torch.testing.assert_close(united, one["weights", "prepared"], rtol=0, atol=1e-5)
    probe, *games = zip(first["games"][:3], second["games"][:3])
    assert probe == (0, 0) and len(first["games"]) == 6, "two games each, in both trainings"
    assert len({seed for pair in games for seed in pair}) == 4, "each plays games of its own"
    assert len(list((tmp_path / "runs").iterdir())) == 3, "only rank 0 has directories"


def test_core_11_a_norm_that_is_nearly_0_turns_nothing_round(observe, monkeypatch):
    monkeypatch.setattr(ppo, "averaged", lambda x: torch.full_like(x, 1e-10 if x.dim() else 0.0))
    assert all((gradient == 1e-10).all() for gradient in observe().gradients)


def test_aux_03_a_kl_as_large_as_the_target_goes_on(observe, monkeypatch):
    monkeypatch.setattr(ppo, "approximate_kl", lambda x: (x.mean(), torch.tensor(0.5)))
    assert len(observe(target_kl=0.5).calls) == 4


def test_aux_02_weights_move_by_what_the_processes_agree_on(observe, monkeypatch):
    monkeypatch.setattr(ppo, "averaged", torch.zeros_like)
    one, two = observe(), observe(learning_rate=1e-30)
    for x, y in zip(one.parts["agent"].parameters(), two.parts["agent"].parameters()):
        torch.testing.assert_close(x, y, atol=1e-20, rtol=0)


def test_aux_02_all_processes_stop_after_the_update_in_which_one_is_told_to(tmp_path):
    settings = "--num-envs 4 --num-steps 16 --num-minibatches 2 --threads 1 --update-epochs 1"
    options = [*settings.split(), "--total-timesteps", "64000", "--runs-dir", tmp_path]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*torchrun, ppo.__file__, *options], **pipes)
    try:
        deadline, updates = time.monotonic() + 120, []
        while time.monotonic() < deadline and len(updates) < 3 and process.poll() is None:
            updates = [row for path in tmp_path.glob("*/updates.csv") for row in open(path)]
            time.sleep(0.1)
        process.terminate()
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert "go on with: python ppo_atari.py --resume" in error
    assert "Connection closed" not in error and "averaged" not in error
    (run,) = tmp_path.iterdir()
    counters = torch.load(run / "checkpoint.pt", weights_only=True)["counters"]
    assert 2 <= counters["update"] == len((run / "updates.csv").read_text().splitlines()) - 1
    with open(run / "lock") as lock:  # nobody is left who would hold it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_aux_03_the_smallest_target_kl_allows_exactly_one_step(observe):
    for target_kl, steps in (1e-9, 1), (None, 4), (1e9, 4):
        seen = observe(target_kl=target_kl)
        (state,) = seen.parts["optimizer"].state.values()
        assert state["step"].item() == steps


def test_bfloat16_computes_nearly_the_same_and_weights_stay_float32(observe):
    agent = ppo.Agent(4, ppo.Args())
    obs = torch.randint(256, (16, 4, 84, 84), dtype=torch.uint8)
    with ppo.autocast(True, obs.device):
        logits, value = agent(obs)
        assert agent.body(obs.float() / 255.0).dtype == torch.bfloat16
    exact_logits, exact_value = agent(obs)
    assert logits.dtype == value.dtype == torch.float32
    torch.testing.assert_close(logits, exact_logits, rtol=0, atol=1e-3)
    torch.testing.assert_close(value, exact_value, rtol=0, atol=0.05)
    assert not torch.equal(value, exact_value)
    exact, rounded = observe(total_timesteps=16).calls[0], observe(bf16=True).calls[0]
    cosine = torch.cosine_similarity(exact.gradient, rounded.gradient, dim=0)
    assert rounded.gradient.dtype == torch.float32 and 0.99 < cosine < 1


def test_frames_lie_channels_last_in_memory(observe):
    for call in observe().calls:
        assert call.minibatch[0].is_contiguous(memory_format=torch.channels_last)


def test_a_game_is_cut_at_its_frames_and_truncated():
    game = new_game("PongNoFrameskip-v4", max_frames=200)
    game.reset()
    ends = [game.step(0)[2:] for _ in range(60)]
    assert (False, True) in ends and not any(terminated for terminated, _ in ends)


def test_both_kinds_of_ids_mean_the_same_game():
    games = [new_game(x) for x in ("BreakoutNoFrameskip-v4", "ALE/Breakout-v5", "Breakout-v4")]
    frames = [
        [game.reset().copy()] + [game.step(i % 4)[0].copy() for i in range(20)] for game in games
    ]
    for other in frames[1:]:
        np.testing.assert_array_equal(frames[0], other)
    assert games[0].ale.getFloat("repeat_action_probability") == 0
    sticky = new_game(sticky_actions=0.25).ale.getFloat("repeat_action_probability")
    assert sticky == pytest.approx(0.25)


def test_sticky_actions_of_a_game_are_those_of_its_seed():
    screens = []
    for seed in 1, 1, 2:
        game = new_game(seed=seed, sticky_actions=0.5, noop_max=0)
        game.reset()
        screens.append([game.step(i % 4)[0].copy() for i in range(40)])
    np.testing.assert_array_equal(screens[0], screens[1])
    assert not np.array_equal(screens[0], screens[2])


def test_first_frame_shows_nothing_of_the_last_game():
    game = new_game("FreewayNoFrameskip-v4", noop_max=0)  # nothing is pressed at a reset
    game.screens[:] = 255
    frame = game.reset()[-1]
    screen = game.ale.getScreenGrayscale().reshape(210, 160)
    expected = cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(frame, expected)


def test_reset_begins_the_game_anew_wherever_it_stands():
    game = new_game(noop_max=0)
    first = game.reset().copy()
    for i in range(100):
        game.step(i % 4)
    lives = game.lives
    np.testing.assert_array_equal(game.reset(), first)
    assert lives < game.lives == 5 and game.episode_return == game.episode_length == 0


def test_unknown_game_is_one_line_with_close_names(capsys, tmp_path):
    status = ppo.main(["--env-id", "Breakot-v4", "--runs-dir", str(tmp_path / "runs")])
    line = capsys.readouterr().err
    assert status == 2 and line.count("\n") == 1 and "Breakout-v4" in line
    assert not (tmp_path / "runs").exists()


def test_same_seed_same_training(observe):
    one, two = observe(), observe()
    for x, y in zip(one.parts["agent"].parameters(), two.parts["agent"].parameters()):
        assert torch.equal(x, y)
    other = observe(seed=2)
    assert not torch.equal(one.calls[0].minibatch[0], other.calls[0].minibatch[0])


def test_whole_games_are_those_of_evaluation():
    env = ppo.WholeGames(dataclasses.replace(ppo.Args(), seed=3))
    env.reset(seed=2**100 + 7)
    ends = []
    for _ in range(2000):
        _, _, terminated, truncated, _ = env.step(RANDOM.integers(env.num_actions))
        ends.append(terminated or truncated)
        if ends[-1]:
            break
    assert env.game.lives == 0 and ends.count(True) == 1 and env.render().shape == (210, 160, 3)
