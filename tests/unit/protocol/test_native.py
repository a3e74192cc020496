"""The native protocol as classes: what the server validates and the client builds."""

import math
import types
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from tinsmith.protocol import native
from tinsmith.protocol.native import REQUESTS, FieldRole, StrictRequest, fields_of
from tinsmith.protocol.training import LrSchedule

IDENTITY = ("token", "api_key", "tenant", "user", "authorization")


def parts_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    """The model and every model inside its fields."""
    found = {model}
    for field in model.model_fields.values():
        for kind in leaves(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= parts_of(kind)
    return found


def leaves(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list, dict):
        return [leaf for part in get_args(annotation) for leaf in leaves(part)]
    return [annotation]


def test_requests_are_sorted_and_each_has_a_path_of_its_own() -> None:
    assert [request.__name__ for request in REQUESTS] == sorted(request.__name__ for request in REQUESTS)
    assert len({request.path for request in REQUESTS}) == len(REQUESTS)


@pytest.mark.proves("R38", "R50")
@pytest.mark.parametrize("request_class", REQUESTS)
def test_every_request_and_every_part_of_one_is_closed_and_strict(request_class: type[StrictRequest]) -> None:
    for model in parts_of(request_class):
        assert model.model_config.get("extra") == "forbid", model
        assert model.model_config.get("strict") is True, model
        assert model.model_config.get("frozen") is True, model


@pytest.mark.proves("R39")
@pytest.mark.parametrize("request_class", REQUESTS)
def test_no_request_has_a_field_for_who_calls(request_class: type[StrictRequest]) -> None:
    for model in parts_of(request_class):
        assert not set(IDENTITY) & set(model.model_fields)


@pytest.mark.proves("R40")
def test_ids_and_seq_ids_are_control_fields() -> None:
    for request in REQUESTS:
        control = fields_of(request, FieldRole.CONTROL)
        named = [
            name for name in request.model_fields if name.endswith(("_id", "_ids", "_seq")) and name not in ("prompt_ids", "project_id")
        ]
        assert set(named) - {"process_id"} <= set(control)
        roles = [set(fields_of(request, role)) for role in FieldRole]
        assert set().union(*roles) == set(request.model_fields)
        assert sum(map(len, roles)) == len(request.model_fields)


@pytest.mark.proves("R46")
def test_sampling_and_training_requests_share_no_fields_but_control() -> None:
    assert set(native.Sample.model_fields) & set(native.TrainStep.model_fields) == {"seq_id"}
    assert [request.__name__ for request in REQUESTS if "num_samples" in request.model_fields] == ["Sample", "SampleStream"]
    assert "num_samples" not in native.SamplingOptions.model_fields


@pytest.mark.parametrize(
    ("request_class", "body", "message"),
    [
        (native.Forward, {"model_id": "m", "seq_id": 1}, "batch, conversations, texts: send exactly one"),
        (native.Forward, {"model_id": "m", "seq_id": 1, "texts": ["a"], "batch": {"input_ids": [1]}}, "send exactly one"),
        (native.CreateModel, {"session_id": "s", "model_seq": 0}, "base_model, checkpoint: send one"),
        (native.CreateModel, {"session_id": "s", "model_seq": 0, "checkpoint": "c", "lora": {}}, "lora: the checkpoint has its own"),
        (native.CreateModel, {"session_id": "s", "model_seq": 0, "base_model": "b", "load_optimizer": True}, "load_optimizer"),
        (
            native.CreateModel,
            {
                "session_id": "s",
                "model_seq": 0,
                "base_model": "b",
                "lora": {"train_attn": False, "train_mlp": False, "train_unembed": False},
            },
            "at least one must be true",
        ),
        (native.PublishSamplerWeights, {"model_id": "m", "seq_id": 1}, "name, sampler_seq"),
        (native.CreateSampler, {"session_id": "s", "sampler_seq": 0}, "base_model, checkpoint"),
        (native.Sample, {"sampler_id": "s", "seq_id": 0}, "prompt_ids, messages, text"),
        (
            native.Sample,
            {"sampler_id": "s", "seq_id": 0, "text": "a", "sampling": {"stop": ["x"], "stop_token_ids": [1]}},
            "stop, stop_token_ids",
        ),
    ],
)
def test_what_excludes_each_other_is_refused_by_name(request_class: type[StrictRequest], body: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        request_class.model_validate(body, strict=False)


def test_clipping_is_off_where_no_norm_is_given() -> None:
    assert native.AdamWConfig().params().grad_clip_norm == 0.0
    assert native.AdamWConfig(max_grad_norm=0.5).params().grad_clip_norm == 0.5
    assert native.SgdConfig(learning_rate=0.1, momentum=0.9, max_grad_norm=2.0).params().model_dump() == {
        "type": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "grad_clip_norm": 2.0,
    }


def test_a_warm_up_rises_linearly_to_the_full_rate() -> None:
    schedule = LrSchedule(warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))])
def test_a_schedule_falls_from_the_warm_up_to_its_final_fraction_and_stays(kind: Any, middle: float) -> None:
    schedule = LrSchedule(kind=kind, warmup_steps=2, total_steps=12, final_fraction=0.1)
    assert schedule.factor(2) == 1.0
    assert schedule.factor(7) == pytest.approx(middle)
    assert schedule.factor(12) == schedule.factor(500) == pytest.approx(0.1)


def test_a_schedule_that_falls_must_end_after_its_warm_up() -> None:
    with pytest.raises(ValidationError, match="total_steps"):
        LrSchedule(kind="linear", warmup_steps=5, total_steps=5)
