"""A server over the fake engine in its own process, for tests of signals.

Usage: python -m tests.serve.life_process HOW DRAIN_SECONDS [answers]
"""

import sys
import threading
import time
from pathlib import Path

from jlora.cli.serve import log_to_stderr
from jlora.errors import LoRAError
from jlora.serve.engine.request import EngineStats
from jlora.serve.http.server import address, listen, serve
from tests.serve.client import make_service
from tests.serve.fake_engine import LETTERS, FakeEngine, ended


class Engine(FakeEngine):
    """HOW is "ready", "slow" or "fails", for the warm-up. With a third argument, `close` answers waiting requests."""

    def start(self, progress=None):
        progress(1, 2)
        if sys.argv[1] == "slow":
            time.sleep(60)
        if sys.argv[1] == "fails":
            raise LoRAError("no room for the cache")

    def stats(self):
        return EngineStats(running=sum(not ended(one) for one in self.generations))

    def submit(self, prompt, params, *, lora=None, timeout=None):
        self.hold = "".join(LETTERS[token] for token in prompt) == "wait"
        return super().submit(prompt, params, lora=lora, timeout=timeout)

    def close(self, timeout=None):
        if len(sys.argv) > 3:  # requests under way end during the drain
            threading.Timer(1, self.go).start()
        return super().close(timeout)

    def go(self):
        for generation in self.generations:
            for event in self.answer("late", generation.params):
                generation.put(event)


log_to_stderr()
bound = listen("127.0.0.1", 0)
print(address(bound), flush=True)
service = make_service(Engine(), state="warming", root=Path(__file__).parent)
sys.exit(serve(service, bound, drain_seconds=float(sys.argv[2]), ready=lambda: print("ready", flush=True)))
