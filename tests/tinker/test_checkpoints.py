"""Checkpoints on disk: whole or not at all, names, limits, a restart. Needs no SDK."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def written(disk: Checkpoints, run: str, kind: str, name: str, adapter: jlora.Adapter, state=None, **options):
    return disk.write(disk.begin(run, kind, name, adapter, state, **options), adapter, state)


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
    made = written(disk, RUN, "weights", "step-1", adapter(), STATE, ttl=1000, metadata={"step": "1"})
    written(disk, RUN, SNAPSHOT, "seq-3", adapter())
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
    made = written(disk, RUN, "weights", "kept", adapter(), STATE)
    cut = written(disk, RUN, "weights", "cut", adapter(), STATE)
    (disk.folder(cut) / "checkpoint.json").unlink()
    folder = disk.folder(cut)
    again = restarted(disk, tmp_path)
    assert again.of() == [made]
    assert not folder.exists()
    assert written(again, RUN, "weights", "cut", adapter(), STATE)
    again.close()


def test_a_write_that_fails_leaves_nothing(disk, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SafetensorError, match="object"):  # the adapter is written by then
        written(disk, RUN, "weights", "bad", adapter(), {"factors": {"a": np.array([object()])}})
    assert sorted(tmp_path.rglob("*")) == before
    assert disk.of() == []


@pytest.mark.parametrize("kind", ["weights", SNAPSHOT])
def test_a_run_without_a_folder_takes_no_checkpoint(disk, tmp_path, kind):
    folder = tmp_path / "checkpoints" / RUN.replace(":", "-")
    away = folder.rename(tmp_path / "away")
    folder.touch()
    for _ in range(2):  # the name is free again
        with pytest.raises(NotADirectoryError, match=r"\.part"):
            written(disk, RUN, kind, "a", adapter())
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {folder.name, "server.lock"}
    folder.unlink()
    away.rename(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "x" * 129, "a b", "ä", "a\n", "-x"])
def test_names_are_checked(disk, name):
    with pytest.raises(LoRAUsageError, match="a checkpoint's name"):
        written(disk, RUN, "weights", name, adapter(), STATE)


WRONG_PATHS = (
    "", "x", "tinker://", "tinker://a/weights", "tinker://../weights/x/y", f"tinker://{RUN}/other/x",
    f"tinker://{RUN}/snapshot/seq-1", f"file://{RUN}/weights/a", f"tinker://{RUN}/weights/a/../a",
)  # fmt: skip


@pytest.mark.parametrize("path", WRONG_PATHS)
def test_paths_are_checked(disk, path):
    written(disk, RUN, SNAPSHOT, "seq-1", adapter())
    with pytest.raises(LoRAUsageError, match="expected tinker://RUN/KIND/NAME"):
        disk.at(path)


def test_a_name_is_used_once_and_its_folder_never_again(disk):
    first = written(disk, RUN, "weights", "a", adapter(1), STATE)
    with pytest.raises(LoRAUsageError, match="exists; expected a new name"):
        written(disk, RUN, "weights", "a", adapter(2), STATE)
    assert disk.of() == [first]
    disk.delete(first)
    second = written(disk, RUN, "weights", "a", adapter(2), STATE)
    assert disk.of() == [second]
    assert second.token != first.token  # an engine that has the first one loads the second


def test_a_deleted_checkpoint_is_gone(disk):
    made = written(disk, RUN, "sampler_weights", "a", adapter())
    disk.delete(made)
    assert disk.of() == []
    assert not disk.folder(made).exists()
    with pytest.raises(LoRAUsageError, match="does not exist"):
        disk.get(RUN, "sampler_weights", "a")


def test_the_disk_is_bounded(tmp_path):
    most = 2**16 + 3000
    small = Checkpoints(tmp_path / "small", most)
    small.add_run(Record(RUN, LORA))
    made = [written(small, RUN, "sampler_weights", f"s{i}", adapter()) for i in range(5)]
    with pytest.raises(LoRAUsageError, match="max-checkpoint-bytes"):
        written(small, RUN, "sampler_weights", "s5", adapter())
    files = [file for file in (tmp_path / "small").rglob("*") if file.is_file()]
    assert 3000 < sum(file.stat().st_size for file in files) < most
    small.delete(made[0])
    assert written(small, RUN, "sampler_weights", "again", adapter())
    small.close()


def test_expired_checkpoints_are_not_found(disk):
    made = written(disk, RUN, "weights", "a", adapter(), STATE, ttl=0.01)
    time.sleep(0.02)
    assert disk.expired() == [made]
    with pytest.raises(LoRAUsageError, match="does not exist"):
        disk.get(RUN, "weights", "a")


def test_a_run_ends_with_its_snapshots_and_its_record_if_it_has_no_checkpoint(disk, tmp_path):
    other = RUN[:-1] + "1"
    disk.add_run(Record(other, LORA))
    written(disk, RUN, "weights", "a", adapter(), STATE)
    snapshots = [written(disk, run, SNAPSHOT, "seq-1", adapter()) for run in (RUN, other)]
    assert disk.end_run(RUN) + disk.end_run(other) == snapshots
    assert [run.id for run in disk.runs()] == [RUN]
    assert not any(disk.folder(each).exists() for each in snapshots)


def test_a_sampler_checkpoint_has_no_state(disk):
    with pytest.raises(LoRAUsageError, match="no state to train from"):
        disk.state(written(disk, RUN, "sampler_weights", "a", adapter()))


def test_a_folder_has_one_server(disk, tmp_path):
    with pytest.raises(LoRAError, match="another server"):
        Checkpoints(tmp_path / "checkpoints", 1)


def test_a_record_that_was_changed_is_refused(disk, tmp_path):
    made = written(disk, RUN, "weights", "a", adapter(), STATE)
    file = disk.folder(made) / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"token": "../../x"}))
    with pytest.raises(LoRAError, match="remove or mend"):
        restarted(disk, tmp_path)


@dataclass
class During:
    """An adapter; `call` is called while it is written."""

    call: Callable[[], object]
    nbytes: int = 1000

    def save_pretrained(self, folder: Path) -> None:
        adapter().save_pretrained(folder)
        self.call()


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", SNAPSHOT])
def test_a_checkpoint_has_its_name_and_bytes_before_it_is_written(tmp_path, kind):
    small = Checkpoints(tmp_path / "small", 2**16 + 3000)
    small.add_run(Record(RUN, LORA))
    begun = small.begin(RUN, kind, "a", adapter())
    with pytest.raises(LoRAUsageError, match="exists; expected a new name"):
        small.begin(RUN, kind, "a", adapter())
    with pytest.raises(LoRAUsageError, match="max-checkpoint-bytes"):
        small.begin(RUN, kind, "b", During(print, nbytes=3000))
    assert small.of() == []
    if kind == SNAPSHOT:  # it is sampled from meanwhile
        assert small.get(RUN, kind, "a") == begun
    else:
        with pytest.raises(LoRAUsageError, match="does not exist"):
            small.get(RUN, kind, "a")
    made = small.write(begun, adapter())
    assert small.get(RUN, kind, "a") == made
    assert made.size < begun.size
    small.delete(begun)
    assert not small.folder(made).exists()
    small.close()


@pytest.mark.parametrize("how", ["deleted", "run ended"])
def test_a_snapshot_that_ends_while_it_is_written_leaves_nothing(disk, tmp_path, how):
    begun = disk.begin(RUN, SNAPSHOT, "seq-1", adapter())
    ends = (lambda: disk.delete(begun)) if how == "deleted" else (lambda: disk.end_run(RUN))
    with pytest.raises(LoRAUsageError, match="was deleted while it was written"):
        disk.write(begun, During(ends))
    left = {path.name for path in (tmp_path / "checkpoints").rglob("*")}
    assert left == {"server.lock"} | ({"run.json", RUN.replace(":", "-")} if how == "deleted" else set())
    with pytest.raises(LoRAUsageError, match="does not exist"):
        disk.get(RUN, SNAPSHOT, "seq-1")


def test_a_run_that_ends_while_its_checkpoint_is_written_keeps_it(disk, tmp_path):
    disk.write(begun := disk.begin(RUN, "weights", "a", adapter()), During(lambda: disk.end_run(RUN)))
    again = restarted(disk, tmp_path)
    assert [each.token for each in again.of(RUN)] == [begun.token]
    again.close()


def test_a_restart_removes_the_folder_of_a_write_that_was_cut_short(disk, tmp_path):
    part = tmp_path / "checkpoints" / "weights-0123456789abcdef.part"
    adapter().save_pretrained(part)
    restarted(disk, tmp_path).close()
    assert not part.exists()
