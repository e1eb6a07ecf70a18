"""Foundations of the load benchmarks: their adapters, their client, and the comparison of answers."""

import asyncio
import json

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("starlette")

import jlora
from benchmarks import serve_zipf
from benchmarks.stream_client import Answer, Connection
from benchmarks.tenants import DEMO, FUNCTIONS, write_tenants


def test_tenants_differ_in_bytes_and_compute_the_same(tmp_path):
    tenants = write_tenants(tmp_path, 5)
    files = [tenant.folder / "adapter_model.safetensors" for tenant in tenants]
    shipped = [DEMO / "adapters" / function / "adapter_model.safetensors" for function in FUNCTIONS]
    assert len({file.read_bytes() for file in [*files, *shipped]}) == len(files) + len(shipped)
    assert [tenant.function for tenant in tenants] == [*FUNCTIONS, FUNCTIONS[0]]
    for tenant in tenants[1:]:
        own, equal = (
            jlora.Adapter.from_pretrained(str(at)) for at in (DEMO / "adapters" / tenant.function, tenant.folder)
        )
        assert own.modules.keys() == equal.modules.keys()
        for name, module in own.modules.items():
            products = [
                np.asarray(m.b, np.float32) @ np.asarray(m.a, np.float32) for m in (module, equal.modules[name])
            ]
            np.testing.assert_array_equal(*products)
    before = [file.stat().st_mtime_ns for file in files]
    write_tenants(tmp_path, 5)
    assert [file.stat().st_mtime_ns for file in files] == before  # existing files are kept


def test_shares_follow_zipfs_law():
    sums = serve_zipf.zipf_shares(2000, 1.0, np.random.default_rng(0))
    shares = np.sort(np.diff(sums, prepend=0.0))[::-1]
    assert sums[-1] == pytest.approx(1.0)
    assert shares[:64].sum() == pytest.approx(0.58, abs=0.01)
    assert shares[0] / shares[9] == pytest.approx(10.0)


@pytest.mark.parametrize("cut", [20, 37, 1000])
def test_client_reads_responses_in_any_pieces(cut):
    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    events = [{"choices": [{"text": text}]} for text in ("a", "0\r\n\r\n", "data: {}", "é")]
    sent = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events]
    sent = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(map(chunk, [*sent, b"data: [DONE]\n\n"])) + b"0\r\n\r\n"

    async def read() -> Answer:
        connection = Connection()
        connection.connection_made(type("Transport", (), {"write": lambda self, data: None})())
        asked = asyncio.ensure_future(connection.stream({}))
        await asyncio.sleep(0)
        for at in range(0, len(sent), cut):
            assert not asked.done()
            connection.data_received(sent[at : at + cut])
        return await asyncio.wait_for(asked, 5)

    answer = asyncio.run(read())
    assert answer.text == "a0\r\n\r\ndata: {}é"
    assert 0 <= answer.first <= answer.seconds


@pytest.mark.slow
def test_wrong_answers_are_counted(tmp_path, monkeypatch, capsys):
    """A small load, with a wrong expected answer for one of the four functions."""
    right = serve_zipf.right_answers
    sums = serve_zipf.zipf_shares(4, 1.0, np.random.default_rng(0))
    often = FUNCTIONS[int(np.argmax(np.diff(sums, prepend=0.0)))]  # the function of half of the requests

    def wrong_of_one(*args):
        return {key: (0,) if key[0] == often else answer for key, answer in right(*args).items()}

    monkeypatch.setattr(serve_zipf, "right_answers", wrong_of_one)
    small = (
        "--minutes 0.05 --slice 1.5 --warm 1 --ramp 0 --adapters 16 --against 4 --slots 4 --max-cpu-loras 6 --rows 4 "
        "--in-flight 8 --tokens 4 --prompts 1"
    )
    monkeypatch.setattr("sys.argv", ["serve_zipf", *small.split(), "--out", str(tmp_path / "load.json")])
    with pytest.raises(SystemExit) as ended:
        serve_zipf.main()
    assert ended.value.code == 1
    found = json.loads((tmp_path / "load.json").read_text())
    many, few = found["arms"]["many"], found["arms"]["few"]
    assert 0 < few["wrong"] < few["answers_compared"]
    assert all(f"({often})" in one for arm in (many, few) for one in arm["described"])
    assert found["wrong"] == many["wrong"] + few["wrong"]
    assert few["slot_loads_per_second"] == 0  # loaded before the measurement
    assert many["slot_hit_rate"] < 1
    assert many["host_loads_per_second"] > 0
    assert many["requests"] == pytest.approx(many["requests_per_second"] * many["seconds"], rel=0.02)
