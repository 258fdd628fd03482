"""The catalogue entries that ppo_multidiscrete.py alone has, and the spaces that it acts in."""

import copy
import json
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs
from torch.distributions import Categorical

import evaluate
import ppo_continuous
import ppo_multidiscrete as ppo

MASKS = {"-1": [1, 1, 0, 1, 1], "1": [0, 0, 1, 0, 1]}  # of Choices, of 3 and 2 choices
DEAD_END = {"-1": [1, 1, 0, 1, 1], "1": [1, 0, 1, 0, 0]}
DTYPES = [torch.float32, torch.bfloat16]


def options(total=64, steps=32, **env_kwargs):
    kwargs = {"env_id": "Choices-v0", "env_kwargs": json.dumps(env_kwargs), "num_steps": steps}
    return kwargs | {"total_timesteps": total, "num_minibatches": 2, "update_epochs": 2}


def new_environment(**settings):
    env = ppo.DiscreteEnvironment(ppo.Args(**settings))
    env.reset(seed=1)
    return env


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """A function that trains with these settings -> calls of the gradient, directory of the run"""
    original = ppo.multidiscrete_gradient

    def run(**settings):
        calls = []

        def multidiscrete_gradient(agent, parameters, args, limits, minibatch):
            call = SimpleNamespace(agent=copy.deepcopy(agent), minibatch=minibatch)
            results = original(agent, parameters, args, limits, minibatch)
            call.gradient, call.losses, call.log_ratio = results
            calls.append(call)
            return results

        monkeypatch.setattr(ppo, "multidiscrete_gradient", multidiscrete_gradient)
        toy_envs.Choices.sent.clear()
        directory = ppo.train(ppo.Args(runs_dir=str(tmp_path), **settings))
        return SimpleNamespace(calls=calls, directory=directory)

    return run


@pytest.fixture
def fails(tmp_path, capsys):
    """Train with these settings -> exit status and the line that says why it ended"""

    def run(*more, **settings):
        flags = [f"--{name.replace('_', '-')}={x}" for name, x in settings.items()]
        status = ppo.main([*flags, *more, "--runs-dir", str(tmp_path)])
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("ppo_")]
        return status, line

    return run


# ---- What it shares with ppo_continuous.py ----


@pytest.mark.parametrize("init", ["orthogonal", "xavier", "default"])
@pytest.mark.parametrize("activation, shared", [("tanh", False), ("relu", True)])
def test_core_02_core_13_networks_are_those_of_ppo_continuous(init, activation, shared):
    agents, obs = [], torch.randn(5, 4)
    for script in ppo, ppo_continuous:
        torch.manual_seed(1)
        args = script.Args(init=init, activation=activation, share_network=shared)
        agents.append(script.Agent(4, 6, args))
    weights = [dict(agent.named_parameters()) for agent in agents]
    del weights[1]["log_std"]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    for name in "policy", "value":
        assert torch.equal(*(getattr(agent, name)(obs) for agent in agents))


# ---- Independent components ----


def test_multidiscrete_01_log_probability_and_entropy_are_sums_over_components():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 2, 3, generator=draw)
    logits[:, 1, 2] = -1e8  # the second component has two choices
    action = torch.stack([torch.arange(7) % 3, torch.arange(7) % 2], -1)
    log_prob, entropy = torch.zeros(2, 7)
    for b in range(7):
        for component, size in enumerate((3, 2)):
            total = sum(math.exp(x) for x in logits[b, component, :size].tolist())
            p = [math.exp(x) / total for x in logits[b, component, :size].tolist()]
            log_prob[b] += math.log(p[action[b, component]])
            entropy[b] -= sum(x * math.log(x) for x in p)
    torch.testing.assert_close(ppo.multidiscrete_log_prob(logits, action), log_prob)
    torch.testing.assert_close(ppo.multidiscrete_entropy(logits), entropy)
    with pytest.raises(AssertionError):
        ppo.multidiscrete_log_prob(logits, action[:, 0])


def test_multidiscrete_01_one_component_is_a_plain_categorical():
    logits = torch.randn(9, 1, 5, generator=torch.Generator().manual_seed(1))
    action = torch.arange(9)[:, None] % 5
    plain = Categorical(logits=logits[:, 0])
    torch.testing.assert_close(
        ppo.multidiscrete_log_prob(logits, action), plain.log_prob(action[:, 0])
    )
    torch.testing.assert_close(ppo.multidiscrete_entropy(logits), plain.entropy())


def test_multidiscrete_01_components_are_drawn_independently_from_the_softmax(observe):
    # Xavier's policy isn't nearly uniform from the start.
    call = observe(**options(2048, 2048), init="xavier", norm_obs=False).calls[0]
    obs, action, mask, log_prob = call.minibatch[:4]
    for x in (-1, 1):
        here = obs[:, 0] == x
        logits = call.agent.policy(obs[here][:1]).reshape(2, 3).detach()
        logits[1, 2] = -math.inf
        p = logits.softmax(-1)
        joint = torch.zeros(3, 2).index_put(tuple(action[here].T), torch.tensor(1.0), True)
        expected = p[0, :, None] * p[1, None, :2]
        torch.testing.assert_close(joint / here.sum(), expected, atol=0.08, rtol=0)
    assert (call.log_ratio.abs() < 1e-6).all()  # ratio 1 before the first step
    assert log_prob.shape == (1024,) and mask.shape == (1024, 2, 3)


def test_multidiscrete_01_the_loss_is_that_of_the_joint_distribution(observe):
    call = observe(**options(), ent_coef=0.3, max_grad_norm=math.inf).calls[-1]
    agent = call.agent
    obs, action, _, log_prob, old_value, advantage, target = call.minibatch
    logits = agent.policy(obs).reshape(-1, 2, 3)
    parts = [Categorical(logits=logits[:, 0]), Categorical(logits=logits[:, 1, :2])]
    new = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
    ratio, a = (new - log_prob).exp(), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    objective = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    value, entropy = agent.value(obs), sum(part.entropy() for part in parts).mean()
    clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
    value_loss = torch.max((value - target) ** 2, (clipped - target) ** 2).mean() / 2
    loss = -objective - 0.3 * entropy + 0.5 * value_loss
    gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, agent.parameters())])
    torch.testing.assert_close(call.gradient, gradient, atol=1e-5, rtol=1e-4)
    losses = torch.stack([-objective, value_loss, entropy, gradient.norm()])
    torch.testing.assert_close(call.losses, losses.detach(), atol=1e-5, rtol=1e-4)


def test_multidiscrete_01_choices_are_as_frequent_as_their_probabilities(observe, monkeypatch):
    class Biased(ppo.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.policy[-1].bias.data = torch.tensor([0.0, 1.0, 2.0]).repeat(4)

    monkeypatch.setattr(ppo, "Agent", Biased)
    action = observe(**options(2048, 2048, nvec=[3] * 4)).calls[0].minibatch[1]
    found = torch.bincount(action.flatten(), minlength=3) / action.numel()
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


# ---- The rest of the loop ----


def reference_gradient(agent, args, clip_coef, clip_value_coef, minibatch):
    """PPO's loss and its clipped gradient, term by term"""
    obs, action, _, log_prob, old_value, advantage, target = minibatch
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    parts = [Categorical(logits=x) for x in agent.policy(obs).reshape(len(obs), 2, 3).unbind(1)]
    policy_loss = value_loss = entropy = 0.0
    for b, value in enumerate(agent.value(obs)):
        new = sum(part.log_prob(action[:, i])[b] for i, part in enumerate(parts))
        ratio, a = (new - log_prob[b]).exp(), advantage[b]
        low, high = 1 - clip_coef, 1 + clip_coef
        policy_loss -= min(ratio * a, min(max(ratio, low), high) * a) / len(obs)
        error = (value - target[b]) ** 2
        if args.clip_vloss:
            moved = min(max(value - old_value[b], -clip_value_coef), clip_value_coef)
            error = max(error, (old_value[b] + moved - target[b]) ** 2)
        value_loss += error / 2 / len(obs)
        entropy += sum(part.entropy()[b] for part in parts) / len(obs)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, agent.parameters())])
    norm = (gradient**2).sum().sqrt()
    losses = torch.stack([policy_loss, value_loss, entropy, norm]).detach()
    return gradient * min(args.max_grad_norm / (norm.item() + 1e-6), 1), losses


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_vloss": False, "norm_adv": False},
        {"max_grad_norm": math.inf, "ent_coef": 0.3, "vf_coef": 2.0},
        {"max_grad_norm": 1e-3, "norm_adv": False, "clip_vloss": False},
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_core_07_to_core_11_loss_and_gradient_are_those_of_a_slow_reference(settings, scale):
    draw = torch.Generator().manual_seed(1)
    args = ppo.Args(**{"max_grad_norm": 0.01, "init": "xavier"} | settings)
    agent = ppo.Agent(4, 6, args).double()
    obs = torch.randn(20, 4, generator=draw, dtype=torch.float64)
    action = torch.randint(3, (20, 2), generator=draw)
    logits = agent.policy(obs).detach().view(20, 2, 3)
    others = torch.randn(4, 20, generator=draw, dtype=torch.float64)
    log_prob = ppo.multidiscrete_log_prob(logits, action) + 0.4 * others[0]
    value = agent.value(obs).detach() + 0.3 * others[1]
    minibatch = obs, action, torch.ones(20, 2, 3, dtype=torch.bool), log_prob, value
    minibatch = *minibatch, scale * others[2], others[3]
    limits = torch.tensor([0.2, 0.15], dtype=torch.float64)
    inputs = agent, list(agent.parameters()), args, limits, minibatch
    gradient, losses, log_ratio = ppo.multidiscrete_gradient(*inputs)
    expected, expected_losses = reference_gradient(agent, args, *limits.tolist(), minibatch)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-15)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-8, atol=1e-15)
    torch.testing.assert_close(log_ratio, -0.4 * others[0])


@pytest.mark.parametrize("end, bootstrap", [("truncated", 1), ("truncated", 0), ("terminated", 1)])
def test_core_05_values_follow_the_episode_and_a_last_one_is_kept(
    observe, monkeypatch, end, bootstrap
):
    seen, compute_gae = [], ppo.compute_gae

    def watched(*args):
        seen.append(args)
        return compute_gae(*args)

    monkeypatch.setattr(ppo, "compute_gae", watched)
    plain = {
        "norm_obs": False,
        "reward_scaling": "none",
        "bootstrap_on_truncation": bool(bootstrap),
    }
    settings = options(7, 7, end=end) | {"env_id": "Toy-v0", "num_minibatches": 1} | plain
    agent = observe(**settings).calls[0].agent
    with torch.no_grad():
        value = agent.value(torch.tensor([[0.0], [1.0], [2.0], [3.0]])).tolist()
    reward, values, next_values, terminated, ended, *discounts = (np.squeeze(x) for x in seen[0])
    assert reward.tolist() == [1] * 7 and discounts == [0.99, 0.95]
    assert values.tolist() == pytest.approx([value[k] for k in (0, 1, 2, 0, 1, 2, 0)])
    assert next_values.tolist() == pytest.approx([value[k] for k in (1, 2, 3, 1, 2, 3, 1)])
    ends = [False, False, True, False, False, True, False]
    assert ended.tolist() == ends
    assert terminated.tolist() == (ends if end == "terminated" or not bootstrap else [False] * 7)


@pytest.mark.parametrize("target_kl, calls, steps", [(1e-9, 2, 1), (None, 4, 4), (1e9, 4, 4)])
def test_aux_03_the_smallest_target_kl_allows_exactly_one_step(observe, target_kl, calls, steps):
    run = observe(**options(32), target_kl=target_kl)
    assert len(run.calls) == calls
    state = torch.load(run.directory / "checkpoint.pt", weights_only=True)["parts"]
    assert state["optimizer"]["state"][0]["step"] == steps
    before, after = (dict(call.agent.named_parameters()) for call in run.calls[:2])
    assert all(not torch.equal(x, after[name]) for name, x in before.items() if "weight" in name)
    *_, value, advantage, target = run.calls[0].minibatch
    torch.testing.assert_close(target, advantage + value)


def test_aux_03_a_kl_as_large_as_the_target_goes_on(observe, monkeypatch):
    monkeypatch.setattr(ppo, "approximate_kl", lambda x: (x.mean(), torch.tensor(0.5)))
    assert len(observe(**options(32), target_kl=0.5).calls) == 4


def test_continuous_06_statistics_are_those_of_what_was_seen_and_episodes_are_logged(observe):
    settings = options(7, 7) | {"env_id": "Toy-v0", "num_minibatches": 1, "num_envs": 2}
    run = observe(**settings | {"total_timesteps": 14}).directory
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    statistics = state["parts"]["obs_statistics"]
    assert float(statistics["count"]) == pytest.approx(2 * 8, abs=1e-3)
    seen = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    assert float(statistics["mean"][0]) == pytest.approx(seen.mean(), abs=1e-3)
    assert state["counters"]["global_step"] == 14
    rows = (run / "episodes.csv").read_text().splitlines()[1:]
    found = [tuple(float(x) for i, x in enumerate(row.split(",")) if i != 1) for row in rows]
    assert found == [(6, 3, 3), (6, 3, 3), (12, 3, 3), (12, 3, 3)]


# ---- Masks ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_aux_04_masked_choices_have_no_probability_no_gradient_and_a_finite_entropy(dtype):
    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(50, 12, generator=draw)).to(dtype).requires_grad_()
    mask = torch.rand(50, 3, 4, generator=draw) < 0.5
    mask[..., 0] |= ~mask.any(-1)
    mask[0] = torch.tensor([True, False, False, False])  # nothing left to choose
    masked = ppo.masked_logits(logits, mask)
    assert masked.dtype == dtype and masked.shape == mask.shape
    assert (masked.softmax(-1)[~mask] == 0).all()
    assert torch.equal(masked[mask], logits.view(mask.shape)[mask])
    entropy = ppo.multidiscrete_entropy(masked)
    log_prob = ppo.multidiscrete_log_prob(masked, mask.int().argmax(-1))
    assert entropy.isfinite().all() and log_prob.isfinite().all()
    assert entropy[0] == log_prob[0] == 0
    (gradient,) = torch.autograd.grad((entropy + log_prob).sum(), logits)
    gradient = gradient.view(mask.shape)
    assert gradient.isfinite().all() and (gradient[~mask] == 0).all()
    assert (gradient[1:][mask[1:].sum(-1) > 1].abs().sum(-1) > 0).all()
    for b, component in ((5, 0), (6, 1), (7, 2)):  # as if only the others were there
        left = masked[b, component][mask[b, component]].softmax(-1)
        torch.testing.assert_close(masked.softmax(-1)[b, component][mask[b, component]], left)


def test_aux_04_a_masked_choice_is_never_drawn_however_likely():
    logits = np.array([[9.0, 0.0, 1e30], [0.0, 1.0, 2.0]])
    mask = np.array([[False, True, False], [True, True, False]])
    noise = np.array([[np.inf, -50.0, 0.0], [5.0, 0.0, np.inf]])
    assert ppo.choose(logits, noise, mask).tolist() == [1, 0]


def test_aux_04_rollout_and_update_use_the_mask_of_the_observation(observe):
    seen = observe(**options(masks=MASKS), mask_actions=True, norm_obs=False)
    sent = [(obs, *action) for obs, action in toy_envs.Choices.sent]
    assert set(sent) <= {(-1, a, b) for a in (0, 1) for b in (0, 1)} | {(1, 2, 1)}
    assert len(set(sent)) == 5
    for call in seen.calls:
        obs, action, mask, *_ = call.minibatch
        for x, m in zip((obs[:, 0] > 0).tolist(), mask):
            flat = [*m[0].tolist(), *m[1, :2].tolist()]
            assert flat == [bool(y) for y in MASKS["1" if x else "-1"]] and not m[1, 2]
        assert mask.gather(-1, action[..., None]).all()
    # Before the first step the ratio is 1, and where one choice is left its probability is.
    assert seen.calls[0].log_ratio.abs().max() < 1e-6
    obs, _, _, log_prob, *_ = seen.calls[0].minibatch
    assert (log_prob[obs[:, 0] > 0] == 0).all()


@pytest.mark.parametrize("nvec", [[3, 2], 4])
def test_aux_04_a_mask_is_ignored_unless_asked_for(observe, nvec):
    masks = {"-1": [1, 0, 0, 1, 0], "1": [1, 0, 0, 1, 0]}
    first = observe(**options(nvec=nvec, masks=masks))
    assert len({str(action) for _, action in toy_envs.Choices.sent}) == np.prod(nvec)
    other = observe(**options(nvec=nvec))
    for one, two in zip(first.calls, other.calls):
        assert torch.equal(one.gradient, two.gradient)


def test_aux_04_a_state_without_any_choice_is_an_error_that_names_it(fails):
    status, line = fails("--mask-actions", **options(masks=DEAD_END))
    assert status == 1 and "all of component 1 is masked in the state [1.]" in line, line
    assert "global step" in line and "Traceback" not in line


@pytest.mark.parametrize(
    "masks, words", [(None, "has none"), ({"-1": [1, 1], "1": [1, 1]}, "has one of 2")]
)
def test_aux_04_a_missing_or_misfitting_mask_is_one_line(fails, masks, words):
    status, line = fails("--mask-actions", **options(masks=masks))
    assert status == 1 and words in line and "wants a flat action_mask of 5 numbers" in line, line


def test_aux_04_a_mask_may_be_a_tuple_and_holds_nothing_but_0_and_1():
    env = new_environment(env_id="Choices-v0", mask_actions=True)
    env.reset(1)
    env.info = {"action_mask": (np.int8([1, 0, 1]), np.int8([0, 1]))}
    assert env.mask().tolist() == [[True, False, True], [False, True, False]]
    env.info = {"action_mask": (np.int8([0, 1]), np.int8([1, 0, 1]))}
    with pytest.raises(ppo.RunFailed, match=r"components of \[2, 3\] numbers, not of \[3, 2\]"):
        env.mask()
    for wrong in np.nan, -1, 2:
        env.info = {"action_mask": np.array([1, wrong, 1, 0, 1])}
        with pytest.raises(ppo.RunFailed, match="isn't all 0 and 1"):
            env.mask()


def test_aux_04_taxi_gives_its_masks():
    env = new_environment(env_id="Taxi-v4", mask_actions=True)
    assert env.mask().shape == (1, 6) and np.array_equal(env.mask()[0], env.info["action_mask"])
    assert not env.mask().all()
    for _ in range(20):
        env.step(env.mask().argmax(-1))
        assert np.array_equal(env.mask()[0], env.info["action_mask"])


# ---- Spaces ----


def test_bins_are_evenly_spaced_from_low_to_high():
    space = gym.spaces.Box(np.float32([[-1, 0]]), np.float32([[1, 5]]))
    choices, valid = ppo.action_choices(space, 5)
    np.testing.assert_array_equal(choices, [[-1, -0.5, 0, 0.5, 1], [0, 1.25, 2.5, 3.75, 5]])
    assert valid.all() and valid.shape == (2, 5)
    env = new_environment(env_id="Toy-v0", env_kwargs='{"low": [-1, 0], "high": [1, 5]}')
    toy_envs.Toy.sent.clear()
    for k in range(3):
        env.step(np.array([k * 5, 10 - k]))
    np.testing.assert_allclose(toy_envs.Toy.sent, [[-1, 5], [0, 4.5], [1, 4]])
    assert all(x.dtype == np.float32 and x in env.env.action_space for x in toy_envs.Toy.sent)


@pytest.mark.parametrize("nvec, start, sizes", [(3, 5, [3]), ([3, 2], 7, [3, 2]), (4, -2, [4])])
def test_discrete_actions_begin_at_the_start_of_their_space(observe, nvec, start, sizes):
    observe(**options(nvec=nvec, start=start))
    sent = np.array([action for _, action in toy_envs.Choices.sent]).reshape(-1, len(sizes))
    for component, size in zip(sent.T, sizes):
        assert set(component) == set(range(start, start + size))


def test_components_of_a_matrix_keep_their_places():
    space = gym.spaces.MultiDiscrete([[2, 3], [4, 2]])
    choices, valid = ppo.action_choices(space, 11)
    assert choices.shape == (4, 4) and valid.sum(-1).tolist() == [2, 3, 4, 2]
    env = new_environment(env_id="CartPole-v1")
    env.take_actions(space, ppo.Args())
    assert env.sent(np.array([1, 2, 3, 0])).tolist() == [[1, 2], [3, 0]]
    assert space.contains(env.sent(np.array([1, 2, 3, 0])))


def test_discrete_observations_become_one_hot():
    env = new_environment(env_id="Taxi-v4")
    obs = env.observe(env.obs)
    assert obs.sum() == 1 and obs.shape == (500,) and obs.argmax() == env.obs


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"env_id": "Bounds-v0"}, ["Box", "bounded Box of floats"]),  # one number has no bounds
        ({"bins": 1}, ["--bins is 1", "[2, 1024]"]),
        ({"bins": 5000}, ["--bins is 5000", "[2, 1024]"]),
    ],
)
def test_what_cannot_be_cut_into_bins_is_one_line(fails, settings, words):
    status, line = fails(**options() | settings)
    assert status == 2 and all(word in line for word in words), line


# ---- evaluate.py ----


def test_evaluate_plays_with_masks(observe, capsys):
    run = observe(**options(masks=MASKS), mask_actions=True).directory
    policy = evaluate.load_policy(str(run))
    env = policy.make_env()
    env.reset(seed=1)
    toy_envs.Choices.sent.clear()
    obs, info = env.reset()
    for _ in range(40):
        action = policy(obs, stochastic=True, info=info)
        obs, _, _, _, info = env.step(action)
    assert {(x, *a) for x, a in toy_envs.Choices.sent} == {
        *((-1, a, b) for a in (0, 1) for b in (0, 1)),
        (1, 2, 1),
    }
    with pytest.raises(policy.script.RunFailed, match="action_mask"):
        policy(obs)
    toy_envs.Choices.sent.clear()
    assert evaluate.main([str(run), "--episodes", "30", "--stochastic"]) == 0
    assert "over 30 episodes" in capsys.readouterr().out
    assert {a[0] for x, a in toy_envs.Choices.sent if x == 1} == {2}


@pytest.mark.parametrize("env_id, nvec", [("Choices-v0", 3), ("Toy-v0", None)])
def test_evaluate_sends_what_training_would(observe, env_id, nvec):
    kwargs = {"nvec": nvec, "start": 5} if nvec else {}
    run = observe(**options(**kwargs) | {"env_id": env_id}).directory
    policy = evaluate.load_policy(str(run))
    env = policy.make_env()
    obs, _ = env.reset(seed=1)
    likeliest = policy(obs)
    assert all(np.array_equal(policy(obs), likeliest) for _ in range(3))
    drawn = [policy(obs, stochastic=True) for _ in range(60)]
    assert all(x in env.action_space for x in drawn)
    assert len({str(x) for x in drawn}) == (nvec or 11)
