"""Samples as bytes: how the command lies in the store, its result as a SampleResponse and as the JSON of SDKs that read no protobuf.

The stored forms of a command hold only what is not the default of a field that was added later, so that what an older server wrote and
what this one writes of the same command are the same bytes.
"""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isnan, nan
from typing import Any

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import PromptAltTokens, Sample, SampledSequence, SampleOutput, SamplingParams, StopReason, TopRow
from tinsmith.protocol.tensors import Csr, DType, Tensor, float32_values, int32_values, int64_values
from tinsmith.protocol.wire_tensors import read_tensor, write_tensor

NO_LOGPROB = -99999.0  # fills the empty cells of a top-k table, beside token 0

_STOP_TO_WIRE = {StopReason.STOP: pb.STOP_REASON_STOP, StopReason.LENGTH: pb.STOP_REASON_LENGTH}
_STOP_OF_WIRE = {wire: stop for stop, wire in _STOP_TO_WIRE.items()}
_LATER_PARAMS = frozenset({"frequency_penalty", "presence_penalty", "logit_bias"})
_LATER_FIELDS = frozenset({"topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"})


# The command, as it lies in the store.


def encode_sample(sample: Sample) -> bytes:
    """Deterministic."""
    header: dict[str, object] = {
        "prompt": [b64encode(chunk.tokens).decode() for chunk in sample.prompt.chunks],
        "params": _stored_params(sample.params),
        "num_samples": sample.num_samples,
        "adapter": sample.adapter,
        "prompt_logprobs": sample.prompt_logprobs,
        "topk_prompt_logprobs": sample.topk_prompt_logprobs,
    }
    for field in fields(sample):
        value = getattr(sample, field.name)
        if field.name in _LATER_FIELDS and value != field.default:
            header[field.name] = _stored_tensor(value) if isinstance(value, Tensor) else value
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def decode_sample(body: bytes) -> Sample:
    header = json.loads(body)
    prompt = ModelInput(tuple(TextChunk(b64decode(tokens)) for tokens in header.pop("prompt")))
    params = SamplingParams.model_validate(header.pop("params"), strict=False)
    targets = header.pop("target_prompt_logprobs", None)
    return Sample(prompt=prompt, params=params, target_prompt_logprobs=None if targets is None else _tensor_of_stored(targets), **header)


def _stored_params(params: SamplingParams) -> dict[str, Any]:
    unset = {name for name in _LATER_PARAMS if getattr(params, name) == SamplingParams.model_fields[name].default}
    return params.model_dump(mode="json", exclude=unset)


def _stored_tensor(tensor: Tensor) -> dict[str, Any]:
    parts = (tensor.data,) if tensor.csr is None else (tensor.data, tensor.csr.crow, tensor.csr.col)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "parts": [b64encode(part).decode() for part in parts]}


def _tensor_of_stored(stored: Mapping[str, Any]) -> Tensor:
    data, *indices = map(b64decode, stored["parts"])
    return Tensor(DType(stored["dtype"]), tuple(stored["shape"]), data, Csr(*indices) if indices else None)


# The result.


def encode_sample_output(output: SampleOutput) -> bytes:
    """A SampleResponse. Absent prompt log-probs become NaN, absent top-k cells (0, -99999)."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.prompt_cache_hit_tokens)
    for sequence in output.sequences:
        written = message.sequences.add(
            stop_reason=_STOP_TO_WIRE[sequence.stop_reason],
            tokens=array("i", sequence.tokens).tobytes(),
            logprobs=array("f", sequence.logprobs).tobytes(),
        )
        if sequence.topk_logprobs is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk_logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = array("f", (nan if value is None else value for value in output.prompt_logprobs)).tobytes()
    if output.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, output.topk_prompt_logprobs)
    if output.target_prompt_logprobs is not None:
        write_tensor(message.target_prompt_logprobs, output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        write_tensor(message.prompt_alt_tokens.tokens, output.prompt_alt_tokens.tokens)
        write_tensor(message.prompt_alt_tokens.logprobs, output.prompt_alt_tokens.logprobs)
    return message.SerializeToString(deterministic=True)


def decode_sample_output(encoded: bytes) -> SampleOutput:
    """What `encode_sample_output` was given, in float32; a row of a top-k table without any cell comes back as None."""
    message = pb.SampleResponse.FromString(encoded)
    return SampleOutput(
        sequences=[_sequence(sequence) for sequence in message.sequences],
        prompt_logprobs=(
            [None if isnan(value) else value for value in float32_values(message.prompt_logprobs)]
            if message.HasField("prompt_logprobs")
            else None
        ),
        topk_prompt_logprobs=_topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None,
        target_prompt_logprobs=(
            read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs") if message.HasField("target_prompt_logprobs") else None
        ),
        prompt_alt_tokens=_alt_tokens(message.prompt_alt_tokens) if message.HasField("prompt_alt_tokens") else None,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


def sample_output_json(encoded: bytes) -> bytes:
    """The JSON form of an encoded SampleResponse. What SDKs that read JSON cannot ask for is there only where it was asked for."""
    output = decode_sample_output(encoded)
    tree: dict[str, object] = {
        "type": "sample",
        "sequences": [_sequence_tree(sequence) for sequence in output.sequences],
        "prompt_logprobs": output.prompt_logprobs,
        "topk_prompt_logprobs": output.topk_prompt_logprobs,
    }
    if output.target_prompt_logprobs is not None:
        tree["target_prompt_logprobs"] = _tensor_tree(output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        alternatives = output.prompt_alt_tokens
        tree["prompt_alt_tokens"] = {"tokens": _tensor_tree(alternatives.tokens), "logprobs": _tensor_tree(alternatives.logprobs)}
    if output.prompt_cache_hit_tokens:
        tree["prompt_cache_hit_tokens"] = output.prompt_cache_hit_tokens
    return json.dumps(tree).encode()


def _sequence(message: pb.SampledSequence) -> SampledSequence:
    return SampledSequence(
        tokens=int32_values(message.tokens).tolist(),
        logprobs=float32_values(message.logprobs).tolist(),
        stop_reason=_STOP_OF_WIRE[message.stop_reason],
        topk_logprobs=_topk(message.topk_sampled_logprobs) if message.HasField("topk_sampled_logprobs") else None,
    )


def _sequence_tree(sequence: SampledSequence) -> dict[str, object]:
    tree: dict[str, object] = {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens, "logprobs": sequence.logprobs}
    return tree if sequence.topk_logprobs is None else tree | {"topk_logprobs": sequence.topk_logprobs}


def _tensor_tree(tensor: Tensor) -> dict[str, object]:
    values = float32_values(tensor.data) if tensor.dtype is DType.FLOAT32 else int64_values(tensor.data)
    tree: dict[str, object] = {"data": values.tolist(), "dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.csr is None:
        return tree
    sparse = {"sparse_crow_indices": int64_values(tensor.csr.crow), "sparse_col_indices": int64_values(tensor.csr.col)}
    return tree | {name: values.tolist() for name, values in sparse.items()}


def _alt_tokens(message: pb.PromptAltTokens) -> PromptAltTokens:
    return PromptAltTokens(
        read_tensor(message.tokens, "prompt_alt_tokens.tokens"), read_tensor(message.logprobs, "prompt_alt_tokens.logprobs")
    )


def _write_topk(message: pb.TopkLogprobs, rows: Sequence[TopRow | None]) -> None:
    """A dense [length, k] table, k being that of the longest row; at least 1, since the SDK takes a table without columns for none."""
    k = max((len(row) for row in rows if row), default=1)
    cells = [cell for row in rows for cell in (*(row or ()), *((0, NO_LOGPROB),) * (k - len(row or ())))]
    message.k = k
    message.length = len(rows)
    message.token_ids = array("i", (token for token, _ in cells)).tobytes()
    message.logprobs = array("f", (logprob for _, logprob in cells)).tobytes()


def _topk(message: pb.TopkLogprobs) -> list[TopRow | None]:
    tokens, logprobs, k = int32_values(message.token_ids), float32_values(message.logprobs), message.k
    rows = [
        [(tokens[cell], logprobs[cell]) for cell in range(row * k, (row + 1) * k) if logprobs[cell] != NO_LOGPROB]
        for row in range(message.length)
    ]
    return [row or None for row in rows]
