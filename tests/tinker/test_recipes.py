"""Two recipes of tinker_cookbook, unedited and offline, against a server of a tiny byte decoder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinker_cookbook")

from tests.tinker.server import ROOT, Server

pytestmark = pytest.mark.slow

NAME = "meta-llama/Llama-3.2-1B"  # the recipes choose the renderer by the name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder that has the model and the data of the recipes. The answer to each question is 3."""
    found = tmp_path_factory.mktemp("recipes")
    (found / NAME).parent.mkdir()
    subprocess.run([sys.executable, "-m", "tests.tinker.boxed", str(found / NAME)], cwd=ROOT, check=True)
    for name, rows in {
        "openai/gsm8k": [{"question": f"How many is {i % 3} and {3 - i % 3}?", "answer": "#### 3"} for i in range(128)],
        "HuggingFaceH4/no_robots": [
            {
                "messages": [
                    {"role": "user", "content": f"How many are {i}?"},
                    {"role": "assistant", "content": "\\boxed{3}"},
                ]
            }
            for i in range(200)
        ],
    }.items():
        (found / name).mkdir(parents=True)
        (found / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "data_files:\n  - split: train\n    path: train.jsonl"
    (found / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  {files}\n---\n")
    return found


def run(server: Server, folder: Path, recipe: str, **options: object) -> list[dict[str, float]]:
    log = folder / recipe
    given = {"base_url": server.url, "model_name": NAME, "log_path": log, "lora_rank": 8, "save_every": 5, **options}
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "TINKER_API_KEY": "tml-x"}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{k}={v}" for k, v in given.items())]
    subprocess.run(command, cwd=folder, env=env | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_recipes_learn(folder):
    more = ["--max-loras", "2", "--max-model-len", "1024"]
    server = Server(folder / "runs", *more, model=NAME, cwd=folder, shapes=["32x128", "8x512"])
    supervised = run(server, folder, "sl_loop", batch_size=16, learning_rate=3e-3, max_length=512, max_steps=10)
    losses = [step["train_mean_nll"] for step in supervised if "train_mean_nll" in step]
    assert losses[-1] < 0.6 * losses[0]
    options = {"batch_size": 8, "group_size": 8, "learning_rate": 5e-3, "max_tokens": 24, "max_steps": 16}
    rewards = [
        step["reward/total"]
        for step in run(server, folder, "rl_loop", loss_fn="importance_sampling", **options)
        if "reward/total" in step
    ]
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.5
    assert server.end() == 0
