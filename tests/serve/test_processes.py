"""Two processes that serve one model: what process 0 of `tests.serve.process` found, and how both were left."""

import json
import re
from pathlib import Path

import pytest

from tests.two_processes import run_two

pytestmark = pytest.mark.mesh

WORKER = Path(__file__).with_name("process.py")
# Read, not imported: the module sets how many devices its process has.
SCENARIOS = re.findall(r"^@scenario\ndef (\w+)", WORKER.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_two("tests.serve.process", lambda _: (folder,), timeout=400)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(found, name):
    assert found[0]["scenarios"][name] == ""


def test_both_are_left_alike_and_hold_nothing(found):
    first, second = (one["left"] for one in found)
    assert first == second
    assert first["leases"] == 0
    assert first["threads"] == []
