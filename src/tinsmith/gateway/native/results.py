"""Stored results as the native protocol tells them: one shape a kind of command, whichever face the command came by.

Pure functions of the stored bytes; large results are decoded in a thread by their callers.
"""

import json
from collections.abc import Callable
from typing import Any

from pydantic import JsonValue

from tinsmith.protocol import arrays, wire
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.native_answers import (
    ModelCreated,
    SampleResult,
    SequenceResult,
    StepResult,
    WeightsLoaded,
    WeightsPublished,
    WeightsSaved,
)
from tinsmith.protocol.sampling import SampleOutput
from tinsmith.protocol.training import Kind

ToText = Callable[[list[int]], str]


def decode(record: FutureRecord, result: bytes, to_text: ToText | None) -> JsonValue:
    """The `result` of the record's envelope. `to_text`: of the base model of a sample, None where it has no tokenizer."""
    match record.kind:
        case Kind.FORWARD | Kind.FORWARD_BACKWARD | Kind.TRAIN_STEP:
            return _pass(result)
        case Kind.EVALUATE:
            return {"metrics": dict(wire.decode_compute_output(result).metrics)}
        case Kind.SAMPLE:
            return sample_result(wire.decode_sample_output(result), to_text).model_dump(mode="json")
        case _:
            stored = json.loads(result)
            return None if stored is None else _told(record, stored)


def sample_result(output: SampleOutput, to_text: ToText | None) -> SampleResult:
    """As answers and streams tell it."""
    return SampleResult(
        sequences=tuple(
            SequenceResult(
                tokens=tuple(sequence.tokens),
                logprobs=tuple(sequence.logprobs),
                stop_reason=sequence.stop_reason,
                text=None if to_text is None else to_text(sequence.tokens),
            )
            for sequence in output.sequences
        ),
        prompt_logprobs=None if output.prompt_logprobs is None else tuple(output.prompt_logprobs),
        topk_prompt_logprobs=None
        if output.topk_prompt_logprobs is None
        else tuple(None if row is None else tuple(row) for row in output.topk_prompt_logprobs),
    )


def _pass(result: bytes) -> JsonValue:
    """A `PassResult`."""
    output = wire.decode_compute_output(result)
    logprobs: list[Any] = [arrays.encode(tensor) for tensor in output.logprobs]
    embeddings: list[Any] = [arrays.encode(tensor) for tensor in output.embeddings]
    return {"logprobs": logprobs, "embeddings": embeddings, "metrics": dict(output.metrics)}


def _told(record: FutureRecord, stored: dict[str, Any]) -> JsonValue:
    """Results that lie as the Tinker wire tells them."""
    match record.kind:
        case Kind.CREATE_MODEL:
            return ModelCreated(model_id=stored["model_id"]).model_dump()
        case Kind.LOAD_WEIGHTS if record.seq == 0:
            return ModelCreated(model_id=stored["model_id"]).model_dump()
        case Kind.LOAD_WEIGHTS:
            return WeightsLoaded(model_id=stored["model_id"], checkpoint=stored["path"]).model_dump()
        case Kind.SAVE_WEIGHTS | Kind.SAVE_WEIGHTS_EXTERNAL:
            return WeightsSaved(checkpoint=stored["path"]).model_dump()
        case Kind.SAVE_WEIGHTS_FOR_SAMPLER:
            return WeightsPublished(checkpoint=stored.get("path"), sampler_id=stored.get("sampling_session_id")).model_dump()
        case _:
            return StepResult(metrics=stored["metrics"]).model_dump()
