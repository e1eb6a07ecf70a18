"""Limits that follow from the size of memory."""

import pytest

from jlora import _memory


@pytest.mark.parametrize(("machine", "pinned", "staging"), [(64, 4096, 256), (8, 1024, 256), (2, 256, 64)])
def test_limits_follow_from_memory(monkeypatch, machine, pinned, staging):
    monkeypatch.setattr(_memory, "machine_bytes", lambda: machine * 2**30)
    monkeypatch.setattr(_memory, "device_bytes", lambda device: machine * 2**30)
    assert (_memory.page_locked_bytes(), _memory.staging_bytes()) == (pinned * 2**20, staging * 2**20)
    monkeypatch.setattr(_memory, "device_bytes", lambda device: None)
    assert _memory.staging_bytes() == 256 * 2**20
