"""The protocol's messages, as the SDK has them, to the types of the other modules and back."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import TypeAdapter, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from jlora.errors import LoRAUsageError
from jlora.serve import MAX_LOGPROBS, Piece, SamplingParams, TokenLogprob
from jlora.serve.http.errors import bad_request
from jlora.tinker.training import LOSSES, Computation, Example

PROTOBUF = "application/x-protobuf"
ForwardBackwardRequest = pb.ForwardBackwardRequest

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_POLICY = ("logprobs", "advantages")
_NOT_SAMPLED = ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n", "record_stability_info")
_THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def parse(kind: Any, body: bytes | bytearray) -> Any:
    """Return the message of a body: of protobuf, else of JSON, for a type of the SDK or dict. Raises ApiError (400)."""
    try:
        if kind is ForwardBackwardRequest:
            return ForwardBackwardRequest.FromString(bytes(body))
        return TypeAdapter(kind).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise bad_request(f"{kind.__name__}: {where}: {first['msg']}"[:500], where) from None
    except DecodeError as error:
        raise bad_request(f"the body is not a ForwardBackwardRequest: {error}"[:300]) from None


def computation(message: pb.ForwardBackwardRequest, *, longest: int, vocab: int, most: int) -> Computation:
    """Return the computation of a request: of at most `most` examples of `longest` tokens below `vocab`.

    Raises LoRAUsageError, which names the loss, the number or the example that is wrong.
    """
    loss = message.loss_fn
    if loss not in LOSSES:
        raise LoRAUsageError(f"loss_fn {loss!r:.80} is not implemented; expected one of {', '.join(LOSSES)}")
    numbers = dict(_THRESHOLDS)
    known = tuple(_THRESHOLDS) if loss in ("ppo", "cispo") else ()
    config: dict[str, float] = {
        key: value.number if value.HasField("number") else math.nan for key, value in message.loss_fn_config_v2.items()
    }
    for key, value in (config or dict(message.loss_fn_config)).items():
        if key not in known:
            raise LoRAUsageError(f"loss_fn_config {key!r:.80} is not a number of {loss}; it has {list(known)}")
        if not math.isfinite(value) or value < 0:
            raise LoRAUsageError(f"loss_fn_config {key} must be a finite number of at least 0, got {value}")
        numbers[key] = value
    if not 1 <= len(message.data) <= most:
        raise LoRAUsageError(f"data has {len(message.data)} examples; expected 1 to {most}")
    examples = [_example(f"data[{i}]", datum, loss, longest, vocab) for i, datum in enumerate(message.data)]
    low, high = (numbers[key] for key in _THRESHOLDS)
    return Computation(examples, loss, low, high, message.forward_only)


def _example(where: str, datum: pb.Datum, loss: str, longest: int, vocab: int) -> Example:
    tokens: list[np.ndarray] = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise LoRAUsageError(f"{where}: model_input has a chunk of {kind}; only tokens (encoded_text) are trained")
        tokens.append(_from_bytes(where, chunk.encoded_text.tokens, np.int32))
    own = np.concatenate([np.zeros(0, np.int32), *tokens]).astype(np.int32)
    if not 1 <= len(own) <= longest:
        raise LoRAUsageError(f"{where}: model_input has {len(own)} tokens; expected 1 to {longest} (--train-shapes)")
    expected = ("target_tokens", *(_POLICY if loss != "cross_entropy" else ("weights",)))
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if name not in expected:
            raise LoRAUsageError(f"{where}: {loss} has no input {name!r:.80}; expected {', '.join(expected)}")
        arrays[name] = _dense(f"{where}: {name}", tensor, len(own))
    if missing := [name for name in expected if name not in arrays and name != "weights"]:
        raise LoRAUsageError(f"{where}: {loss} needs the input {missing[0]!r}")
    targets, zeros = arrays["target_tokens"], np.zeros(len(own), np.float32)
    for name, ids in (("model_input", own), ("target_tokens", targets)):
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab:
            raise LoRAUsageError(
                f"{where}: {name} needs token ids from 0 to {vocab - 1}, got {ids.min()} to {ids.max()}"
            )
    floats = [arrays.get("weights", zeros + 1), *(arrays.get(name, zeros) for name in _POLICY)]
    return Example(own, targets.astype(np.int32), *(each.astype(np.float32) for each in floats))


def _dense(where: str, tensor: pb.Tensor, count: int) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr" or tensor.dtype not in _DTYPES or len(tensor.shape) > 1:
        shape = "sparse" if tensor.HasField("sparse_csr") else f"{pb.DType.Name(tensor.dtype)}{list(tensor.shape)}"
        raise LoRAUsageError(f"{where} is {shape[:80]}; expected dense int64 or float32 [{count}]")
    found = _from_bytes(where, tensor.dense, _DTYPES[tensor.dtype])
    if len(found) != count:
        raise LoRAUsageError(f"{where} has {len(found)} values; expected {count}, one for each token of model_input")
    if not np.isfinite(found).all():
        raise LoRAUsageError(f"{where} has a value that is not finite")
    return found


def _from_bytes(where: str, data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise LoRAUsageError(f"{where} has {len(data)} bytes, which are no {np.dtype(dtype)} values")
    return np.frombuffer(data, dtype)


def forward_backward_output(work: Computation) -> bytes:
    """Return the answer to a computation."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(num_datums=len(work.examples))
    array = record.fields["logprobs"]
    array.dtype, array.data = pb.DTYPE_FLOAT32, np.concatenate(work.logprobs).astype(np.float32).tobytes()
    array.offsets = np.cumsum([0, *(each.size * 4 for each in work.logprobs)], dtype=np.int64).tobytes()
    message.metrics["loss:sum"] = math.fsum(work.losses)
    return message.SerializeToString()


def adam_numbers(params: types.OptimStepRequest) -> dict[str, float]:
    """Return the numbers of `Trainer.apply`. Raises LoRAUsageError."""
    given = params.optim_params
    if not isinstance(given, types.AdamParams):
        raise LoRAUsageError(f"the optimizer {given.type!r:.80} is not implemented; expected AdamParams")
    numbers = given.model_dump()
    norm = numbers.pop("grad_clip_norm")
    for name, value in numbers.items():
        most = 1.0 if name.startswith("beta") else math.inf
        if not 0 <= value < most:
            raise LoRAUsageError(f"adam_params.{name} must be at least 0 and below {most:g}, got {value}")
    b1, b2 = numbers.pop("beta1"), numbers.pop("beta2")
    return {**numbers, "b1": b1, "b2": b2, "max_norm": norm if norm > 0 else math.inf}


def check_adam(config: types.OptimizerConfig | None) -> None:
    """Raise LoRAUsageError if a model is to have another optimizer."""
    if config is not None and config.type != "adamw":
        raise LoRAUsageError(f"optimizer_config {config.type!r:.80} is not implemented; expected 'adamw'")


def check_save(message: Any) -> None:
    """Raise LoRAUsageError if a checkpoint is to have what it cannot."""
    if getattr(message, "kind", "snapshot") != "snapshot":
        raise LoRAUsageError(f"kind {message.kind!r} is not implemented; expected 'snapshot'")
    for name in ("age_encryption_recipients", "overwrite"):
        if getattr(message, name, None):
            raise LoRAUsageError(f"{name} is not implemented; leave it out")
    if message.ttl_seconds is not None and not 1 <= message.ttl_seconds <= 10**9:
        raise LoRAUsageError(f"ttl_seconds must be from 1 to {10**9}, got {message.ttl_seconds}")


def prompt_tokens(prompt: types.ModelInput) -> list[int]:
    """Return the tokens of a prompt. Raises LoRAUsageError."""
    if other := [chunk.type for chunk in prompt.chunks if not isinstance(chunk, types.EncodedTextChunk)]:
        raise LoRAUsageError(f"prompt has a chunk of {other[0]}; only tokens (encoded_text) are sampled from")
    return prompt.to_ints()


def sampling_params(request: types.SampleRequest, most: int) -> list[SamplingParams]:
    """Return the parameters of each sample. Raises LoRAUsageError for a field that is not implemented."""
    for name in _NOT_SAMPLED:
        if getattr(request, name):
            raise LoRAUsageError(f"{name} is not implemented; leave it out")
    if not 1 <= request.num_samples <= most:
        raise LoRAUsageError(f"num_samples must be from 1 to {most}, got {request.num_samples}")
    for name in ("topk_sample_logprobs", "topk_prompt_logprobs"):
        if not 0 <= getattr(request, name) <= MAX_LOGPROBS:
            raise LoRAUsageError(f"{name} must be from 0 to {MAX_LOGPROBS}, got {getattr(request, name)}")
    scored = request.topk_prompt_logprobs if request.prompt_logprobs or request.topk_prompt_logprobs else None
    own, texts, ids = request.sampling_params, list[str](), list[int]()
    for stop in [own.stop] if isinstance(own.stop, str) else own.stop or ():
        texts.append(stop) if isinstance(stop, str) else ids.append(stop)
    return [
        SamplingParams(
            max_tokens=own.max_tokens,
            temperature=own.temperature,
            top_p=own.top_p,
            top_k=max(own.top_k, 0),
            seed=None if own.seed is None else own.seed + i,
            stop=tuple(texts),
            stop_token_ids=tuple(ids),
            ignore_eos=own.stop is not None and not texts and not ids,
            logprobs=request.topk_sample_logprobs,
            prompt_logprobs=None if i else scored,  # the samples have one prompt
        )
        for i in range(request.num_samples)
    ]


def sample_response(found: Sequence[Sequence[Piece]], request: types.SampleRequest) -> bytes:
    """Return the answer to a request for samples, from the pieces of each."""
    message = pb.SampleResponse()
    if prompt := [one for piece in found[0] for one in piece.prompt_logprobs]:
        message.prompt_logprobs = np.array([one.logprob if one else np.nan for one in prompt], np.float32).tobytes()
        if request.topk_prompt_logprobs:
            _write_top(message.topk_prompt_logprobs, prompt, request.topk_prompt_logprobs)
    for pieces in found:
        stop = pb.STOP_REASON_LENGTH if pieces[-1].finish_reason == "length" else pb.STOP_REASON_STOP
        logprobs = [one for piece in pieces for one in piece.logprobs]
        sequence = message.sequences.add(stop_reason=stop)
        sequence.tokens = np.array([token for piece in pieces for token in piece.tokens], np.int32).tobytes()
        sequence.logprobs = np.array([one.logprob for one in logprobs], np.float32).tobytes()
        if request.topk_sample_logprobs:
            _write_top(sequence.topk_sampled_logprobs, logprobs, request.topk_sample_logprobs)
    return message.SerializeToString()


def _write_top(message: pb.TopkLogprobs, found: Sequence[TokenLogprob | None], k: int) -> None:
    """Write the k likeliest tokens of each position. The protocol has token 0 and -99999 where there are none."""
    top = np.full((len(found), k, 2), (0, -99999.0))
    for row, one in zip(top, found, strict=True):
        if one is not None and (best := one.top[:k]):
            row[: len(best)] = best
    message.length, message.k = len(found), k
    message.token_ids, message.logprobs = (
        part.tobytes() for part in (top[..., 0].astype(np.int32), top[..., 1].astype(np.float32))
    )
