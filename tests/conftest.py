"""Imports the scripts from the repository root, or from $PPO_SCRIPTS_DIR (test_taken_out.py)."""

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, os.environ.get("PPO_SCRIPTS_DIR", str(ROOT)))

import toy_envs

torch.set_num_threads(1)
toy_envs.register()


@pytest.fixture
def observe(monkeypatch, tmp_path):
    """A function that trains ppo_continuous on Toy, on tiny settings, and watches it.

    -> gae: arguments and result of compute_gae, by update
       calls: agent's weights before it, limits, minibatch, losses and log ratio, by minibatch
       reports: what each update reports; rates: of the parameter groups, by update
       updates: what RunningMeanStd.update got; parts: of the run, at its end; directory: its own
    """
    import ppo_continuous as ppo

    def run(**settings):
        seen = SimpleNamespace(gae=[], calls=[], reports=[], rates=[], updates=[])

        def compute_gae(*args):
            result = original["compute_gae"](*args)
            seen.gae.append((*args, result))
            return result

        def policy_and_value_gradients(agent, parameters, args, limits, old_log_std, minibatch):
            call = SimpleNamespace(limits=[x.item() for x in limits], minibatch=minibatch)
            call.weights, call.old_log_std = copy.deepcopy(agent.state_dict()), old_log_std
            results = original["policy_and_value_gradients"](
                agent, parameters, args, limits, old_log_std, minibatch
            )
            call.gradient, call.losses, call.log_ratio = results
            seen.calls.append(call)
            return results

        def end_update(self, report):
            seen.reports.append(dict(report))
            seen.parts = self.parts
            groups = self.parts["optimizer"].param_groups
            seen.rates.append([group["lr"] for group in groups])
            return original["end_update"](self, report)

        def update(self, x):
            seen.updates.append(x.copy())
            return original["update"](self, x)

        watchers = [(ppo, compute_gae), (ppo, policy_and_value_gradients)]
        watchers += [(ppo.Run, end_update), (ppo.RunningMeanStd, update)]
        original = {new.__name__: getattr(owner, new.__name__) for owner, new in watchers}
        tiny = {"env_id": "Toy-v0", "num_steps": 6, "num_minibatches": 2, "update_epochs": 2}
        settings = tiny | {"runs_dir": str(tmp_path)} | settings
        steps = settings["num_steps"] * settings.get("num_envs", 1)
        with monkeypatch.context() as patch:
            for owner, new in watchers:
                patch.setattr(owner, new.__name__, new)
            args = ppo.Args(**{"total_timesteps": steps} | settings)
            seen.args, seen.directory = args, ppo.train(args)
        return seen

    return run
