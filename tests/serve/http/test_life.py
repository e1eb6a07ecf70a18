"""Warm-up, drain and end of a server process, by signals."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.serve.client import until

ROOT = Path(__file__).parents[3]
WAIT = {"model": "base", "prompt": "wait"}


class Server:
    """A running `life_process`."""

    def __init__(self, how, drain="20", *more):
        command = [sys.executable, "-m", "tests.serve.life_process", how, drain, *more]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
        )
        self.url = self.process.stdout.readline().strip()

    def health(self):
        try:
            answer = httpx.get(f"{self.url}/health", timeout=10)
        except httpx.ConnectError:
            return None
        return answer.status_code, answer.json()["status"] if answer.content else "serving"

    def post(self, **body):
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def end(self):
        """Wait for the end. Returns stdout, stderr and the exit status."""
        out, err = self.process.communicate(timeout=30)
        return out, err, self.process.returncode


@pytest.fixture
def start():
    started = []

    def begin(*args):
        started.append(Server(*args))
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()
        server.process.communicate()


def waiting_request(server):
    """Start a request that waits. Returns the list that gets its response or error, and the thread of the client."""
    answers = []

    def ask():
        try:
            answers.append(server.post(**WAIT))
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: 'vllm:num_requests_running{model_name="base"} 1\n' in httpx.get(f"{server.url}/metrics").text)
    return answers, thread


@pytest.mark.slow
def test_sigterm_drains(start):
    server = start("ready", "20", "answers")
    until(lambda: server.health() == (200, "serving"))
    assert server.process.stdout.readline() == "ready\n"
    answers, thread = waiting_request(server)
    # One more open connection, as a router keeps it.
    with httpx.Client(base_url=server.url, timeout=10) as client:
        assert client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.health() == (503, "closing"))
        assert client.post("/v1/completions", json={"model": "base", "prompt": "x"}).status_code == 503
        late = server.post(model="base", prompt="x")
    assert (late.status_code, late.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    out, err, status = server.end()
    thread.join()
    assert answers[0].json()["choices"][0]["text"] == "late"
    assert (out, status) == ("", 0)
    assert '"drained": true' in err
    assert "Traceback" not in err
    _, err, status = start("fails").end()
    assert (status, "no room for the cache" in err) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_requests_are_cut_off_by_a_second_signal_and_by_the_drain_timeout(start, again):
    server = start("ready", "20" if again else "0.5")
    until(lambda: server.health() == (200, "serving"))
    answers, thread = waiting_request(server)
    server.process.send_signal(signal.SIGTERM)
    if again:
        until(lambda: server.health() == (503, "closing"))
        server.process.send_signal(signal.SIGINT)
    _, err, status = server.end()
    thread.join()
    assert status == (128 + signal.SIGINT if again else 1)
    assert ("ended at once, at SIGINT" if again else '"drained": false') in err
    assert isinstance(answers[0], httpx.TransportError) if again else answers[0].status_code == 503


@pytest.mark.slow
def test_warm_up_reports_progress_and_refuses_requests(start):
    server = start("slow")
    until(lambda: server.health() == (503, "warming"))
    answer = httpx.get(f"{server.url}/health").json()
    assert (answer["done"], answer["total"]) == (1, 2)
    assert server.post(**WAIT).status_code == 503
    server.process.send_signal(signal.SIGTERM)
    out, _, status = server.end()
    assert (out, status) == ("", 0)
