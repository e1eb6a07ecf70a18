"""`jlora serve` on the demo model in its own process, as `make serve` starts it."""

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "jlora" / "demo" / "adapters"
NAMES = ("reverse", "shift", "sort", "swap")
RIGHT = {"demo": "planet", "reverse": "tenalp", "shift": "qmbofu", "sort": "aelnpt", "swap": "lpnate"}  # of "planet="


def recipe(*more: str, port: int = 0) -> list[str]:
    """Return the arguments of `make serve`, followed by `more`."""
    printed = subprocess.run(
        ["make", "-n", "serve", f"SERVE=--port {port} --max-num-seqs 16 --max-loras 3 --max-cpu-loras 4"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.replace("\\\n", " ")  # fmt: skip
    (line,) = [line for line in printed.splitlines() if line.startswith(".venv/bin/jlora serve")]
    return [*line.split()[1:], *more]


class DemoServer:
    """A running server. `log` has the lines of its stderr."""

    def __init__(self, arguments: list[str], **environment: str):
        command = [sys.executable, "-m", "jlora", *arguments]
        env = {**os.environ, **environment}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        first = self.process.stdout.readline()
        found = re.fullmatch(r"jlora serves demo at (http://127\.0\.0\.1:(\d+))\n", first)
        if found is None:
            self.stop()
        assert found, (first, self.log)
        self.url, self.port = found[1], int(found[2])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def ask(self, name: str, **more) -> httpx.Response:
        body = {"model": name, "prompt": "planet=", "temperature": 0, "max_tokens": 10, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def text(self, name: str) -> str:
        answer = self.ask(name)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=120)

    def status(self) -> dict:
        return httpx.get(f"{self.url}/status.json", timeout=60).json()

    @property
    def children(self) -> list[str]:
        """The ids of the child processes."""
        found: list[str] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
                found += (task / "children").read_text().split()
        return found
