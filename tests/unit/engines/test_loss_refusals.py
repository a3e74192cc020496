"""What a loss is refused for, one case a line, in both engines: the datum and the key are named, and nothing of the adapter has changed."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from tests.unit.engines.datums import compute, datum, ints, tensor
from tests.unit.engines.loss_cases import CLIPPED, LOSSES, POLICIES, data_of, policy_datum
from tests.unit.engines.peft import computed, refused, run, state
from tinsmith.engines.base import TrainingEngine
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.losses import LOSSES as SPECS
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import AdamParams, LoraConfig, OptimOutput, OptimStep

CONTEXT, VOCABULARY = 2048, 49152
LORA = LoraConfig(rank=8, seed=11)
STEP = OptimStep(optimizer=AdamParams(learning_rate=1e-3, eps=1e-6))
Case = tuple[str, Datum | None, dict[str, float | str], str]


@pytest.fixture(scope="module", params=["peft", "fake"])
def engine(request: pytest.FixtureRequest, peft: PeftEngine) -> TrainingEngine:
    """Its adapter "m" has moments and an unspent gradient."""
    engine: TrainingEngine = peft if request.param == "peft" else FakeTrainingEngine(vocab_size=VOCABULARY, max_context=CONTEXT)
    engine.create_adapter("m", LORA)
    run(engine, "m", compute(data_of("cross_entropy", (5, 9), 1)), STEP, compute(data_of("cross_entropy", (7,), 2)))
    return engine


@pytest.fixture(scope="module")
def before(engine: TrainingEngine) -> dict[str, bytes]:
    return state(engine, "m")


def sound(name: str) -> Datum:
    if name in POLICIES:
        return policy_datum(name)
    return datum([1, 2, 3], target_tokens=ints([2, 3, 4]), weights=tensor([1, -1, 0.5]))


def full(name: str) -> dict[str, Tensor]:
    """Every input that the loss reads; no row of it trains."""
    still = {key: tensor([0, 0, 0]) for key in ("advantages", "weights", "logprobs", "sequence_ratio_mask")}
    rows = still | {"target_tokens": ints([2, 3, 4]), "clip_low_threshold": tensor([1, 0, 0.5]), "clip_high_threshold": tensor([1, 2, 3])}
    return {key: rows[key] for key in SPECS[name].inputs}


def of(inputs: Mapping[str, Tensor], tokens: tuple[int, ...] = (1, 2, 3)) -> Datum:
    return datum(tokens, **inputs)


def shapes() -> Iterator[Case]:
    for name in LOSSES:
        inputs, spec = full(name), SPECS[name]
        yield name, None, {}, "^data: empty; send at least one datum"
        yield (
            name,
            of({key: Tensor(one.dtype, (0,), b"") for key, one in inputs.items()}, ()),
            {},
            r"^data\[1\]\.model_input: has no tokens",
        )
        yield name, of(inputs | {"mask": tensor([1, 1, 1])}), {}, rf"^data\[1\]\.loss_fn_inputs: {name} reads no input 'mask'"
        for key, wanted in spec.inputs.items():
            field = rf"^data\[1\]\.loss_fn_inputs\.{key}: "
            make = ints if wanted.dtype is DType.INT64 else tensor
            if wanted.is_required:
                rest = {other: one for other, one in inputs.items() if other != key}
                yield name, of(rest), {}, rf"^data\[1\]\.loss_fn_inputs: {name} needs '{key}'; it reads "
            if 2 not in wanted.ranks:
                yield name, of(inputs | {key: make([[1], [1], [1]])}), {}, field + "has rank 2, allowed are 1"
            yield name, of(inputs | {key: make([[[1]], [[1]], [[1]]])}), {}, field + "has rank 3, allowed are 1"
            yield name, of(inputs | {key: make([1, 1])}), {}, field + "has 2 rows for 3 tokens; send one row a token"
    yield (
        "cross_entropy",
        of(full("cross_entropy") | {"weights": tensor([[1], [1], [1]])}),
        {},
        r"weights: has shape \[3, 1\], target_tokens \[3\]",
    )
    for name, key in (
        ("importance_sampling", "clip_low_threshold"),
        ("dro", "clip_high_threshold"),
        ("gspo", "clip_low_threshold"),
        ("ppo", "sequence_ratio_mask"),
    ):
        yield name, of(full(name) | {key: tensor([1, 1, 1])}), {}, rf"^data\[1\]\.loss_fn_inputs: {name} reads no input '{key}'"


def numbers() -> Iterator[Case]:
    """Also at rows that add nothing."""
    for name in LOSSES:
        for target in (-1, -100, VOCABULARY):
            bad = of(full(name) | {"target_tokens": ints([2, 3, target])})
            yield name, bad, {}, rf"^data\[1\]\.loss_fn_inputs\.target_tokens: token ids must lie in \[0, {VOCABULARY}\)"
        yield name, of(full(name), (1, 2, VOCABULARY)), {}, r"^data\[1\]\.model_input: token ids must lie in"
        bad = of(full(name) | {"target_tokens": tensor([2, 3, 4])})
        yield name, bad, {}, r"^data\[1\]\.loss_fn_inputs\.target_tokens: must be int64, got float32"
        for key, wanted in SPECS[name].inputs.items():
            if wanted.dtype is DType.FLOAT32:
                for value in (math.nan, -math.inf):
                    bad = of(full(name) | {key: tensor([1, value, 1])})
                    yield name, bad, {}, rf"^data\[1\]\.loss_fn_inputs\.{key}: 1 elements are NaN or infinite"
    for name in ("ppo", "cispo"):
        for key, value, bounds in (
            ("clip_low_threshold", -0.1, r"in \[0, 1\]"),
            ("clip_low_threshold", 1.1, r"in \[0, 1\]"),
            ("clip_high_threshold", 0.99, "at least 1"),
            ("clip_high_threshold", 0.2, "at least 1"),
        ):
            bad = policy_datum(name, **{key: [1, value, 1]})
            yield name, bad, {}, rf"^data\[1\]\.loss_fn_inputs\.{key}: must be {bounds}, got .*; it bounds the ratio itself"
    bad = policy_datum("gspo", sequence_ratio_mask=[0, 0, 0])
    yield "gspo", bad, {}, r"^data\[1\]\.loss_fn_inputs\.sequence_ratio_mask: is 0 everywhere and advantages are not"
    for name in LOSSES:
        long = of(
            {key: Tensor(one.dtype, (CONTEXT + 1,), one.data[: one.dtype.itemsize] * (CONTEXT + 1)) for key, one in full(name).items()},
            (1,) * (CONTEXT + 1),
        )
        yield name, long, {}, rf"^data\[1\]\.model_input: {CONTEXT + 1} tokens exceed the context of {CONTEXT}"


def configs() -> Iterator[Case]:
    for name in LOSSES:
        for key in ("temperature", "kl_coeff", "loss_id", *({"beta", "clip_low_threshold"} - set(SPECS[name].config))):
            accepted = ", ".join(sorted(SPECS[name].config)) or "no keys"
            yield name, sound(name), {key: 1.0}, rf"^loss_fn_config: unknown key '{key}'; {name} accepts {accepted}$"
        for key in SPECS[name].config:
            for value in ("0.5", True, math.nan, math.inf):
                yield name, sound(name), {key: value}, rf"^loss_fn_config\.{key}: .* is no finite number; {name} accepts "
    for name in CLIPPED:
        hint = "; the default is .*, it bounds the ratio itself, not the ratio's distance from 1"
        for low in (-0.1, 1.001):
            yield (
                name,
                sound(name),
                {"clip_low_threshold": low},
                rf"^loss_fn_config\.clip_low_threshold: must be in \[0, 1\], got {low}{hint}",
            )
        for high in (0.2, 0.999):  # with a lower one of 0.9 or 1: crossed bounds
            crossed: dict[str, float | str] = {"clip_low_threshold": 1.0, "clip_high_threshold": high}
            yield name, sound(name), crossed, rf"^loss_fn_config\.clip_high_threshold: must be at least 1, got {high}{hint}"
    yield "dro", sound("dro"), {"beta": -0.1}, r"^loss_fn_config\.beta: must be at least 0, got -0.1; the default is 0.05$"
    yield "astrology", sound("ppo"), {}, "^loss_fn: 'astrology' is not implemented; use one of "
    yield "stable_reinforce", sound("ppo"), {"kl_coeff": 0.01}, "^loss_fn: 'stable_reinforce' is not offered, .*; use cispo or ppo"


def overflows() -> Iterator[Case]:
    message = r"^data\[1\]: {}: the loss or its gradient is not finite"
    far = [-10.8, -1000, -10.8]
    for advantage in (1, -1):
        yield (
            "importance_sampling",
            policy_datum("importance_sampling", logprobs=far, advantages=[0, advantage, 0]),
            {},
            message.format("importance_sampling"),
        )
    for name in ("ppo", "gspo"):
        yield name, policy_datum(name, logprobs=far, advantages=[0, -1, 0]), {}, message.format(name)
    yield "dro", policy_datum("dro", logprobs=[0, -1e30, 0]), {}, message.format("dro")
    yield "cispo", policy_datum("cispo", advantages=[1, 3e38, 1], weights=[1, 10, 1]), {}, message.format("cispo")
    yield "cross_entropy", of(full("cross_entropy") | {"weights": tensor([3.4e38] * 3)}), {}, message.format("cross_entropy")


@pytest.mark.proves("R10")
@pytest.mark.parametrize(("loss_fn", "bad", "config", "message"), [*shapes(), *numbers(), *configs(), *overflows()])
def test_an_invalid_command_is_refused_by_name_and_leaves_everything_as_it_was(
    engine: TrainingEngine, before: dict[str, bytes], loss_fn: str, bad: Datum | None, config: dict[str, float | str], message: str
) -> None:
    data = [] if bad is None else [sound(loss_fn) if loss_fn in LOSSES else sound("ppo"), bad]
    answer = refused(engine, "m", compute(data, loss_fn, config=config))
    assert answer.category == "user"
    assert re.search(message, answer.message), answer.message
    assert state(engine, "m") == before


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_a_command_that_trains_nothing_succeeds_and_counts_as_accumulated(engine: TrainingEngine, loss_fn: str) -> None:
    """A step behind it is a step; behind nothing it is none."""
    engine.create_adapter("still", LORA)
    inputs = full(loss_fn)
    output = computed(engine, "still", compute([of(inputs)], loss_fn))
    assert output.metrics == {"loss:sum": 0.0}
    assert run(engine, "still", STEP, STEP) == [OptimOutput({"unclipped_grad_l2:mean": 0.0}), OptimOutput({})]
    engine.drop_adapter("still")


@pytest.mark.parametrize("loss_fn", POLICIES)
def test_a_sampled_log_prob_above_0_is_accepted(engine: TrainingEngine, loss_fn: str) -> None:
    answer = computed(engine, "m", replace(compute([policy_datum(loss_fn, logprobs=[1e-3, 0, 0.5])], loss_fn), backward=False))
    assert math.isfinite(answer.metrics["loss:sum"])
    assert set(answer.metrics) == {"loss:sum"}


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_a_ratio_that_overflows_trains_where_a_clip_bounds_it(engine: TrainingEngine, loss_fn: str) -> None:
    command = compute([policy_datum(loss_fn, logprobs=[-1000] * 3, advantages=[1, 0, 2])], loss_fn)
    assert math.isfinite(computed(engine, "m", replace(command, backward=False)).metrics["loss:sum"])
