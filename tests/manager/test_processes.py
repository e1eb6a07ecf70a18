"""Two processes with one model: what each scenario of `tests.manager.process` found, in both."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mesh

WORKER = Path(__file__).with_name("process.py")
# Read, not imported: the module sets how many devices its process has.
SCENARIOS = re.findall(r"^@scenario\ndef (\w+)", WORKER.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.manager.process", str(i), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=400)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(found, name):
    for process, outcomes in enumerate(found):
        assert outcomes[name] == "", f"process {process}: {outcomes[name]}"
