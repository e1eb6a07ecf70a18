"""Serve a checkpoint split over all devices of one host, with adapters split in the same way.

    python examples/serve_tp.py [--devices N]

Without accelerators, on eight virtual devices of a CPU:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/serve_tp.py

`LoRAManager` derives the sharding of slots from the sharding of each base kernel. Your own model needs no mesh
argument. Move its parameters onto a mesh before you make the manager. All other calls are the same as on one device.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import AxisType

import jlora
from jlora.models import from_pretrained, generate

DEMO = Path(jlora.__file__).parent / "demo"
BATCHES = ["sort", None, "reverse", "sort"], ["swap", "shift", None, "swap"]  # two slots: the second swaps both
EOS = 2


def make_mesh(devices: list[jax.Device], heads: int) -> jax.sharding.Mesh:
    """Return a mesh with the largest "tensor" axis that divides the attention heads, and the rest on "data"."""
    tensor = math.gcd(len(devices), heads)
    sizes = {"data": len(devices) // tensor, "tensor": tensor}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2, devices=devices)


def bytes_held(state: nnx.State) -> Counter[jax.Device]:
    """Return device -> bytes of its shards of the arrays."""
    held: Counter[jax.Device] = Counter()
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve adapters on all devices of one host.")
    parser.add_argument("--devices", type=int, help="how many to use; all unless given")
    devices = jax.devices()[: parser.parse_args().devices]
    mesh = make_mesh(devices, json.loads((DEMO / "model" / "config.json").read_text())["num_attention_heads"])
    print(f"mesh: {dict(mesh.shape)}")

    model = from_pretrained(DEMO / "model", mesh=mesh)  # each shard is read directly to its device
    config = jlora.LoRAConfig(
        max_loras=2,
        max_lora_rank=32,
        max_cpu_loras=4,
        data_axes=["data"],  # mesh axes that the sequences of a batch are split over
    )
    manager = jlora.LoRAManager(model, config)
    for folder in sorted((DEMO / "adapters").iterdir()):
        manager.add_adapter(jlora.LoRARequest(folder.name, path=str(folder)))

    base, slots = bytes_held(nnx.state(model, nnx.Param)), bytes_held(manager.slots)
    for device in devices:
        print(f"{device}: {base[device]:,} bytes of the base model, {slots[device]:,} of slots")

    prompt = [1, *(ord(letter) - 93 for letter in "planet"), 3]  # 1 begins a prompt, 3 is "="
    for names in BATCHES:
        with manager.prepare(names) as batch:  # loads the adapters into slots, each shard to its own device
            answers = generate(model, [prompt] * len(names), batch=batch, max_new_tokens=10, stop_tokens=[EOS])
        for name, answer in zip(names, answers, strict=True):
            word = "".join(chr(93 + token) for token in answer if token != EOS)
            print(f"{name or '(base)':8s} planet={word}")
    print(f"{manager.stats().slot_loads} adapters brought into {config.max_loras} slots")


if __name__ == "__main__":
    main()
