"""The catalogue's entries where trpo_continuous.py has them otherwise than ppo_continuous.py.

What it shares with that script (functions, Rollout, Advantages) is the same to the letter, which
test_twins.py holds, and is guarded by test_catalogue_continuous.py.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trpo_continuous as trpo


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """A function that trains on Toy, on tiny settings, and watches.

    -> rates of Adam, by step; calls: minibatch, gradient and losses, by minibatch;
       steps: arguments of trpo_step, and reports, by update; parts: of the run, at its end
    """

    def run(**settings):
        seen = SimpleNamespace(rates=[], calls=[], steps=[], reports=[])
        names = "value_gradient", "trpo_step"
        original = {name: getattr(trpo, name) for name in names}
        end_update = trpo.Run.end_update

        class Adam(torch.optim.Adam):
            def step(self, *args):
                seen.rates.append(self.param_groups[0]["lr"])
                seen.eps = self.param_groups[0]["eps"]
                return super().step(*args)

        def value_gradient(agent, parameters, args, clip_value_coef, minibatch):
            result = original["value_gradient"](agent, parameters, args, clip_value_coef, minibatch)
            seen.calls.append(SimpleNamespace(minibatch=minibatch, gradient=result[0]))
            seen.calls[-1].losses = result[1]
            return result

        def trpo_step(*args):
            seen.steps.append(args)
            return original["trpo_step"](*args)

        def watched(self, report):
            seen.reports.append(dict(report))
            seen.parts = self.parts
            return end_update(self, report)

        tiny = {"env_id": "Toy-v0", "num_steps": 6, "num_minibatches": 2, "update_epochs": 2}
        settings = {"total_timesteps": 6, "runs_dir": str(tmp_path)} | tiny | settings
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim, "Adam", Adam)
            patch.setattr(trpo, "value_gradient", value_gradient)
            patch.setattr(trpo, "trpo_step", trpo_step)
            patch.setattr(trpo.Run, "end_update", watched)
            trpo.train(trpo.Args(**settings))
        return seen

    return run


def value_gradient(settings=None, target=3.0):
    """The script's value gradient on a minibatch whose old values are far from the new ones."""
    torch.manual_seed(1)
    args = trpo.Args(**{"max_grad_norm": math.inf} | (settings or {}))
    agent = trpo.Agent(5, 2, args)
    obs = torch.randn(64, 5)
    old_value = agent.value(obs).detach() + torch.linspace(-1, 1, 64)
    minibatch = obs, old_value, torch.full((64,), target)
    limit, parameters = torch.tensor(args.clip_value_coef), list(agent.value.parameters())
    gradient, losses = trpo.value_gradient(agent, parameters, args, limit, minibatch)
    return gradient, losses, agent.value(obs).detach(), minibatch


def test_core_02_layers_are_orthogonal_with_their_gains_and_log_std_is_0():
    agent = trpo.Agent(11, 3, trpo.Args())
    for network, outputs, last in (agent.policy, 3, 0.01), (agent.value, 1, 1.0):
        layers = [x for x in network if isinstance(x, torch.nn.Linear)]
        assert [x.out_features for x in layers] == [64, 64, outputs]
        for layer, gain in zip(layers, (2**0.5, 2**0.5, last)):
            weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
            identity = torch.eye(len(weight))
            torch.testing.assert_close(weight @ weight.T / gain**2, identity, atol=1e-5, rtol=0)
            assert not layer.bias.any()
    assert not agent.log_std.any() and agent.value(torch.ones(5, 11)).shape == (5,)


def test_core_03_adam_has_the_epsilon_and_moves_the_value_network_alone(observe):
    assert observe().eps == 1e-5 and observe(adam_eps=1e-8).eps == 1e-8
    seen = observe()
    (group,) = seen.parts["optimizer"].param_groups
    sizes = [x.numel() for x in seen.parts["agent"].value.parameters()]
    assert [x.numel() for x in group["params"]] == [sum(sizes)]


def test_core_04_value_learning_rate_is_annealed(observe):
    settings = {"total_timesteps": 24, "value_learning_rate": 0.1}
    rates = observe(**settings).rates[::4]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert observe(**settings, anneal_lr=False).rates == [0.1] * 16


def test_core_05_values_of_the_rollout_make_advantages_and_targets(observe):
    """The policy steps along the advantages of the values before the value network moved."""
    seen = observe(norm_adv=False, value_learning_rate=1.0)
    advantage = seen.steps[0][3][3]
    values, targets = (torch.cat([x.minibatch[i] for x in seen.calls[:2]]) for i in (1, 2))
    expected = (targets - values).sort().values
    torch.testing.assert_close(advantage.sort().values, expected)


def test_core_06_every_epoch_of_the_value_network_visits_each_step_once(observe):
    seen = observe(num_minibatches=3, update_epochs=4)
    epochs = [torch.cat([x.minibatch[2] for x in seen.calls[i : i + 3]]) for i in (0, 3, 6, 9)]
    assert len(seen.calls) == 12
    assert all(torch.equal(x.sort().values, epochs[0].sort().values) for x in epochs)
    assert len({tuple(x.tolist()) for x in epochs}) > 1


def test_core_07_advantages_are_normalized_over_the_batch(observe, monkeypatch):
    raw, normalized = (observe(norm_adv=x).steps[0][3][3] for x in (False, True))
    torch.testing.assert_close(normalized, (raw - raw.mean()) / (raw.std() + 1e-8))
    assert normalized.mean().abs() < 1e-6 < raw.mean().abs()
    tiny = 1e-8 * np.array([[-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]]).T  # their std is next to 1e-8
    monkeypatch.setattr(trpo, "compute_gae", lambda *args: tiny)
    normalized = observe().steps[0][3][3].numpy()
    np.testing.assert_allclose(normalized, tiny[:, 0] / (tiny.std(ddof=1) + 1e-8), rtol=1e-5)


def test_core_09_value_loss_is_clipped_around_the_values_of_the_rollout():
    off, on = (value_gradient({"clip_vloss": x}) for x in (False, True))
    _, losses, value, (_, old_value, target) = on
    clipped = old_value + (value - old_value).clip(-0.2, 0.2)
    square = (value - target) ** 2
    assert off[1][0] == pytest.approx(0.5 * square.mean().item())
    square = torch.maximum(square, (clipped - target) ** 2)
    assert losses[0] == pytest.approx(0.5 * square.mean().item())
    assert not torch.equal(on[0], off[0])
    wide = value_gradient({"clip_value_coef": math.inf})[0]
    assert torch.equal(wide, off[0])


def test_core_11_one_norm_over_the_gradients_of_the_value_network(observe):
    free, losses, *_ = value_gradient(target=50.0)
    clipped, same, *_ = value_gradient({"max_grad_norm": 0.5}, target=50.0)
    assert losses[1] == same[1] == pytest.approx(free.norm().item()) and free.norm() > 1
    torch.testing.assert_close(clipped, free * 0.5 / free.norm())
    seen = observe(max_grad_norm=0.01)
    assert all(x.gradient.norm() <= 0.01001 for x in seen.calls)
    (vector,) = seen.parts["optimizer"].param_groups[0]["params"]
    assert torch.equal(vector.grad, seen.calls[-1].gradient)


def test_core_12_debug_variables_are_means_over_all_minibatches(observe):
    seen = observe(value_learning_rate=0.03, num_steps=12, num_minibatches=3, total_timesteps=24)
    calls, report = seen.calls[6:], seen.reports[1]
    losses = torch.stack([x.losses for x in calls])
    assert (losses.std(0) > 1e-6).all()  # else the last would do as well as the mean
    assert report["losses/value_loss"] == pytest.approx(losses[:, 0].mean().item(), rel=1e-4)
    assert report["losses/grad_norm"] == pytest.approx(losses[:, 1].mean().item(), rel=1e-4)
    value, target = (torch.cat([x.minibatch[i] for x in calls[:3]]) for i in (1, 2))
    explained = 1 - (target - value).var() / target.var()
    assert report["losses/explained_variance"] == pytest.approx(explained.item(), rel=1e-3)
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    assert seen.reports[0]["losses/entropy"] == pytest.approx(entropy)  # std 1 before the step
    numbers = [x for x in report.values() if not math.isnan(x)]
    assert np.isfinite(numbers).all()


def test_core_13_networks_share_nothing(observe):
    agent = observe().parts["agent"]
    policy, value = ({id(x) for x in net.parameters()} for net in (agent.policy, agent.value))
    assert len(policy) == len(value) == 6 and not policy & value
