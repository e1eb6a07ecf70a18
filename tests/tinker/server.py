"""`jlora tinker` on the demo model in its own process."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "jlora" / "demo" / "model"
FLAGS = ["--train-capacity", "2", "--max-lora-rank", "8", "--max-num-seqs", "4"]


class Server:
    """A running server. `log` has the lines of its stderr."""

    def __init__(
        self,
        checkpoints: Path,
        *more: str,
        port: int = 0,
        model: str = str(MODEL),
        cwd: Path = ROOT,
        shapes: Sequence[str] = ("8x16", "2x64"),
    ):
        flags = ["--checkpoints", str(checkpoints), "--port", str(port), "--train-shapes", *shapes, *FLAGS, *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jlora", "tinker", model, *flags],
            cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.log: list[str] = []
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self.reader.start()
        found = re.fullmatch(r"jlora trains (.*) at (http://127\.0\.0\.1:(\d+))\n", self.process.stdout.readline())
        assert found, self.log
        self.base, self.url, self.port = found[1], found[2], int(found[3])

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self.end(signal.SIGKILL)

    def end(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return self.process.returncode
