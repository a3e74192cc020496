"""Stored forms, digests and the binary bodies."""

import contextlib
import json
import math
import random
from array import array
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol import wire
from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.sampling import PromptAltTokens, Sample, SampledSequence, SampleOutput, SamplingParams, StopReason
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.protocol.training import (
    AdamParams,
    Compute,
    ComputeOutput,
    CreateModel,
    Kind,
    LoadWeights,
    LoraConfig,
    LrSchedule,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    SgdParams,
    TrainStep,
)


def text(*tokens: int) -> TextChunk:
    return TextChunk(array("i", tokens).tobytes())


def floats(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.FLOAT32, shape or (len(values),), array("f", values).tobytes())


def int64s(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.INT64, shape or (len(values),), array("q", values).tobytes())


def compute(*, backward: bool = True, config: dict[str, float | str] | None = None) -> Compute:
    datum = Datum(ModelInput((text(1, 2), text(3))), {"target_tokens": int64s(2, 3, 4), "weights": floats(0.5, 0, -1)})
    return Compute((datum,), "cross_entropy", config or {}, backward)


def sample(**changes: object) -> Sample:
    fields: dict[str, object] = {
        "prompt": ModelInput((text(1, 2), text(3))),
        "params": SamplingParams(seed=7, max_tokens=5, stop=("a", "b")),
        "num_samples": 2,
        "adapter": "local/s/sampler_weights/3-1",
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 4,
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]


TEXT = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=text(1).tokens))
SPARSE = Tensor(DType.FLOAT32, (2, 3), array("f", [1, 2]).tobytes(), Csr(array("q", [0, 1, 2]).tobytes(), array("q", [0, 2]).tobytes()))

COMMANDS = [
    CreateModel(lora=LoraConfig(rank=8, seed=3, train_mlp=False)),
    LoadWeights(path="tinker://r/weights/n", artifact="a", optimizer=True, lora=LoraConfig(seed=1)),
    OptimStep(optimizer=AdamParams(learning_rate=3e-4)),
    OptimStep(optimizer=SgdParams(momentum=0.9), schedule=LrSchedule(kind="cosine", warmup_steps=2, total_steps=9)),
    SaveWeights(name="n", overwrite=True, ttl_seconds=3600, user_metadata={"b": "1", "a": "2"}),
    SaveWeightsForSampler(sampling_session_id="s:sample:0"),
    SaveWeightsExternal(name="n", ttl_seconds=7200),
    compute(),
    compute(backward=False, config={"b": 0.25, "a": "text"}),
    replace(compute(), micro_batch_tokens=512),
    replace(compute(backward=False), metrics_only=True),
    TrainStep(compute(), OptimStep(optimizer=AdamParams())),
    TrainStep(replace(compute(), micro_batch_tokens=7), OptimStep(optimizer=SgdParams(), schedule=LrSchedule())),
    Compute((Datum(ModelInput((text(1),) * 2), {"weights": SPARSE}),), "x", {}, True),
    sample(),
    sample(adapter=None, params=SamplingParams(seed=0, stop=()), prompt_logprobs=False, topk_prompt_logprobs=0),
    sample(params=SamplingParams(seed=0, stop=(5, 6), temperature=0)),
    sample(topk_sample_logprobs=2),
    sample(target_prompt_logprobs=int64s(1, -1, 3, 4, shape=(2, 2))),
    sample(target_prompt_logprobs=Tensor(DType.INT64, (2, 3), array("q", [7, 8]).tobytes(), SPARSE.csr)),
    sample(prompt_alt_tokens_k=3),
    sample(prompt_logprobs_last_n=1),
    sample(params=SamplingParams(seed=7, frequency_penalty=0.5)),
    sample(params=SamplingParams(seed=7, presence_penalty=0.5)),
    sample(params=SamplingParams(seed=7, logit_bias={3: -100.0, 5: 1.5})),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_comes_back_as_it_went(command):
    encoded = wire.encode_command(command)
    assert wire.decode_command(command.kind, encoded) == command
    assert wire.encode_command(wire.decode_command(command.kind, encoded)) == encoded


def test_a_sample_that_asks_for_nothing_new_lies_as_older_servers_wrote_it():
    assert json.loads(wire.encode_command(sample())) == {
        "prompt": ["AQAAAAIAAAA=", "AwAAAA=="],
        "params": {"seed": 7, "max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": ["a", "b"]},
        "num_samples": 2,
        "adapter": "local/s/sampler_weights/3-1",
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 4,
    }


def test_every_kind_of_command_is_covered():
    assert {command.kind for command in COMMANDS} == set(Kind)


@pytest.mark.proves("R31")
def test_digests_tell_commands_apart_and_nothing_else():
    digests = [wire.digest(command) for command in COMMANDS]
    assert len(set(digests)) == len(COMMANDS)
    assert wire.digest(compute(config={"a": 1.0, "b": 2.0})) == wire.digest(compute(config={"b": 2.0, "a": 1.0}))
    assert wire.digest(compute()) != wire.digest(compute(backward=False))


@pytest.mark.proves("R31")
def test_the_digest_is_over_the_command_and_not_over_its_bytes():
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="cross_entropy", loss_fn_config={"k": 1.0})
    message.data.add().model_input.add().encoded_text.tokens = text(1, 2).tokens
    newer = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="cross_entropy")
    newer.loss_fn_config_v2["k"].number = 1.0
    newer.data.add().model_input.add().encoded_text.tokens = text(1, 2).tokens
    bodies = [message.SerializeToString(), newer.SerializeToString()]
    bodies.append(wire.decompress(zstandard.compress(bodies[0])))
    assert len({wire.digest(wire.decode_forward_backward(body).compute) for body in bodies}) == 1


def test_the_newer_config_map_wins():
    message = pb.ForwardBackwardRequest(loss_fn="ppo", loss_fn_config={"old": 1.0})
    message.loss_fn_config_v2["new"].text = "x"
    assert wire.decode_forward_backward(message.SerializeToString()).compute.loss_fn_config == {"new": "x"}


def test_a_config_entry_without_a_value_is_refused():
    message = pb.ForwardBackwardRequest(loss_fn="ppo")
    message.loss_fn_config_v2["k"].SetInParent()
    with pytest.raises(ValidationFailed, match=r"loss_fn_config\.k"):
        wire.decode_forward_backward(message.SerializeToString())


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda datum: datum.model_input.add(), r"chunks\[0\]: no chunk of a known type \(none\)"),
        (lambda datum: datum.model_input.add().image.CopyFrom(pb.ImageChunk(data=b"x")), r"model_input\.chunks\[0\]: image chunks"),
        (lambda datum: datum.model_input.extend([TEXT, pb.Chunk(dmel=pb.DmelChunk(dmel=b"x"))]), r"model_input\.chunks\[1\]: dmel chunks"),
        (lambda datum: datum.model_input.add().encoded_text.CopyFrom(pb.EncodedTextChunk(tokens=b"123")), "int32"),
        (lambda datum: datum.loss_fn_inputs["w"].CopyFrom(pb.Tensor(dense=b"")), "dtype 0"),
        (lambda datum: datum.loss_fn_inputs["w"].CopyFrom(pb.Tensor(dense=b"1234", dtype=1, shape=[2])), r"loss_fn_inputs\.w"),
    ],
)
def test_a_bad_datum_is_refused_by_its_field(write, names):
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    write(message.data.add())
    with pytest.raises(ValidationFailed, match=rf"data\[0\].*{names}"):
        wire.decode_forward_backward(message.SerializeToString())


def test_a_tensor_without_a_shape_is_a_vector():
    message = pb.ForwardBackwardRequest()
    message.data.add().loss_fn_inputs["w"].CopyFrom(pb.Tensor(dense=floats(1, 2).data, dtype=1))
    assert wire.decode_forward_backward(message.SerializeToString()).compute.data[0].loss_fn_inputs["w"] == floats(1, 2)


def test_bytes_that_only_the_parser_finds_damaged_are_refused():
    with pytest.raises(InvalidRequest, match="ForwardBackwardRequest"):
        wire.decode_forward_backward(b"\x0a\x02\xff\xfe")  # a model id that is no UTF-8


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_user_error(body):
    with contextlib.suppress(InvalidRequest, ValidationFailed, PayloadTooLarge):
        wire.decode_forward_backward(body)


# Results


def test_compute_outputs_share_a_record_with_neighbours_of_equal_trailing_shape():
    output = ComputeOutput((floats(1, 2), floats(3), floats(4, 5, 6, 7, shape=(2, 2)), floats(8)), {"loss:sum": 1.5})
    encoded = wire.encode_compute_output(output)
    message = pb.ForwardBackwardOutput.FromString(encoded)
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    assert {record.type_tag for record in message.loss_fn_outputs} == {message.loss_fn_output_type} == {"ArrayRecord"}
    assert wire.decode_compute_output(encoded) == output


def test_embeddings_are_records_of_their_own_and_an_evaluation_has_none():
    output = ComputeOutput((), {"loss:sum": 1.5}, embeddings=(floats(1, 2), floats(3, 4)))
    encoded = wire.encode_compute_output(output)
    (record,) = pb.ForwardBackwardOutput.FromString(encoded).loss_fn_outputs
    assert (record.num_datums, set(record.fields)) == (2, {"embeddings"})
    assert wire.decode_compute_output(encoded) == output
    evaluation = ComputeOutput((), {"loss:sum": 1.5, "nll:sum": 2.5})
    assert wire.decode_compute_output(wire.encode_compute_output(evaluation)) == evaluation


def test_compute_outputs_without_columns_keep_their_count():
    encoded = wire.encode_compute_output(ComputeOutput((Tensor(DType.FLOAT32, (3, 0), b""),), {}))
    assert [tensor.shape for tensor in wire.decode_compute_output(encoded).logprobs] == [(0, 0)]


def test_compute_output_as_json():
    encoded = wire.encode_compute_output(ComputeOutput((floats(0.5, -1), floats(2, 3, shape=(1, 2))), {"loss:sum": 1.5}))
    assert json.loads(wire.compute_output_json(encoded)) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [0.5, -1.0], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [2.0, 3.0], "dtype": "float32", "shape": [1, 2]}},
        ],
        "metrics": {"loss:sum": 1.5},
    }


SAMPLED = SampleOutput(
    sequences=[SampledSequence([1, 2], [-0.5, -0.25], StopReason.STOP), SampledSequence([3], [-1.0], StopReason.LENGTH)],
    prompt_logprobs=[None, -0.5, None],
    topk_prompt_logprobs=[None, [(4, -0.5), (5, -1.0)], [(6, -2.0)]],
)
EVERYTHING = replace(
    SAMPLED,
    sequences=[SampledSequence([1, 2], [-0.5, -0.25], StopReason.STOP, [[(1, -0.5), (3, -2.0)], [(2, -0.25)]])],
    target_prompt_logprobs=floats(1, 2, 0, 4, shape=(2, 2)),
    prompt_alt_tokens=PromptAltTokens(int64s(7, 8, 9, 7, shape=(2, 2)), floats(-1, -2, -3, -1, shape=(2, 2))),
    prompt_cache_hit_tokens=256,
)


def test_sample_output_comes_back_as_it_went():
    for output in (SAMPLED, EVERYTHING, replace(EVERYTHING, target_prompt_logprobs=SPARSE)):
        assert wire.decode_sample_output(wire.encode_sample_output(output)) == output
    bare = SampleOutput([SampledSequence([], [], StopReason.LENGTH)])
    assert wire.decode_sample_output(wire.encode_sample_output(bare)) == bare


def test_what_was_not_scored_travels_as_nan_and_as_a_filled_cell():
    message = pb.SampleResponse.FromString(wire.encode_sample_output(SAMPLED))
    prompt = array("f", message.prompt_logprobs)
    assert math.isnan(prompt[0])
    assert prompt[1] == -0.5
    table = message.topk_prompt_logprobs
    assert (table.length, table.k) == (3, 2)
    assert array("i", table.token_ids).tolist() == [0, 0, 4, 5, 6, 0]
    assert array("f", table.logprobs).tolist() == [-99999.0, -99999.0, -0.5, -1.0, -2.0, -99999.0]


def test_sample_output_as_json():
    assert json.loads(wire.sample_output_json(wire.encode_sample_output(SAMPLED))) == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [1, 2], "logprobs": [-0.5, -0.25]},
            {"stop_reason": "length", "tokens": [3], "logprobs": [-1.0]},
        ],
        "prompt_logprobs": [None, -0.5, None],
        "topk_prompt_logprobs": [None, [[4, -0.5], [5, -1.0]], [[6, -2.0]]],
    }


def test_what_only_new_requests_ask_for_is_in_the_json_where_it_was_asked_for():
    tree = json.loads(wire.sample_output_json(wire.encode_sample_output(replace(EVERYTHING, target_prompt_logprobs=SPARSE))))
    assert tree["sequences"][0]["topk_logprobs"] == [[[1, -0.5], [3, -2.0]], [[2, -0.25]]]
    assert tree["target_prompt_logprobs"] == {
        "data": [1.0, 2.0],
        "dtype": "float32",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 2],
    }
    assert tree["prompt_alt_tokens"] == {
        "tokens": {"data": [7, 8, 9, 7], "dtype": "int64", "shape": [2, 2]},
        "logprobs": {"data": [-1.0, -2.0, -3.0, -1.0], "dtype": "float32", "shape": [2, 2]},
    }
    assert tree["prompt_cache_hit_tokens"] == 256


# zstd


def test_zstd_bodies_are_read_across_frames():
    assert wire.decompress(zstandard.compress(b"ab") + zstandard.compress(b"cd")) == b"abcd"


def test_a_small_body_cannot_unfold_into_memory():
    bomb = zstandard.compress(bytes(80 * 1024 * 1024))
    assert len(bomb) < 16 * 1024
    with pytest.raises(PayloadTooLarge, match="decompressed"):
        wire.decompress(bomb)
    assert wire.decompress_head(bomb, 16) == bytes(16)


def test_a_window_over_the_bound_is_refused():
    wide = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    body = compressor.compress(bytes(1024)) + compressor.flush()
    with pytest.raises(InvalidRequest, match="window"):
        wire.decompress(body)


def test_damaged_and_cut_zstd_is_refused():
    with pytest.raises(InvalidRequest, match="zstd"):
        wire.decompress(b"no zstd at all")
    with pytest.raises(InvalidRequest, match="zstd"):
        wire.decompress(zstandard.compress(random.Random(0).randbytes(20_000))[:-400])
    with pytest.raises(InvalidRequest, match="zstd"):
        wire.decompress(b"")


@given(st.binary(max_size=64))
def test_no_zstd_raises_anything_but_a_user_error(body):
    with contextlib.suppress(InvalidRequest, PayloadTooLarge):
        wire.decompress(zstandard.MAGIC_NUMBER.to_bytes(4, "little") + body)
