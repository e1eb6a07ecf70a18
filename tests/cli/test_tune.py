"""`jlora tune`: a model's shapes from its configuration alone, the table, the progress, and the errors."""

import json
import shutil

import jax.numpy as jnp
import pytest
from flax import nnx

import jlora
from jlora.cli.commands import run
from jlora.cli.demo import DEMO
from jlora.cli.tune import line
from jlora.layers.tuning import tune
from jlora.layers.wrap.apply import survey
from jlora.models import Decoder, read_config
from jlora.pallas.tables import own_table, read_table
from tests.cli.test_commands import error_of
from tests.pallas.conftest import cache, default_device  # noqa: F401
from tests.pallas.test_search import Costs

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def config_only(tmp_path):
    """Return a folder with the configuration of a mixture in bfloat16 and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    fields = json.loads((DEMO / "moe" / "model" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    return folder


def measured(folder, tokens, rank=16, slots=8):
    """Fill the table of the default device as the command would, by costs in place of times."""
    config = read_config(folder / "config.json")
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    modules = survey(model, jlora.LoRAConfig(max_loras=slots, max_lora_rank=rank)).modules
    return tune(modules, tokens=tokens, experts_per_token=config.moe.experts_per_token, measure=Costs())


def test_the_table_of_a_model_is_printed(default_device, config_only, capsys):  # noqa: F811
    """All of its entries are there, so nothing is measured: the shapes of the command are those of the library."""
    default_device("NVIDIA H200")
    path = measured(config_only, [8, 64])
    table = read_table(path)
    assert {key.op for key in table} == {"add_lora", "add_lora_experts", "linear_lora"}
    assert run(["tune", str(config_only), "--tokens", "8", "64"]) == 0
    out, err = capsys.readouterr()
    assert out == f"tuned {config_only}: {path}\n"
    assert err == f"tuning {config_only} ... a line for each shape\n"
    assert path == own_table("nvidia_h200")
    assert read_table(path) == table


def test_flags_choose_rank_and_folder(default_device, config_only, tmp_path, monkeypatch, capsys):  # noqa: F811
    default_device("NVIDIA L4")
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.setenv("JLORA_TUNED_DIR", str(given))
    measured(config_only, [16], rank=4, slots=2)
    flags = ["--tokens", "16", "--max-lora-rank", "4", "--max-loras", "2", "--dtype", "bfloat16"]
    assert run(["tune", str(config_only), *flags]) == 0
    assert str(given / "nvidia_l4.json") in capsys.readouterr().out
    assert {key.rank for key in read_table(given / "nvidia_l4.json")} == {4}


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ([], 1, "computations run on 'cpu' with XLA's path, which has no tiles; tiles are tuned on an NVIDIA GPU"),
        (["--tokens", "0"], 2, "expected a whole number from 1"),
        (["--seconds", "0"], 2, "expected seconds, a number above 0"),
        (["--target-modules", "nowhere"], 1, "nowhere"),
        (["--port", "1"], 2, "unrecognized arguments"),
    ],
)
def test_errors_take_one_line(capsys, config_only, flags, status, words):
    code, message = error_of(capsys, ["tune", str(config_only), *flags])
    assert code == status
    assert words in message


def test_a_folder_without_configuration_is_an_error(capsys, config_only):
    shutil.move(config_only / "config.json", config_only / "other.json")
    assert "config.json does not exist" in error_of(capsys, ["tune", str(config_only)])[1]


def test_lines_of_progress_show_shape_and_times():
    step = jlora.TuneProgress(3, 56, "linear_lora", 64, 4096, 6144, 16, 21.26, 24.0, together=True)
    assert line(step) == "  3 of 56: linear_lora 64 rows, 4096 -> 6144, rank 16: 21.3 us with the product, 24.0 before"
    apart = jlora.TuneProgress(4, 56, "add_lora", 64, 4096, 6144, 16, 7.0, 8.04, together=False)
    assert line(apart) == "  4 of 56: add_lora 64 rows, 4096 -> 6144, rank 16: 7.0 us, 8.0 before"
