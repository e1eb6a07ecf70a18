"""The pooling of an adapter in a repository of the hub."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")

from tests.serve.conftest import ADAPTERS
from tests.serve.embedding import write_modules
from tests.serve.fake_hub import FakeHub

READ = """
import sys
from jlora import LoRAError, LoRARequest
from jlora.models import Pooling
from jlora.serve.engine.poolings import read_own_pooling
for name in ("own", "plain", "max"):
    try:
        print(read_own_pooling(LoRARequest(name, f"team/{name}"), Pooling(mode="mean", normalize=True)).mode)
    except LoRAError as error:
        print(error)
"""


def test_a_repository_brings_its_own_pooling(tmp_path):
    repos = {}
    for name, mode in (("own", "cls"), ("plain", None), ("max", "max")):
        repos[name] = tmp_path / name
        repos[name].mkdir()
        for file in ADAPTERS["sort"].iterdir():
            (repos[name] / file.name).symlink_to(file)
        if mode is not None:
            write_modules(repos[name], mode)
    hub = FakeHub(repos)
    try:
        settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.url}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        done = subprocess.run(
            [sys.executable, "-c", READ], env=inherited | settings, capture_output=True, text=True, timeout=120
        )
    finally:
        hub.close()
    own, plain, refused = done.stdout.splitlines()
    assert (own, plain) == ("cls", "mean")
    assert refused.startswith("adapter 'max': ")
    assert "got 'max'" in refused
