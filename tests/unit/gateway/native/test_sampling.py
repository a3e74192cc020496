"""Samples of the native protocol."""

import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.gateway.native.bodies import body_of, furnished, tiny
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol import wire
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, SamplingParams, StopReason
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointKind

CHAT = [{"role": "user", "content": "Name a colour."}]


async def sampled(face: Face, **changes: object):
    """The one sample that is queued."""
    names = await furnished(face)
    await face.native_ok("/sample", body_of("/sample", names, **changes))
    (sample,) = await face.take_samples()
    return sample


@pytest.mark.proves("R46")
async def test_a_sample_says_what_it_was_told(face: Face):
    sample = await sampled(face, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert (sample.prompt.tokens, sample.num_samples, sample.adapter) == ([1, 2], 2, None)
    assert sample.params == SamplingParams(seed=7, max_tokens=4, temperature=0.5, top_k=3, top_p=0.9)
    assert (sample.prompt_logprobs, sample.topk_prompt_logprobs) == (True, 2)


@pytest.mark.parametrize(
    ("sampling", "stop"),
    [
        ({}, None),
        ({"stop": []}, ()),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop_token_ids": [3]}, (3,)),
        ({"stop_token_ids": []}, ()),
    ],
)
async def test_what_stops_a_sample(face: Face, sampling, stop):
    assert (await sampled(face, sampling=sampling)).params.stop == stop


async def test_zero_is_a_value(face: Face):
    params = (await sampled(face, sampling={"temperature": 0, "seed": 0})).params
    assert (params.temperature, params.seed) == (0.0, 0)


async def test_a_sample_without_a_seed_gets_one_that_its_repeat_gets_too(face: Face):
    names = await furnished(face)
    body = body_of("/sample", names, sampling={})
    first = await face.native_ok("/sample", body)
    assert (await face.native_ok("/sample", body))["request_id"] == first["request_id"]
    assert len(await face.take_samples()) == 1


async def test_a_sample_of_a_checkpoint_names_its_adapter(face: Face):
    held = await keep(face, kind=CheckpointKind.SAMPLER)
    names = await furnished(face)
    sampler = await face.native_ok("/create_sampler", {"session_id": names["SESSION"], "sampler_seq": 5, "checkpoint": held.path})
    await face.native_ok("/sample", body_of("/sample", names, sampler_id=sampler["sampler_id"]))
    (sample,) = await face.take_samples()
    assert sample.adapter == "the-artifact"


@pytest.mark.proves("R28", "R45")
@pytest.mark.parametrize(
    ("changes", "status", "fault"),
    [
        ({"sampler_id": "nobody"}, 404, "unknown"),
        ({"prompt_ids": [1] * 65}, 422, "context"),
        ({"prompt_ids": [100]}, 422, "token ids"),
        ({"prompt_ids": [[1, 2]]}, 422, "rank 2"),
        ({"prompt_ids": []}, 422, "no tokens"),
        ({"prompt_ids": None}, 422, "exactly one"),
        ({"text": "a"}, 422, "exactly one"),
        ({"prompt_ids": None, "text": "a"}, 422, "send token ids"),
        ({"prompt_ids": None, "messages": CHAT}, 422, "send token ids"),
        ({"sampling": {"stop": ["a"], "stop_token_ids": [1]}}, 422, "send one of them"),
        ({"sampling": {"stop": [""]}}, 422, "stop"),
        ({"sampling": {"stop": ["a"] * 65}}, 422, "stop"),
    ],
)
async def test_a_refused_sample_leaves_nothing(face: Face, changes, status, fault):
    names = await furnished(face)
    kept = face.num_kept()
    answer = await face.native("/sample", body_of("/sample", names, **changes))
    assert (answer.status_code, fault in answer.json()["error"]) == (status, True), answer.text
    assert face.num_kept() == kept


async def test_a_sample_of_an_ended_session_is_410(face: Face):
    names = await furnished(face)
    await face.native_ok("/end_session", {"session_id": names["SESSION"]})
    assert (await face.native("/sample", body_of("/sample", names))).status_code == 410


async def test_messages_and_text_become_prompts_and_the_answer_has_text(tiny_model: BaseModelInfo):
    async with open_face(base=tiny(tiny_model)) as face:
        names = await furnished(face)
        texts = await face.services.renderers.need(face.services.base_models[BASE], "text")
        rids = []
        for seq_id, fields in enumerate(({"text": "two words"}, {"messages": CHAT})):
            envelope = await face.native_ok("/sample", body_of("/sample", names, seq_id=seq_id, prompt_ids=None, **fields))
            rids.append(envelope["request_id"])
        plain, chat = await face.take_samples()
        assert plain.prompt.tokens == texts.encode("two words")
        assert texts._tokenizer.decode(chat.prompt.tokens).endswith("Name a colour.<|im_end|>\n<|im_start|>assistant\n")
        drawn = texts.encode("Blue.<|im_end|>")
        result = wire.encode_sample_output(SampleOutput([SampledSequence(drawn, [0.0] * len(drawn), StopReason.STOP)]))
        await face.native_ok("/sample", body_of("/sample", names, seq_id=9))
        await face.run_samples(Outcome(result=result))
        named = await face.native_ok("/sample", body_of("/sample", names, seq_id=9))
        (sequence,) = named["result"]["sequences"]
        assert (sequence["text"], sequence["tokens"]) == ("Blue.", drawn)


@pytest.mark.proves("R45")
async def test_a_tenant_over_its_rate_is_429_on_both_faces_with_the_time_to_come_again():
    async with open_face(limits={"tokens_per_s": 10}) as face:
        names = await furnished(face)
        face.advance(60_000)
        await face.native_ok("/sample", body_of("/sample", names))
        await face.native_ok("/sample", body_of("/sample", names, seq_id=1))
        kept = face.num_kept()
        refused = await face.native("/sample", body_of("/sample", names, seq_id=2, sampling={"max_tokens": 9}))
        assert (refused.status_code, refused.json()["reason"], refused.headers["retry-after"]) == (429, "rate_limit_exceeded", "2")
        body = {"sampling_session_id": names["SAMPLER"], "seq_id": 3, "prompt": {"chunks": [{"tokens": [1, 2]}]}, "num_samples": 2}
        tinker = await face.post("/asample", body)
        assert (tinker.status_code, tinker.json()["reason"], "retry-after" in tinker.headers) == (429, "rate_limit_exceeded", True)
        assert face.num_kept() == kept
