"""An engine without a model, with the methods of `jlora.serve.Engine`, and a manager for it."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from jlora.adapters import Adapter
from jlora.config import LoRARequest
from jlora.errors import AdapterFormatError, AdapterNotFoundError, LoRAUsageError
from jlora.manager.report import AdapterInfo, Stats
from jlora.serve.engine.options import EngineOptions
from jlora.serve.engine.request import (
    AdapterExistsError,
    EngineBusyError,
    EngineClosedError,
    EngineStats,
    Piece,
    RegisteredLoRA,
    SamplingParams,
    TokenLogprob,
)

LETTERS = ["<s>", "</s>", "?", *"abcdefghijklmnopqrstuvwxyz =:|\n"]


def letters() -> Tokenizer:
    """Return a tokenizer with one token a letter (<s> 0, </s> 1, unknown 2, a 3, ...) that prepends <s>."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@dataclass
class FakeGeneration:
    prompt: object
    params: object
    lora: str | None
    timeout: float | None
    events: list = field(default_factory=list)
    callback: object = None
    cancelled: bool = False
    prompt_tokens: int = 0
    handle: object = None
    cached_tokens: int = 0

    def listen(self, callback):
        self.callback = callback
        for event in self.events:
            callback(event)

    def put(self, event):
        """Deliver the next event on the calling thread."""
        self.events.append(event)
        if self.callback is not None:
            self.callback(event)

    def cancel(self):
        self.cancelled = True


class FakeEngine:
    """Answers each request with `NAME|PROMPT` at once, one piece a letter.

    Attributes:
      script: events that replace every answer; None for no replacement.
      refuse: exception that `submit` raises; None for none.
      hold: True to give no answers. The test puts events into `generations`.
      broken: end of a path ("memory" of an upload) -> exception that loading it raises.
      failing: "remove", "pin", "unpin" or "pause" -> exception that it raises.
      uploaded: adapters that were loaded from memory.
      gate: event that loads wait for.
      cached: tokens of each prompt that were copied.
      encoded: pairs of (text, with special tokens) that were tokenized.
    """

    def __init__(self, names=("sort", "reverse"), tokenizer=None):
        self.tokenizer = tokenizer or letters()
        self.loras = {name: LoRARequest(name, f"/adapters/{name}") for name in names}
        self.shown = {}
        self.generations = []
        self.script = self.refuse = None
        self.hold = False
        self.broken, self.failing = {}, {}
        self.uploaded = []
        self.gate = threading.Event()
        self.gate.set()
        self.pinned = set()
        self.cached = 0
        self.ready = True
        self.embeds = False
        self.paused = False
        self.asked = []
        self.closed = False
        self.calls = Counter()
        self.encoded = []
        self.told = EngineStats()
        self.options = EngineOptions(max_num_seqs=4)

    def encode(self, text, *, special=True):
        """Tokenize without special tokens in both cases, since answers repeat the prompt."""
        self.encoded.append((text, special))
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def submit(self, prompt, params, *, lora=None, timeout=None):
        if self.closed:
            raise EngineClosedError("the engine is closed")
        if self.refuse is not None:
            raise self.refuse
        if lora is not None and lora not in self.loras:
            raise AdapterNotFoundError(f"adapter {lora!r} is not loaded")
        if any(token >= len(LETTERS) for token in prompt):
            raise LoRAUsageError("a token is outside of the vocabulary")
        text = "".join(LETTERS[token] for token in prompt)
        generation = FakeGeneration(prompt, params, lora, timeout, prompt_tokens=len(prompt), cached_tokens=self.cached)
        self.generations.append(generation)
        if not self.hold:
            for event in self.script or self.answer(f"{lora or 'base'}|{text}", params, prompt):
                generation.put(event)
        return generation

    def submit_all(self, prompts, params, *, lora=None, timeout=None):
        asked = zip(prompts, params, strict=True)
        return [self.submit(prompt, own, lora=lora, timeout=timeout) for prompt, own in asked]

    def embed(self, prompts, *, dimensions, lora, timeout):
        """Answer with (number of tokens, index, 0.1) of each prompt."""
        self.asked.append((prompts, dimensions, lora, timeout))
        generations = []
        for i, prompt in enumerate(prompts):
            self.script = [Piece("", (), finish_reason="stop", embedding=np.array([len(prompt), i, 0.1], np.float32))]
            generations.append(self.submit(prompt, SamplingParams(), lora=lora, timeout=timeout))
        return generations

    def sent(self):
        """Return the tokens of the last answer."""
        return [token for piece in self.generations[-1].events for token in piece.tokens]

    def answer(self, text, params, prompt=()):
        letters, report = text[: params.max_tokens], ()
        if params.prompt_logprobs is not None:
            report = (None, *(TokenLogprob(token, -0.5, offset=i, rank=1) for i, token in enumerate(prompt[1:], 1)))
        if not letters:
            yield Piece("", (), finish_reason="length", prompt_logprobs=report)
        for i, letter in enumerate(letters):
            token = LETTERS.index(letter) if letter in LETTERS else 2
            last = i == len(letters) - 1
            finish = None if not last else "stop" if letters == text else "length"
            logprobs = ()
            if params.logprobs is not None:
                top = tuple((3 + j, -1.5 * (j + 1)) for j in range(params.logprobs))
                logprobs = (TokenLogprob(token, -0.25, top, offset=i),)
            yield Piece(letter, (token,), logprobs, finish, prompt_logprobs=() if i else report)

    def add_lora(self, adapter, *, load_inplace=False, timeout=None, path=None, parent=None):
        self.calls["add"] += 1
        self.gate.wait(10)
        memory = isinstance(adapter, Adapter)
        request = LoRARequest(adapter.name, "memory") if memory else adapter
        request = replace(request, load_inplace=load_inplace or request.load_inplace)
        if request.name in self.loras and not request.load_inplace:
            raise AdapterExistsError(request.name)
        for end, error in self.broken.items():
            if request.path.endswith(end):
                raise error
        if memory:
            self.uploaded.append(adapter)
        self.loras[request.name] = request
        self.shown[request.name] = RegisteredLoRA(request.path if path is None else path, int(time.time()), parent)

    def remove_lora(self, name):
        self.known("remove", name)
        del self.loras[name]

    def pin_lora(self, name):
        self.known("pin", name)
        self.pinned.add(name)

    def unpin_lora(self, name):
        self.known("unpin", name)
        self.pinned.discard(name)

    def known(self, call, name):
        self.calls[call] += 1
        if call in self.failing:
            raise self.failing[call]
        if name not in self.loras:
            raise AdapterNotFoundError(name)

    def list_loras(self):
        now = int(time.time())
        return {name: self.shown.get(name) or RegisteredLoRA(one.path, now) for name, one in self.loras.items()}

    def resident(self):
        """Return the manager's list: the first two adapters in slots, the next two on the host."""
        same = {"version": 0, "leases": 0, "rank": 8, "modules": 2, "nbytes": 100, "base_model_name": None}
        found = {}
        for i, (name, request) in enumerate([*self.loras.items()][:4]):
            place = {"level": "slot", "slot": i} if i < 2 else {"level": "host", "slot": None}
            pinned = name in self.pinned
            found[name] = AdapterInfo(name=name, pinned=pinned, request=request, invocation_tokens=(), **place, **same)
        return found

    def stats(self):
        return self.told

    def pause(self, mode):
        self.calls[mode] += 1
        if mode not in ("abort", "wait", "keep"):
            raise LoRAUsageError(f"mode must be one of abort, wait, keep, got {mode!r}")
        if "pause" in self.failing:
            raise self.failing["pause"]
        self.paused = True

    def resume(self):
        self.calls["resume"] += 1
        self.paused = False

    def start(self, progress=None):
        if progress is not None:
            progress(1, 2)

    def close(self, timeout=None):
        self.closed = True
        until = time.monotonic() + (timeout or 0)
        while any(not ended(one) for one in self.generations) and time.monotonic() < until:
            time.sleep(0.01)
        late = [one for one in self.generations if not ended(one)]
        for generation in late:
            generation.put(EngineClosedError("the engine was closed"))
        return not late


def ended(generation):
    last = generation.events[-1] if generation.events else None
    return generation.cancelled or not (last is None or (isinstance(last, Piece) and last.finish_reason is None))


def fake_manager(engine):
    stats = Stats(host_loads=5, host_evictions=1, slot_loads=4, slot_evictions=2, slot_hits=30, compilations=1,
                  registered=2, active=2, leased=1, unevictable=0, slot_bytes=1000, host_bytes=2000, open_leases=3,
                  load_seconds=((0.5,), (4, 1), 3.5), swap_seconds=((0.001,), (4, 0), 0.002))  # fmt: skip
    config = SimpleNamespace(max_loras=4, max_lora_rank=16, max_cpu_loras=10, allow_nonfinite=False)
    return SimpleNamespace(
        stats=lambda: replace(stats, unevictable=len(engine.uploaded)), config=config, list_adapters=engine.resident
    )


BROKEN = AdapterFormatError("adapter 'broken': adapter_model.safetensors: is cut short")
BUSY = EngineBusyError("the queue is full", 2.4)
