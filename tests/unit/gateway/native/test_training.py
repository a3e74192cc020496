"""A model's calls on the native protocol: what is queued, what is refused, and the turn that a refusal gives back."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.gateway.native.bodies import BATCH, body_of, furnished, tiny
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol import capabilities, wire
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.native import REQUESTS, FieldRole, fields_of
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointKind
from tinsmith.protocol.tensors import DType, Tensor, float32_values, int64_values
from tinsmith.protocol.training import (
    AdamParams,
    Compute,
    CreateModel,
    Kind,
    LoadWeights,
    LoraConfig,
    LrSchedule,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    SgdParams,
    TrainStep,
)

SGD = {"type": "sgd", "learning_rate": 0.5, "momentum": 0.9}
FAKE = {"models": [{"name": BASE, "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}]}
PASSES = {"/forward": Kind.FORWARD, "/forward_backward": Kind.FORWARD_BACKWARD, "/evaluate": Kind.EVALUATE, "/train_step": Kind.TRAIN_STEP}


@pytest.fixture
async def worded(tiny_model: BaseModelInfo) -> AsyncIterator[Face]:
    """A face whose base model has a tokenizer and a chat template."""
    async with open_face(base=tiny(tiny_model)) as opened:
        yield opened


async def queued(face: Face, model_id: str):
    """The command with seq 1."""
    await face.run(model_id, 0)
    ((_, command),) = await face.take(model_id, 1)
    return command


async def sent(face: Face, path: str, names: dict[str, str], **changes: object):
    """The command that the route queues."""
    await face.native_ok(path, body_of(path, names, **changes))
    return await queued(face, names["MODEL"])


def int64(*values: int) -> Tensor:
    return Tensor(DType.INT64, (len(values),), array("q", values).tobytes())


def float32(*values: float) -> Tensor:
    return Tensor(DType.FLOAT32, (len(values),), array("f", values).tobytes())


def datum(*tokens: int, **inputs: Tensor) -> Datum:
    return Datum(ModelInput((TextChunk(array("i", tokens).tobytes()),)), inputs)


@pytest.mark.parametrize("path", PASSES)
async def test_each_pass_is_its_own_kind_of_command(face: Face, path):
    names = await furnished(face)
    command = await sent(face, path, names, loss_config={})
    compute = command.compute if isinstance(command, TrainStep) else command
    assert isinstance(compute, Compute)
    assert command.kind is PASSES[path]
    assert compute.data == (datum(1, 2, 3, target_tokens=int64(2, 3, 4), weights=float32(1, 1, 0.5)),)
    assert (compute.loss_fn, compute.backward) == ("cross_entropy", path in ("/forward_backward", "/train_step"))


@pytest.mark.proves("R43")
@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2, 3]], {"dtype": "int64", "shape": [1, 3], "data": "AQAAAAAAAAACAAAAAAAAAAMAAAAAAAAA"}])
async def test_one_sequence_or_a_batch_as_lists_or_encoded(face: Face, ids):
    names = await furnished(face)
    targets = [[2, 3, 4]] if ids != [1, 2, 3] else [2, 3, 4]
    command = await sent(face, "/forward", names, batch={"input_ids": ids, "inputs": {"target_tokens": targets}})
    assert command.data == (datum(1, 2, 3, target_tokens=int64(2, 3, 4)),)


async def test_rows_may_differ_in_length_and_targets_may_be_several_a_token(face: Face):
    names = await furnished(face)
    batch = {"input_ids": [[1], [2, 3]], "inputs": {"target_tokens": [[[1, 2]], [[3, 4], [5, 6]]]}}
    command = await sent(face, "/forward", names, batch=batch)
    assert [(len(datum.model_input), datum.loss_fn_inputs["target_tokens"].shape) for datum in command.data] == [(1, (1, 2)), (2, (2, 2))]


async def test_more_sequences_than_a_command_may_have_are_refused(face: Face):
    names = await furnished(face)
    answer = await face.native("/forward", body_of("/forward", names, batch={"input_ids": [[1]] * 4097}))
    assert (answer.status_code, "4096 sequences" in answer.json()["error"]) == (413, True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": "no_such_loss"}, "loss: 'no_such_loss' is not implemented; use one of cispo, cross_entropy"),
        ({"loss_config": {"beta": 1.0}}, "loss_config: unknown key 'beta'"),
        ({"batch": {"input_ids": [[1], [-1]], "inputs": {"target_tokens": [[1], [1]]}}}, "batch.input_ids[1]: token ids"),
        ({"batch": {"input_ids": [[1], [2, 3]], "inputs": {"target_tokens": [[1], [2]]}}}, "batch.inputs.target_tokens[1]: has 1 rows"),
        ({"batch": {"input_ids": [[1]], "inputs": {"target_tokens": [[1]], "odd": [[1]]}}}, "batch.inputs: cross_entropy reads no"),
        ({"batch": {"input_ids": [[1]]}, "loss": "dpo"}, "batch.input_ids[0]: half a pair"),
    ],
)
async def test_a_refused_pass_names_its_fields_as_the_request_does(face: Face, changes, told):
    names = await furnished(face)
    answer = await face.native("/forward", body_of("/forward", names, **changes))
    assert (answer.status_code, answer.json()["error"][: len(told)]) == (422, told)


@pytest.mark.proves("R45")
async def test_a_text_that_is_too_long_is_named(worded: Face):
    names = await furnished(worded)
    answer = await worded.native("/forward", body_of("/forward", names, batch=None, texts=["a few words", "b c " * 10_000]))
    assert (answer.status_code, answer.json()["error"].split(":")[0]) == (422, "texts[1]")


@pytest.mark.proves("R45")
async def test_too_many_input_tokens_are_422(face: Face):
    names = await furnished(face)
    kept = face.num_kept()
    answer = await face.native("/forward", body_of("/forward", names, batch={"input_ids": [1] * 65, "inputs": {"target_tokens": [1] * 65}}))
    assert (answer.status_code, answer.json()["reason"]) == (422, "input_tokens_exceeded")
    assert face.num_kept() == kept


# Roles of fields.


@pytest.mark.proves("R40")
@pytest.mark.parametrize("path", PASSES)
@pytest.mark.parametrize("micro_batch_tokens", [None, 77])
async def test_control_fields_never_reach_the_stored_command_and_engine_fields_do_iff_not_null(face: Face, path, micro_batch_tokens):
    names = await furnished(face)
    await face.native_ok(path, body_of(path, names, micro_batch_tokens=micro_batch_tokens))
    await face.run(names["MODEL"], 0)
    ((entry, command),) = await face.take(names["MODEL"], 1)
    (stored,) = await face.lanes.bodies([(entry.rid, entry.digest)])
    assert stored is not None
    request = next(request for request in REQUESTS if request.path == path)
    assert set(fields_of(request, FieldRole.CONTROL)) == {"model_id", "seq_id"}
    assert not any(word in stored for word in (b"model_id", b"seq_id", names["MODEL"].encode()))
    assert (b"micro_batch_tokens" in stored) is (micro_batch_tokens is not None)
    compute = command.compute if isinstance(command, TrainStep) else command
    assert compute.micro_batch_tokens == micro_batch_tokens


@pytest.mark.proves("R41")
async def test_a_field_of_another_engine_is_422_that_names_it_and_null_is_fine():
    async with open_face(**FAKE) as face:
        names = await furnished(face)
        kept = face.num_kept()
        answer = await face.native("/forward", body_of("/forward", names, micro_batch_tokens=5))
        assert (answer.status_code, answer.json()["error"][:19]) == (422, "micro_batch_tokens:")
        assert face.num_kept() == kept
        await face.native_ok("/forward", body_of("/forward", names, micro_batch_tokens=None))


@pytest.mark.proves("R42", "R28")
async def test_what_the_engine_lacks_is_501_with_the_alternatives_before_anything_is_queued(monkeypatch):
    lacking = capabilities.TrainingCapability(
        operations=capabilities.TRAINING - {Kind.EVALUATE, Kind.CREATE_MODEL},
        losses=frozenset({"cross_entropy"}),
        optimizers=frozenset({"adamw"}),
        fields=frozenset(),
    )
    async with open_face(**FAKE) as face:
        names = await furnished(face)
        monkeypatch.setattr("tinsmith.gateway.native.admission.TRAINING_ENGINES", {"fake": lacking})
        kept = face.num_kept()
        for path, changes, alternative in [
            ("/forward", {"loss": "infonce"}, "cross_entropy"),
            ("/evaluate", {}, "forward"),
            ("/optim_step", {"optimizer": SGD}, "adamw"),
            ("/create_model", {"optimizer": SGD}, "forward"),
        ]:
            answer = await face.native(path, body_of(path, names, **changes))
            assert (answer.status_code, answer.json()["reason"]) == (501, "endpoint_unavailable"), answer.text
            assert alternative in answer.json()["error"]
        unknown = await face.native("/forward", body_of("/forward", names, loss="no_such_loss"))
        assert (unknown.status_code, "no_such_loss" in unknown.json()["error"]) == (422, True)
        assert face.num_kept() == kept


# Turns.


@pytest.mark.proves("R28", "R31")
async def test_a_refused_call_gives_its_seq_back(face: Face):
    names = await furnished(face)
    kept = face.num_kept()
    assert (await face.native("/forward", body_of("/forward", names, loss="no_such_loss"))).status_code == 422
    assert face.num_kept() == kept
    assert (await sent(face, "/optim_step", names)).kind is Kind.OPTIM_STEP


@pytest.mark.proves("R31")
async def test_a_repeat_answers_the_first_request_id_also_at_once_and_another_body_is_refused(face: Face):
    names = await furnished(face)
    body = body_of("/optim_step", names)
    first, second = await asyncio.gather(face.native_ok("/optim_step", body), face.native_ok("/optim_step", body))
    assert first["request_id"] == second["request_id"] == (await face.native_ok("/optim_step", body))["request_id"]
    other = await face.native("/optim_step", body_of("/optim_step", names, optimizer={"type": "adamw", "learning_rate": 5.0}))
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")
    await face.run(names["MODEL"], 0)
    assert len(await face.take(names["MODEL"], 1)) == 1


@pytest.mark.parametrize("path", [*PASSES, "/optim_step", "/save_weights", "/load_weights", "/publish_sampler_weights"])
async def test_a_model_that_is_not_there_is_404_and_one_that_was_closed_410(face: Face, path):
    names = await furnished(face)
    unknown = await face.native(path, body_of(path, names, model_id="nobody"))
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "resource_not_found")
    await keep(face)
    await face.native_ok("/unload_model", {"model_id": names["MODEL"]})
    closed = await face.native(path, body_of(path, names))
    assert (closed.status_code, closed.json()["reason"]) in ((410, "session_ended"), (422, "validation_failed")), closed.text


async def test_a_store_that_is_away_is_503_with_the_time_to_come_again(face: Face, monkeypatch):
    names = await furnished(face)

    async def away(_: object) -> None:
        raise StateContention("the store is away")

    monkeypatch.setattr(face.lanes, "submit", away)
    answer = await face.native("/optim_step", body_of("/optim_step", names))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


# Optimizers and schedules.


async def test_a_step_that_names_no_optimizer_uses_the_model_s_and_its_schedule(face: Face):
    schedule = {"kind": "linear", "warmup_steps": 2, "total_steps": 10, "final_fraction": 0.1}
    model_id = await face.native_model(optimizer=SGD, schedule=schedule)
    names = {"MODEL": model_id}
    command = await sent(face, "/optim_step", names, optimizer=None)
    assert command == OptimStep(optimizer=SgdParams(learning_rate=0.5, momentum=0.9), schedule=LrSchedule(**schedule))


async def test_a_step_that_names_its_optimizer_uses_no_schedule(face: Face):
    model_id = await face.native_model(optimizer=SGD, schedule={"warmup_steps": 2})
    command = await sent(face, "/optim_step", {"MODEL": model_id}, optimizer=SGD | {"max_grad_norm": 2.0})
    assert command == OptimStep(optimizer=SgdParams(learning_rate=0.5, momentum=0.9, grad_clip_norm=2.0))


async def test_a_model_without_an_optimizer_steps_with_adamw(face: Face):
    command = await sent(face, "/train_step", {"MODEL": await face.native_model()}, optimizer=None)
    assert isinstance(command, TrainStep)
    assert command.step == OptimStep(optimizer=AdamParams(eps=1e-8))


@pytest.mark.parametrize(("model", "step"), [(SGD, {"type": "adamw"}), ({"type": "adamw"}, SGD), (None, SGD)])
@pytest.mark.parametrize("path", ["/optim_step", "/train_step"])
async def test_an_optimizer_of_another_type_than_the_model_s_is_422(face: Face, path, model, step):
    names = {"MODEL": await face.native_model(optimizer=model)}
    answer = await face.native(path, body_of(path, names, optimizer=step))
    assert (answer.status_code, answer.json()["error"][:10]) == (422, "optimizer:")


async def test_the_tinker_face_steps_no_sgd_model(face: Face):
    model_id = await face.native_model(optimizer=SGD)
    promise = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    failed = (await face.retrieve(promise["request_id"])).json()
    assert (failed["category"], failed["error"][:12]) == ("user", "adam_params:")


async def test_the_tinker_face_has_no_place_for_native_losses(face: Face):
    model_id = await face.model()
    body = {"model_id": model_id, "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "dpo"}}
    failed = (await face.retrieve((await face.ok("/forward_backward", body))["request_id"])).json()
    assert (failed["category"], "'dpo'" in failed["error"]) == ("user", True)


# Checkpoints.


async def test_saves_say_what_they_were_told(face: Face):
    names = await furnished(face)
    command = await sent(face, "/save_weights", names, overwrite=True, metadata={"k": "v"})
    assert command == SaveWeights(name="n", overwrite=True, ttl_seconds=3600, user_metadata={"k": "v"})


async def test_weights_are_published_under_a_name_or_for_one_sampler(face: Face):
    names = await furnished(face)
    assert await sent(face, "/publish_sampler_weights", names) == SaveWeightsForSampler(name="n")
    await face.native_ok("/publish_sampler_weights", body_of("/publish_sampler_weights", names, seq_id=2, name=None, sampler_seq=4))
    await face.run(names["MODEL"], 1)
    ((_, command),) = await face.take(names["MODEL"], 2)
    assert command == SaveWeightsForSampler(sampling_session_id=f"{names['SESSION']}:sample:4")


@pytest.mark.parametrize("path", ["/save_weights", "/publish_sampler_weights"])
async def test_a_name_is_no_path(face: Face, path):
    answer = await face.native(path, body_of(path, await furnished(face), name="../n"))
    assert (answer.status_code, answer.json()["error"][:5]) == (422, "name:")


async def test_load_names_the_artifact(face: Face):
    names = await furnished(face)
    held = await keep(face)
    command = await sent(face, "/load_weights", names, checkpoint=held.path, load_optimizer=True)
    assert command == LoadWeights(path=held.path, artifact="the-artifact", optimizer=True)


@pytest.mark.parametrize(
    ("checkpoint", "changes", "status"),
    [
        ({"kind": CheckpointKind.SAMPLER}, {"checkpoint": "tinker://s:train:0/sampler_weights/n"}, 422),
        ({"base_model": "org/other"}, {}, 422),
        ({"lora": LoraConfig(rank=4, seed=5)}, {}, 422),
        ({"optimizer": SgdParams()}, {"load_optimizer": True}, 422),
        ({}, {"checkpoint": "nonsense"}, 422),
        ({}, {"checkpoint": "tinker://s:train:0/weights/other"}, 404),
        ({"expires_ms": 1}, {}, 404),
    ],
)
async def test_a_checkpoint_that_does_not_fit_is_refused(face: Face, checkpoint, changes, status):
    names = await furnished(face)
    await keep(face, **checkpoint)
    answer = await face.native("/load_weights", body_of("/load_weights", names, **changes))
    assert (answer.status_code, answer.json()["error"].startswith("checkpoint")) == (status, True), answer.text


# Text.

CHAT = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another."},
    {"role": "assistant", "content": "Red."},
]


async def trained_text(face: Face, command: Compute, index: int = 0) -> str:
    """The targets whose weight is not 0, as text."""
    texts = await face.services.renderers.find(face.services.base_models[BASE])
    assert texts is not None
    inputs = command.data[index].loss_fn_inputs
    targets, weights = int64_values(inputs["target_tokens"].data), float32_values(inputs["weights"].data)
    kept = [target for target, weight in zip(targets, weights, strict=True) if weight]
    return texts._tokenizer.decode(kept)


async def test_a_conversation_trains_the_assistant_s_turns_alone(worded: Face):
    names = await furnished(worded)
    command = await sent(worded, "/forward_backward", names, batch=None, conversations=[{"messages": CHAT}])
    assert await trained_text(worded, command) == "Blue.<|im_end|>\nRed.<|im_end|>\n"
    inputs = command.data[0].loss_fn_inputs
    tokens = command.data[0].model_input.tokens
    assert int64_values(inputs["target_tokens"].data).tolist()[:-1] == tokens[1:]


async def test_dpo_takes_conversations_in_pairs(worded: Face):
    names = await furnished(worded)
    chosen, rejected = {"messages": CHAT[:2]}, {"messages": [CHAT[0], {"role": "assistant", "content": "No."}]}
    body = body_of("/forward_backward", names, batch=None, loss="dpo", conversations=[chosen, rejected, chosen])
    odd = await worded.native("/forward_backward", body)
    assert (odd.status_code, odd.json()["reason"]) == (422, "validation_failed")
    command = await sent(worded, "/forward_backward", names, batch=None, loss="dpo", conversations=[chosen, rejected])
    assert [(await trained_text(worded, command, index)).partition(".")[0] for index in (0, 1)] == ["Blue", "No"]


async def test_texts_are_tokenized_as_they_are_and_every_token_is_a_target(worded: Face):
    names = await furnished(worded)
    command = await sent(worded, "/forward", names, batch=None, texts=["a quick test", "two words"])
    assert await trained_text(worded, command) == " quick test"
    assert len(command.data) == 2


async def test_a_loss_without_targets_takes_the_tokens_alone(worded: Face):
    names = await furnished(worded)
    command = await sent(worded, "/forward", names, batch=None, loss="infonce", texts=["a", "b"])
    assert [(len(datum.model_input), datum.loss_fn_inputs) for datum in command.data] == [(1, {}), (1, {})]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"texts": ["a"]}, "texts[0]: has 1 tokens"),
        ({"conversations": [{"messages": CHAT[:1]}]}, "conversations[0]: has no turn of the assistant"),
        ({"conversations": [{"messages": CHAT[:2]}], "loss": "importance_sampling"}, "logprobs"),
    ],
)
async def test_text_that_cannot_be_learned_from_is_refused(worded: Face, changes, fault):
    names = await furnished(worded)
    answer = await worded.native("/forward", body_of("/forward", names, batch=None, **changes))
    assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


async def test_text_is_bounded_in_tokens_and_in_characters(worded: Face, monkeypatch):
    names = await furnished(worded)
    long = [{"role": "user", "content": "word " * 5000}, CHAT[1]]
    answer = await worded.native("/forward", body_of("/forward", names, batch=None, conversations=[{"messages": long}]))
    assert (answer.status_code, answer.json()["reason"]) == (422, "input_tokens_exceeded"), answer.text
    assert answer.json()["error"].startswith("conversations[0].messages:")
    monkeypatch.setattr("tinsmith.gateway.native.text_bounds.MAX_CHARACTERS", 100)
    too_many = await worded.native("/forward", body_of("/forward", names, batch=None, texts=["word " * 50]))
    assert (too_many.status_code, too_many.json()["error"][:6]) == (413, "texts:")


@pytest.mark.parametrize("changes", [{"texts": ["a b"]}, {"conversations": [{"messages": CHAT}]}])
async def test_text_for_a_base_model_without_a_tokenizer_is_422_with_the_remedy(face: Face, changes):
    names = await furnished(face)
    answer = await face.native("/forward", body_of("/forward", names, batch=None, **changes))
    assert (answer.status_code, "send token ids" in answer.json()["error"]) == (422, True)


async def test_the_same_command_has_the_same_digest_on_either_face(face: Face):
    """What is stored says nothing of the face, so a repeat may come by the other."""
    names = await furnished(face)
    command = await sent(face, "/forward", names, batch={"input_ids": BATCH["input_ids"], "inputs": {"target_tokens": [[2, 3, 4]]}})
    old = Compute((datum(1, 2, 3, target_tokens=int64(2, 3, 4)),), "cross_entropy", {}, backward=False)
    assert wire.digest(command) == wire.digest(old)


async def test_create_model_keeps_the_optimizer_and_begins_the_lane(face: Face):
    names = await furnished(face)
    body = body_of("/create_model", names)
    await face.native_ok("/create_model", body)
    model_id = f"{names['SESSION']}:train:1"
    ((entry, command),) = await face.take(model_id)
    assert (entry.seq, command) == (0, CreateModel(lora=LoraConfig(rank=8, seed=5)))
    record = await face.services.catalog.model("local", model_id)
    assert record.optimizer == AdamParams(learning_rate=0.1, eps=1e-8)
    assert record.schedule == LrSchedule(**body["schedule"])
