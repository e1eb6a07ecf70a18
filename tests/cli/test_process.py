"""The command in its own process: Ctrl-C during imports, closed pipes, encodings, the platform."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jlora.cli.demo import DEMO

SORT = str(DEMO / "adapters" / "sort")
# Both entry points. The first line undoes an inherited SIG_IGN, as background jobs have it.
DELIVER = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'jlora'; "
MODULE = DELIVER + "import runpy; runpy.run_module('jlora', run_name='__main__', alter_sys=True)"
SCRIPT = DELIVER + "from jlora.cli import main; sys.exit(main())"


def start(code: str, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def with_path(folder) -> dict[str, str]:
    """Return an environment whose imports look into `folder` first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_ctrl_c_while_jax_is_imported(tmp_path):
    """A stand-in for jax swallows exceptions, as callbacks of the real one do."""
    (tmp_path / "jax.py").write_text(
        "import time\n"
        f"open({str(tmp_path / 'importing')!r}, 'w').close()\n"
        "for _ in range(600):\n"
        "    try:\n"
        "        time.sleep(0.1)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    process = start(MODULE, "demo", env=with_path(tmp_path))
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


def test_closed_pipe_and_full_disk():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        runs = [
            subprocess.Popen([sys.executable, "-c", SCRIPT, "inspect", SORT], stdout=out, stderr=subprocess.PIPE)
            for out in (pipe, full)
        ]
        errors = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [141, 1]
    assert errors[0] == b""
    (line,) = errors[1].decode().splitlines()
    assert line.startswith("jlora: error: ")
    assert "No space left on device" in line


def test_invalid_utf8_and_ascii_output_are_escaped(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9 \xc3\xa9")
    os.symlink(SORT, folder)
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"}
    process = start(SCRIPT, folder, env=ascii_only)
    process.communicate(timeout=60)
    assert process.returncode == 2  # an unknown command
    process = start(SCRIPT, "inspect", folder, env=ascii_only)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.splitlines()[0] == rb"adapter      caf\udce9 \xe9"


@pytest.mark.slow
def test_names_and_prompts_are_utf8_under_a_c_locale(tmp_path):
    """Python takes arguments for ASCII there. Paths are the bytes of the argument, and names and texts UTF-8."""
    folder = os.path.join(os.fsencode(tmp_path), "é".encode())
    os.symlink(SORT, folder)
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = ("--model", "no/such/model", "--adapter", b"\xc3\xa9=" + folder, "--prompt", b"\xc3\xbc:planet=")
    _, err = start(SCRIPT, "generate", *flags, env=env).communicate(timeout=60)
    assert rb"--prompt names the adapter '\xfc', and no --adapter \xfc=PATH is given" in err
    flags = (*flags[:-1], b"\xc3\xa9:\xc3\xa9=")
    _, err = start(SCRIPT, "generate", *flags, env=env).communicate(timeout=60)
    assert err.splitlines()[0].startswith(rb"reading adapter \xe9 ...")
    assert err.splitlines()[1].startswith(b"jlora: error: model no/such/model does not exist")
    names = ("--served-model-name", b"\xc3\xa9", "--lora-modules", b"\xc3\xa9=x", "--max-loras", "2")
    _, err = start(SCRIPT, "serve", "no/such/model", *names, env=env).communicate(timeout=60)
    assert rb"--lora-modules: '\xe9' is given twice, or is a name of the base model" in err


def test_sizes_that_contradict_are_refused_before_jax_is_imported(tmp_path):
    (tmp_path / "jax.py").write_text("import os\nprint('jax', flush=True)\nos._exit(0)\n")
    process = start(SCRIPT, "serve", "x", "--max-loras", "8", "--max-cpu-loras", "4", env=with_path(tmp_path))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"jlora: error: --max-cpu-loras 4 is less than --max-loras 8: ")


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, [], "cpu"),
        ({"JAX_PLATFORMS": "tpu"}, [], "tpu"),
        ({"JAX_PLATFORM_NAME": "gpu"}, [], None),
        ({}, ["nvidia0"], None),
    ],
)
def test_platform_without_an_accelerator_is_the_cpu(tmp_path, environment, devices, expected):
    """A stand-in for jax prints the platform, and device files are looked up in a folder of the test."""
    for name in devices:
        (tmp_path / name).touch()
    (tmp_path / "jax.py").write_text("import os\nprint(os.environ.get('JAX_PLATFORMS'), flush=True)\nos._exit(0)\n")
    redirect = (
        f"import glob; find = glob.glob; glob.glob = lambda path: find(path.replace('/dev', {str(tmp_path)!r}))\n"
    )
    env = {k: v for k, v in with_path(tmp_path).items() if k not in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")}
    out, err = start(redirect + SCRIPT, "demo", env=env | environment).communicate(timeout=60)
    assert (out.decode().strip(), err) == (str(expected), b"")
