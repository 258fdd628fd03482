"""One test per entry that ppo_atari_lstm.py has for itself, and proof that the rest of its loop is
ppo_atari.py's: without a memory both train alike."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_catalogue_atari import Counted
from torch import nn

import evaluate
import ppo_atari
import ppo_atari_lstm as ppo

TINY = {"num_envs": 4, "num_steps": 7, "num_minibatches": 2, "update_epochs": 2}


class Noise(Counted):
    """A game of noise, with the ends of a counted one."""

    end = "over"

    def __init__(self, args, seed):
        self.random, self.resets, self.is_over = np.random.default_rng(seed), 0, False

    def frame(self):
        return self.random.integers(256, size=(1, 84, 84), dtype=np.uint8)

    def reset(self):
        super().reset()
        return self.frame()

    def step(self, action):
        _, _, *ends = super().step(action)
        return self.frame(), float(action), *ends


def shrink(agent):
    """Four averages and a layer in place of the CNN, and a policy that isn't uniform"""
    layer = ppo.initialized(nn.Linear(4, 512), 8.0, "orthogonal")
    agent.body = nn.Sequential(nn.AvgPool2d(42), nn.Flatten(), layer, nn.ReLU())
    nn.init.orthogonal_(agent.policy_head.weight)


class Small(ppo.Agent):
    def __init__(self, num_actions, args):
        super().__init__(num_actions, args)
        shrink(self)


class SmallWithoutMemory(ppo_atari.Agent):
    def __init__(self, num_actions, args):
        super().__init__(num_actions, args)
        shrink(self)


class Forgetful(SmallWithoutMemory):
    """The agent without a memory, called as the one that has it."""

    def initial_state(self, num_games):
        return torch.zeros(2, num_games, 1)

    def forward(self, obs, state, begins):
        logits, value = super().forward(obs.flatten(0, 1))
        return *(x.unflatten(0, begins.shape) for x in (logits, value)), state

    step = ppo.Agent.step


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """A function that trains a script on tiny settings, and watches.

    -> minibatches, log ratios, arguments of compute_gae, reports, and the agent at its end
    """

    def run(script=ppo, game=Noise, agent=Small, **settings):
        seen = SimpleNamespace(minibatches=[], log_ratios=[], gae=[], reports=[])
        name = "loss_gradient" if script is ppo_atari else "sequence_loss_gradient"
        gradient, gae = getattr(script, name), script.compute_gae
        end_update = script.Run.end_update

        def watched_gradient(agent, parameters, args, limits, minibatch):
            seen.minibatches.append(minibatch)
            result = gradient(agent, parameters, args, limits, minibatch)
            seen.log_ratios.append(result[2])
            return result

        def watched_gae(*args):
            seen.gae.append(args)
            return gae(*args)

        def watched_end(self, report):
            seen.reports.append(dict(report))
            seen.agent = self.parts["agent"]
            return end_update(self, report)

        settings = {"total_timesteps": 32, "runs_dir": str(tmp_path), "threads": 1} | settings
        with monkeypatch.context() as patch:
            patch.setattr(script, name, watched_gradient)
            patch.setattr(script, "compute_gae", watched_gae)
            patch.setattr(script.Run, "end_update", watched_end)
            patch.setattr(script, "Game", game or script.Game)
            patch.setattr(script, "Agent", agent or script.Agent)
            seen.directory = script.train(script.Args(**{"frame_stack": 1} | TINY | settings))
        return seen

    return run


def frozen(observe, **settings):
    """Two rollouts whose weights stay as they are, to the last digit that matters."""
    return observe(learning_rate=1e-30, total_timesteps=64, **settings)


def states(agent, obs, state, begins):
    """The state after each step, one step at a time"""
    found = []
    for t in range(len(obs)):
        state = agent(obs[t : t + 1], state, begins[t : t + 1])[2]
        found.append(state)
    return torch.stack(found)


def noise_batch(steps=6, games=2, seed=1):
    """Frames, a state that isn't zero, and no beginning"""
    draw = torch.Generator().manual_seed(seed)
    obs = torch.randint(256, (steps, games, 1, 84, 84), generator=draw, dtype=torch.uint8)
    state = torch.randn(2, games, 128, generator=draw)
    return obs, state, torch.zeros(steps, games, dtype=torch.bool)


def small_agent():
    torch.manual_seed(1)
    return Small(4, ppo.Args())


# ---- The five details ----


def test_lstm_01_both_matrices_are_orthogonal_with_gain_1_and_biases_0():
    torch.manual_seed(1)
    agent = ppo.Agent(6, ppo.Args())
    for layer in agent.lstm_input, agent.lstm_output:
        weight = layer.weight.detach()
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]))
        assert not layer.bias.any()
    other = ppo.Agent(6, ppo.Args(init="default"))
    assert other.lstm_input.bias.any() and other.lstm_output.bias.any()


def test_core_02_cnn_is_that_of_ppo_atari_and_heads_have_their_gains():
    agents, obs = [], torch.rand(3, 1, 84, 84)
    for script in ppo, ppo_atari:
        torch.manual_seed(1)
        agents.append(script.Agent(6, script.Args(frame_stack=1)))
    agent, other = agents
    assert torch.equal(agent.body(obs), other.body(obs))
    for layer, gain in (agent.policy_head, 0.01), (agent.value_head, 1.0):
        rows = layer.weight.detach() / gain
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def test_lstm_02_state_is_zero_at_first(observe):
    seen = observe(num_minibatches=1, update_epochs=1)
    (minibatch,) = seen.minibatches
    assert minibatch[6].shape == (2, 4, 128) and not minibatch[6].any()
    assert not small_agent().initial_state(3).any()


def test_lstm_03_nothing_is_remembered_of_the_episode_before():
    agent, (obs, state, begins) = small_agent(), noise_batch()
    with torch.no_grad():
        before = agent(obs, state, begins)
        begins[3, 0] = True
        logits, value, last = agent(obs, state, begins)
        # From there on the first game is as from a zero state; the second one goes on.
        anew = agent(obs[3:, :1], torch.zeros(2, 1, 128), begins[3:, :1] & False)
    torch.testing.assert_close(value[3:, :1], anew[1])
    torch.testing.assert_close(logits[3:, :1], anew[0])
    torch.testing.assert_close(last[:, :1], anew[2])
    assert not torch.isclose(value[3:, 0], before[1][3:, 0]).any()
    assert torch.equal(value[:3], before[1][:3]) and torch.equal(value[:, 1], before[1][:, 1])
    with torch.no_grad():
        assert torch.equal(
            agent.step(obs[0].numpy(), state, torch.ones(2, dtype=torch.bool))[1],
            agent.step(obs[0].numpy(), 0 * state, torch.zeros(2, dtype=torch.bool))[1],
        )


@pytest.mark.parametrize("end", ["over", "cut"])
def test_lstm_03_a_lost_life_a_game_over_and_a_cut_end_an_episode(observe, monkeypatch, end):
    monkeypatch.setattr(Noise, "end", end)
    seen = frozen(observe, num_minibatches=1, update_epochs=1)
    begins = torch.cat([x[7] for x in seen.minibatches])
    ended = torch.from_numpy(np.concatenate([x[4] for x in seen.gae]))
    assert torch.equal(begins[1:], ended[:-1]) and not begins[0].any()
    # Steps 1 2 3, 1 2 3, ...: the second one loses a life where the game isn't cut.
    pattern = [False, end == "over", True]
    assert ended[:, 0].tolist() == (5 * pattern)[:14]


def test_lstm_04_a_minibatch_holds_whole_games_in_their_order():
    T, N = 5, 6
    steps = torch.arange(T * N).view(T, N)
    batch = [steps] * 6 + [10 * torch.arange(N) + torch.zeros(2, 1).long(), steps]
    args = ppo.Args(num_envs=N, num_steps=T, num_minibatches=3, update_epochs=4)
    found = list(ppo.minibatches_of_games(batch, args, torch.Generator().manual_seed(1)))
    assert len(found) == 12
    for minibatch in found:
        games = minibatch[0][0]
        assert len(games) == 2
        for x in [*minibatch[:6], minibatch[7]]:
            assert torch.equal(x, steps[:, games])
        assert torch.equal(minibatch[6], batch[6][:, games])


def test_core_06_every_epoch_visits_each_game_once():
    batch = [torch.arange(8)[None]] * 8
    args = ppo.Args(num_envs=8, num_minibatches=4, update_epochs=3)
    found = list(ppo.minibatches_of_games(batch, args, torch.Generator().manual_seed(1)))
    epochs = [torch.cat([x[0][0] for x in found[i : i + 4]]).tolist() for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_lstm_04_minibatches_that_do_not_divide_the_games_are_one_line(capsys, tmp_path):
    options = ["--num-envs", "6", "--num-minibatches", "4", "--runs-dir", str(tmp_path / "runs")]
    assert ppo.main(options) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and not (tmp_path / "runs").exists()
    assert "--num-minibatches 4" in line and "--num-envs 6" in line and "divisor of 6" in line


@pytest.mark.parametrize("agent", [Small, None], ids=["small", "cnn"])
def test_lstm_05_a_replay_reproduces_log_probabilities_and_values(observe, agent):
    seen = frozen(observe, agent=agent)
    first_states = [x[6] for x in seen.minibatches]
    assert not first_states[0].any() and first_states[4].any()  # of the first and second rollout
    for minibatch, log_ratio in zip(seen.minibatches, seen.log_ratios, strict=True):
        obs, state, begins = minibatch[0], *minibatch[6:]
        assert begins[1:].any() and log_ratio.abs().max() <= 1e-6
        with torch.no_grad():
            _, value, _ = seen.agent(obs, state, begins)
            _, wrong, _ = seen.agent(obs, state + 0.1, begins)
        torch.testing.assert_close(value, minibatch[3], atol=1e-6, rtol=0)
        assert (wrong - value).abs().max() > 1e-4  # so the state is seen in the value


def test_lstm_05_state_is_kept_over_rollouts(observe):
    seen = frozen(observe, num_minibatches=1, update_epochs=1)
    for minibatch in seen.minibatches:  # the games in the order of the first observations
        order = minibatch[0][0].flatten(1).double().mean(1).argsort()
        minibatch[:] = [x[:, order] for x in minibatch]
    first, second = seen.minibatches
    with torch.no_grad():
        found = states(seen.agent, first[0], first[6], first[7])[-1]
    rows = [x.permute(1, 0, 2).flatten(1) for x in (found, second[6])]
    rows = [x[x[:, 0].argsort()] for x in rows]
    torch.testing.assert_close(*rows, atol=1e-6, rtol=0)
    assert rows[0].any(1).all()


# ---- Values ----


def test_core_05_value_after_a_rollout_is_that_of_the_state_by_then(observe):
    one, two = frozen(observe).gae
    going_on = ~one[4][-1]
    assert going_on.any()
    np.testing.assert_allclose(one[2][-1][going_on], two[1][0][going_on], atol=1e-6)


def test_core_05_a_cut_game_is_valued_in_the_state_that_led_to_its_end(observe, monkeypatch):
    monkeypatch.setattr(Noise, "end", "cut")
    monkeypatch.setattr(Noise, "played", [], raising=False)
    frame = Noise.frame

    def noted(self):
        self.frames = [*getattr(self, "frames", []), frame(self)]
        Noise.played.append(self)
        return self.frames[-1]

    monkeypatch.setattr(Noise, "frame", noted)
    seen = frozen(observe)
    _, value, next_value, *_ = seen.gae[0]
    games = list(dict.fromkeys(Noise.played))
    assert len(games) == 4
    for n, game in enumerate(games):  # 4 frames a game: reset, 1, 2, 3
        for t, frames in enumerate((game.frames[:4], game.frames[4:8])):
            obs = torch.from_numpy(np.stack(frames))[:, None]
            with torch.no_grad():
                expected = seen.agent(obs, torch.zeros(2, 1, 128), torch.zeros(4, 1).bool())[1]
            got = [*value[3 * t : 3 * t + 3, n], next_value[3 * t + 2, n]]
            np.testing.assert_allclose(got, expected[:, 0], atol=1e-6)


# ---- What is the same without a memory ----


def test_the_recurrence_is_that_of_pytorch():
    agent, (obs, state, begins) = small_agent(), noise_batch()
    reference = nn.LSTM(512, 128)
    for name, layer in ("ih", agent.lstm_input), ("hh", agent.lstm_output):
        nn.init.normal_(layer.bias)
        getattr(reference, f"weight_{name}_l0").data = layer.weight.data
        getattr(reference, f"bias_{name}_l0").data = layer.bias.data
    with torch.no_grad():
        logits, value, last = agent(obs, state, begins)
        hidden = agent.body(obs.flatten(0, 1) / 255).unflatten(0, begins.shape)
        outputs, expected = reference(hidden, tuple(state[:, None]))
        torch.testing.assert_close(last, torch.cat(expected))
        torch.testing.assert_close(logits, agent.policy_head(outputs))
        torch.testing.assert_close(value, agent.value_head(outputs)[..., 0])


def test_network_has_its_shapes_and_bfloat16_keeps_the_state_in_float32():
    agent = ppo.Agent(6, ppo.Args())
    sizes = [sum(x.numel() for x in layer.parameters()) for layer in agent.children()]
    cnn = 1_684_128 - 3 * 8 * 8 * 32  # Nature's, of one frame
    assert sizes == [cnn, 513 * 512, 129 * 512, 129 * 6, 129]
    obs, state, begins = noise_batch(steps=3)
    for bf16 in False, True:
        with torch.no_grad(), ppo.autocast(bf16, obs.device):
            found = agent(obs, state, begins)
        assert [tuple(x.shape) for x in found] == [(3, 2, 6), (3, 2), (2, 2, 128)]
        assert {x.dtype for x in found} == {torch.float32}


@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_loss_is_that_of_ppo_atari_where_nothing_is_remembered(scale, clip_vloss):
    args = ppo.Args(clip_vloss=clip_vloss)
    torch.manual_seed(1)
    agent, draw = Forgetful(4, args), torch.Generator().manual_seed(2)
    obs, state, begins = noise_batch()
    others = [torch.randn(6, 2, generator=draw) for _ in range(4)]
    others[0] = others[0] - math.log(4)  # so that ratios are around 1
    others[2] *= scale
    minibatch = [obs, torch.randint(4, (6, 2), generator=draw), *others]
    parameters, limits = list(agent.parameters()), [torch.tensor(0.1), torch.tensor(0.2)]
    inputs = agent, parameters, args, limits
    ours = ppo.sequence_loss_gradient(*inputs, [*minibatch, state[..., :1], begins])
    agent.__class__ = SmallWithoutMemory
    theirs = ppo_atari.loss_gradient(*inputs, [x.flatten(0, 1) for x in minibatch])
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x.flatten(), y.flatten())


@pytest.mark.parametrize("end", ["over", "cut"])
def test_training_is_that_of_ppo_atari_where_nothing_is_remembered(observe, monkeypatch, end):
    monkeypatch.setattr(Noise, "end", end)
    for script, name in (ppo, "minibatches_of_games"), (ppo_atari, "shuffled_minibatches"):
        # Without its shuffling, which draws other numbers.
        monkeypatch.setattr(script, name, lambda batch, args, _: args.update_epochs * [batch])
    settings = {"anneal_clip": True, "target_kl": 1.0, "learning_rate": 1e-3}
    settings |= {"num_minibatches": 1, "total_timesteps": 96, "max_grad_norm": 0.01}
    ours = observe(agent=Forgetful, **settings)
    theirs = observe(ppo_atari, agent=SmallWithoutMemory, **settings)
    assert len(ours.reports) == 3
    for one, other in zip(ours.gae, theirs.gae, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours.reports, theirs.reports, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
    for x, y in zip(ours.agent.parameters(), theirs.agent.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1e-10, 1e-6, 1.0])
def test_core_11_one_norm_over_all_gradients_is_at_most_half(observe, monkeypatch, size):
    monkeypatch.setattr(ppo, "averaged", lambda x: torch.full_like(x, size if x.dim() else 0.0))
    run = observe(num_minibatches=1, update_epochs=1, total_timesteps=28).directory
    state = torch.load(run / "checkpoint.pt", weights_only=True)["parts"]["optimizer"]["state"][0]
    assert state["step"] == 1
    norm = size * math.sqrt(state["exp_avg"].numel())
    expected = torch.full_like(state["exp_avg"], 0.1 * size * min(0.5 / norm, 1))
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("target_kl, steps", [(1e-9, 1), (None, 4), (1e9, 4)])
def test_aux_03_the_smallest_target_kl_allows_exactly_one_step(observe, target_kl, steps):
    run = observe(target_kl=target_kl, total_timesteps=28, learning_rate=1e-2).directory
    state = torch.load(run / "checkpoint.pt", weights_only=True)["parts"]["optimizer"]["state"][0]
    assert state["step"] == steps


def test_aux_03_a_kl_as_large_as_the_target_goes_on(observe, monkeypatch):
    monkeypatch.setattr(ppo, "approximate_kl", lambda x: (x.mean(), torch.tensor(0.5)))
    assert len(observe(target_kl=0.5, total_timesteps=28).minibatches) == 4


def test_aux_02_weights_move_by_what_the_processes_agree_on(observe, monkeypatch):
    monkeypatch.setattr(ppo, "averaged", torch.zeros_like)
    one, two = observe(), observe(learning_rate=1e-30)
    for x, y in zip(one.agent.parameters(), two.agent.parameters()):
        torch.testing.assert_close(x, y, atol=1e-20, rtol=0)


def test_same_seed_same_training(observe):
    settings = {"game": None, "agent": None, "env_id": "BreakoutNoFrameskip-v4"}
    one, two, other = observe(**settings), observe(**settings), observe(**settings, seed=2)
    for x, y in zip(one.agent.parameters(), two.agent.parameters()):
        assert torch.equal(x, y)
    assert not torch.equal(one.minibatches[0][0], other.minibatches[0][0])


@pytest.mark.slow
def test_compiled_update_equals_eager(observe):
    settings = {"num_steps": 4, "total_timesteps": 16, "update_epochs": 1}
    eager, compiled = observe(**settings), observe(**settings, compile=True)
    for x, y in zip(eager.agent.parameters(), compiled.agent.parameters()):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


# ---- Memory ----


class Remember:
    """The first frame shows on which side it is white; then all is black. The tenth step after it
    earns 1 if its action is that side, and -1 if not."""

    actions = range(2)

    def __init__(self, args, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.side = self.random.integers(2)
        self.episode_return = self.episode_length = 0
        obs = np.zeros((1, 84, 84), np.uint8)
        obs[..., 42 * self.side : 42 * self.side + 42] = 255
        return obs

    def step(self, action):
        self.is_over = self.episode_length == 10
        reward = 2.0 * (action == self.side) - 1.0 if self.is_over else 0.0
        self.episode_return += reward
        self.episode_length += 1
        return np.zeros((1, 84, 84), np.uint8), reward, self.is_over, False


def last_returns(script, agent, monkeypatch, folder):
    """Mean return of the last 300 games of a short training on Remember"""
    monkeypatch.setattr(script, "Game", Remember)
    monkeypatch.setattr(script, "Agent", agent)
    settings = {"num_envs": 32, "num_steps": 11, "num_minibatches": 2, "frame_stack": 1}
    settings |= {"learning_rate": 3e-3, "gae_lambda": 0.0, "runs_dir": str(folder)}
    settings |= {"total_timesteps": 9152, "threads": 1}  # 26 updates, 832 games
    directory = script.train(script.Args(**settings))
    with open(directory / "episodes.csv") as file:
        return np.mean([float(row["episodic_return"]) for row in csv.DictReader(file)][-300:])


def test_memory_is_found_where_it_is_needed(monkeypatch, tmp_path):
    """What was seen ten steps before is acted on by the LSTM, and not by the network without."""
    assert last_returns(ppo, Small, monkeypatch, tmp_path) > 0.9
    assert abs(last_returns(ppo_atari, SmallWithoutMemory, monkeypatch, tmp_path)) < 0.3


# ---- Evaluation ----


def test_evaluation_carries_the_state_through_a_game_and_begins_the_next_without(observe):
    directory = observe(game=None, agent=None, env_id="PongNoFrameskip-v4").directory
    policy = evaluate.load_policy(directory)
    obs, _, begins = noise_batch(steps=5, games=1)
    with torch.no_grad():
        logits = policy.agent(obs, torch.zeros(2, 1, 128), begins)[0][:, 0]
    for _ in range(2):
        policy.begin()
        for frames, expected in zip(obs[:, 0], logits):
            assert policy.act(frames.numpy()) == expected.argmax().item()
        state = policy.state
    policy.begin()
    assert state.any() and not policy.state.any()
