"""Two processes with one model: the result of each scenario of `tests.manager.process`, in both."""

import json
import re
from pathlib import Path

import pytest

from tests.two_processes import run_two

# The first test of a worker runs all of its scenarios, beside those of another worker.
pytestmark = [pytest.mark.mesh, pytest.mark.timeout(500)]

WORKER = Path(__file__).with_name("process.py")
# Read, not imported: the module sets how many devices its process has.
SCENARIOS = re.findall(r"^@scenario\ndef (\w+)", WORKER.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Scenario -> traceback or "", of each process. Only the scenarios that are selected are run."""
    folder = tmp_path_factory.mktemp("processes")
    names = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    run_two("tests.manager.process", lambda _: (folder, *names), timeout=400)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(found, name):
    for process, outcomes in enumerate(found):
        assert outcomes[name] == "", f"process {process}: {outcomes[name]}"
