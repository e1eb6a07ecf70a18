"""What only shows in a process of its own: Ctrl-C at the start, closed pipes, encodings, the platform."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jlora import cli
from jlora.cli.demo import DEMO

SORT = str(DEMO / "adapters" / "sort")
# Both entries; the first lines undo what a background job inherits, SIGINT ignored.
DELIVER = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'jlora'; "
MODULE = DELIVER + "import runpy; runpy.run_module('jlora', run_name='__main__', alter_sys=True)"
SCRIPT = DELIVER + "from jlora.cli import main; sys.exit(main())"


def start(code: str, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.mark.parametrize("code", [MODULE, SCRIPT], ids=["python -m jlora", "jlora"])
def test_ctrl_c_while_jax_is_imported(tmp_path, code):
    """A package called jax that swallows exceptions, as callbacks inside the real one do, stands in for it."""
    (tmp_path / "jax.py").write_text(
        "import time\n"
        f"open({str(tmp_path / 'importing')!r}, 'w').close()\n"
        "for _ in range(600):\n"
        "    try:\n"
        "        time.sleep(0.1)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = start(code, "demo", env=os.environ | {"PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "importing").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == b""
    assert err.split() == b"jlora: interrupted".split()


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, "inspect", SORT], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_is_an_error_of_one_line():
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, "inspect", SORT], stdout=full, stderr=subprocess.PIPE)
    err = process.communicate(timeout=60)[1].decode().splitlines()
    assert process.returncode == 1
    assert len(err) == 1
    assert err[0].startswith("jlora: error: ")
    assert "No space left on device" in err[0]


def test_bytes_that_are_no_text_and_output_that_is_no_utf8(tmp_path):
    """A folder's name of Latin letters that are no UTF-8, and a terminal that knows ASCII only."""
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9 \xc3\xa9")
    os.symlink(SORT, folder)
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"}
    process = start(SCRIPT, folder, env=ascii_only)
    process.communicate(timeout=60)
    assert process.returncode == 2  # the folder is no command
    process = start(SCRIPT, "inspect", folder, env=ascii_only)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.splitlines()[0] == rb"adapter      caf\udce9 \xe9"


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, [], "cpu"),
        ({"JAX_PLATFORMS": ""}, [], "cpu"),
        ({"JAX_PLATFORMS": "tpu"}, [], "tpu"),
        ({"JAX_PLATFORM_NAME": "gpu"}, [], None),
        ({}, ["nvidia0"], None),
        ({}, ["accel3"], None),
    ],
)
def test_a_machine_without_accelerator_starts_on_the_cpu(tmp_path, monkeypatch, environment, devices, expected):
    for name in devices:
        (tmp_path / name).touch()
    patterns = tuple(pattern.replace("/dev", str(tmp_path)) for pattern in cli._ACCELERATORS)
    monkeypatch.setattr(cli, "_ACCELERATORS", patterns)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cli._choose_platform()
    assert os.environ.get("JAX_PLATFORMS") == expected
