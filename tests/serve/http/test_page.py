"""The status page in a browser: its script runs under its policy, and names are shown as text.

The environment variable CHROMIUM names the program; its default is Debian's `chromium`.
"""

import html
import os
import re
import subprocess

import pytest

from jlora.config import LoRARequest
from tests.serve.client import make_service, on_socket
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.test_operators import HOSTILE, STATS

NAMES = ["<img src=x onerror=document.title='owned'>", *HOSTILE[:2]]

pytestmark = pytest.mark.browser


def shown(url, folder):
    """Return the document after five seconds of the browser's clock, and the lines of its console."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000")
    command = [os.environ.get("CHROMIUM", "chromium"), *flags, f"--user-data-dir={folder}", "--dump-dom", url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


def cells(document, part):
    (body,) = re.findall(rf'id="{part}"[^>]*>(.*?)</(?:tbody|ul|dl|h1|h2|p)>', document, re.DOTALL)
    return [html.unescape(text) for text in re.findall(r"<(?:td|li|dt|dd)[^>]*>(.*?)</", body, re.DOTALL)] or [
        html.unescape(body)
    ]


def test_page_shows_the_status(tmp_path):
    engine = FakeEngine([])
    engine.loras = {name: LoRARequest(name, "x") for name in ["sort", *NAMES]}
    engine.told = STATS
    engine.pinned = {"sort"}
    service = make_service(engine, names=("<b>base</b>",))
    with on_socket(service) as (host, port):
        document, console = shown(f"http://{host}:{port}/", tmp_path)
    assert console == []
    assert cells(document, "model") == ["<b>base</b>"]
    assert cells(document, "state")[0].startswith("serving, up ")
    counts = cells(document, "counts")
    assert dict(zip(counts[::2], counts[1::2], strict=True)).items() >= {
        ("running", "3"), ("waiting", "2"), ("cache in use", "25.0%"), ("slot hits", "88.2%"), ("slot evictions", "2"),
    }  # fmt: skip
    assert cells(document, "slots") == ["sort", NAMES[0], "free", "free"]
    rows = cells(document, "adapters")
    assert rows[:6] == ["sort", "slot 0, pinned", "8", "5", "2", "0"]
    assert {rows[i] for i in range(0, len(rows), 6)} == {"sort", *NAMES}
    assert cells(document, "latency")[:3] == ["first token", "0.1", "\u2013"]


def test_page_shows_an_error_status(tmp_path):
    service = make_service()
    service.engine.stats = lambda: 1 / 0
    with on_socket(service) as (host, port):
        document, _ = shown(f"http://{host}:{port}/status", tmp_path)
    assert cells(document, "state") == ["no answer: status 500"]
