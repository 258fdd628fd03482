"""Each script, copied into an empty folder, trains there."""

import ast
import shutil
import subprocess
import sys

import pytest
from test_twins import SCRIPTS

PACKAGES = {"cv2": "opencv-python-headless", "ale_py": "ale-py"}  # that bring these modules


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_copied_alone(script, tmp_path):
    shutil.copy(script, tmp_path)
    options = "--num-envs 4 --num-steps 32 --num-minibatches 4 --total-timesteps 256".split()
    command = [sys.executable, "-I", script.name, *options]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert b"mean return" in done.stdout or b"no episode has ended" in done.stdout
    assert b"evaluate.py" not in done.stdout  # which isn't there
    (run,) = (tmp_path / "runs").iterdir()
    assert len((run / "updates.csv").read_text().splitlines()) == 3
    assert (run / "checkpoint.pt").is_file()


def test_copied_under_another_name(tmp_path):
    script = next(x for x in SCRIPTS if x.stem == "ppo_continuous")
    shutil.copy(script, tmp_path / "my script (1).py")
    options = "--num-steps 32 --num-minibatches 4 --total-timesteps".split()
    command = [sys.executable, "-I", "my script (1).py"]
    subprocess.run([*command, *options, "64"], cwd=tmp_path, check=True)
    (run,) = (tmp_path / "runs").iterdir()
    resume = ["--resume", run, "--total-timesteps", "128"]
    subprocess.run([*command, *resume], cwd=tmp_path, check=True)
    assert len((run / "updates.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_imports_are_declared(script):
    text = script.read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {
        name.split(".")[0]
        for node in nodes
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    declared = text.split("# ///")[1]
    for name in imported - set(sys.stdlib_module_names):
        assert f'"{PACKAGES.get(name, name)}==' in declared, name
