"""Checkpoints on disk: whole or not at all, names, limits, a restart. Needs no SDK."""

import json
import os
import time

import numpy as np
import pytest
from safetensors import SafetensorError

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from jlora.tinker.checkpoints import SNAPSHOT, Checkpoints, Record

RUN = "0123456789abcdef0123456789abcdef:train:0"
LORA = {"rank": 2, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": False}
STATE = {"factors": {"a.b": np.arange(6, dtype=np.float32).reshape(2, 3)}, "optimizer": {"count": np.float32(3)}}


def adapter(value: float = 1.0) -> jlora.Adapter:
    return jlora.Adapter.from_arrays(
        "x", {"q_proj": (np.full((2, 4), value, np.float32), np.ones((4, 2), np.float32))}, alpha=2
    )


@pytest.fixture
def disk(tmp_path):
    found = Checkpoints(tmp_path / "checkpoints", 10**6)
    found.add_run(Record(RUN, LORA, {"who": "me"}))
    yield found
    found.close()


def restarted(disk: Checkpoints, tmp_path) -> Checkpoints:
    disk.close()
    disk._held = os.open(tmp_path, os.O_RDONLY)  # the fixture closes it
    return Checkpoints(tmp_path / "checkpoints", 10**6)


def test_a_restarted_server_has_all_runs_and_checkpoints(disk, tmp_path):
    made = disk.write(RUN, "weights", "step-1", adapter(), STATE, ttl=1000, metadata={"step": "1"})
    disk.write(RUN, SNAPSHOT, "seq-3", adapter())
    again = restarted(disk, tmp_path)
    assert again.runs() == [Record(RUN, LORA, {"who": "me"}, again.runs()[0].created)]
    assert again.of(RUN) == [made]
    assert again.at(f"tinker://{RUN}/weights/step-1") == made
    state = again.state(made)
    np.testing.assert_array_equal(state["factors"]["a.b"], STATE["factors"]["a.b"])
    assert state["optimizer"]["count"].shape == ()
    read = jlora.Adapter.from_pretrained(again.folder(made))
    np.testing.assert_array_equal(read.modules["q_proj"].a, np.ones((2, 4), np.float32))
    assert len(list((tmp_path / "checkpoints").glob("*/snapshot*"))) == 0  # it ended with its session
    again.close()


def test_a_checkpoint_that_was_cut_short_is_none(disk, tmp_path):
    made = disk.write(RUN, "weights", "kept", adapter(), STATE)
    cut = disk.write(RUN, "weights", "cut", adapter(), STATE)
    (disk.folder(cut) / "checkpoint.json").unlink()
    folder = disk.folder(cut)
    again = restarted(disk, tmp_path)
    assert again.of() == [made]
    assert not folder.exists()
    assert again.write(RUN, "weights", "cut", adapter(), STATE)
    again.close()


def test_a_write_that_fails_leaves_nothing(disk, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SafetensorError, match="object"):  # the adapter is written by then
        disk.write(RUN, "weights", "bad", adapter(), {"factors": {"a": np.array([object()])}})
    assert sorted(tmp_path.rglob("*")) == before
    assert disk.of() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "x" * 129, "a b", "ä", "a\n", "-x"])
def test_names_are_checked(disk, name):
    with pytest.raises(LoRAUsageError, match="a checkpoint's name"):
        disk.write(RUN, "weights", name, adapter(), STATE)


WRONG_PATHS = (
    "", "x", "tinker://", "tinker://a/weights", "tinker://../weights/x/y", f"tinker://{RUN}/other/x",
    f"tinker://{RUN}/snapshot/seq-1", f"file://{RUN}/weights/a", f"tinker://{RUN}/weights/a/../a",
)  # fmt: skip


@pytest.mark.parametrize("path", WRONG_PATHS)
def test_paths_are_checked(disk, path):
    disk.write(RUN, SNAPSHOT, "seq-1", adapter())
    with pytest.raises(LoRAUsageError, match="expected tinker://RUN/KIND/NAME"):
        disk.at(path)


def test_a_name_is_used_once_and_its_folder_never_again(disk):
    first = disk.write(RUN, "weights", "a", adapter(1), STATE)
    with pytest.raises(LoRAUsageError, match="exists; expected a new name"):
        disk.write(RUN, "weights", "a", adapter(2), STATE)
    assert disk.of() == [first]
    disk.delete(first)
    second = disk.write(RUN, "weights", "a", adapter(2), STATE)
    assert disk.of() == [second]
    assert second.token != first.token  # an engine that has the first one loads the second


def test_a_deleted_checkpoint_is_gone(disk):
    made = disk.write(RUN, "sampler_weights", "a", adapter())
    disk.delete(made)
    assert disk.of() == []
    assert not disk.folder(made).exists()
    with pytest.raises(LoRAUsageError, match="does not exist"):
        disk.get(RUN, "sampler_weights", "a")


def test_the_disk_is_bounded(tmp_path):
    most = 2**16 + 3000
    small = Checkpoints(tmp_path / "small", most)
    small.add_run(Record(RUN, LORA))
    made = [small.write(RUN, "sampler_weights", f"s{i}", adapter()) for i in range(5)]
    with pytest.raises(LoRAUsageError, match="max-checkpoint-bytes"):
        small.write(RUN, "sampler_weights", "s5", adapter())
    files = [file for file in (tmp_path / "small").rglob("*") if file.is_file()]
    assert 3000 < sum(file.stat().st_size for file in files) < most
    small.delete(made[0])
    assert small.write(RUN, "sampler_weights", "again", adapter())
    small.close()


def test_expired_checkpoints_are_not_found(disk):
    made = disk.write(RUN, "weights", "a", adapter(), STATE, ttl=0.01)
    time.sleep(0.02)
    assert disk.expired() == [made]
    with pytest.raises(LoRAUsageError, match="does not exist"):
        disk.get(RUN, "weights", "a")


def test_a_run_ends_with_its_snapshots_and_its_record_if_it_has_no_checkpoint(disk, tmp_path):
    other = RUN[:-1] + "1"
    disk.add_run(Record(other, LORA))
    disk.write(RUN, "weights", "a", adapter(), STATE)
    snapshots = [disk.write(run, SNAPSHOT, "seq-1", adapter()) for run in (RUN, other)]
    assert disk.end_run(RUN) + disk.end_run(other) == snapshots
    assert [run.id for run in disk.runs()] == [RUN]
    assert not any(disk.folder(each).exists() for each in snapshots)


def test_a_sampler_checkpoint_has_no_state(disk):
    with pytest.raises(LoRAUsageError, match="no state to train from"):
        disk.state(disk.write(RUN, "sampler_weights", "a", adapter()))


def test_a_folder_has_one_server(disk, tmp_path):
    with pytest.raises(LoRAError, match="another server"):
        Checkpoints(tmp_path / "checkpoints", 1)


def test_a_record_that_was_changed_is_refused(disk, tmp_path):
    made = disk.write(RUN, "weights", "a", adapter(), STATE)
    file = disk.folder(made) / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"token": "../../x"}))
    with pytest.raises(LoRAError, match="remove or mend"):
        restarted(disk, tmp_path)
