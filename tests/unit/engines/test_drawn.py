"""What sampling engines report of watched requests while they run: one suite for every engine."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest

from tinsmith.engines.base import Drawn, SamplingEngine
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.protocol.capabilities import SAMPLING_ENGINES
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams, StopReason
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.tokenizer import Tokenizer

MAX_ROWS = 3


@pytest.fixture(scope="module")
def engines(tiny_model: BaseModelInfo) -> Mapping[str, Callable[[], SamplingEngine]]:
    hf = HfSampler(tiny_model, "fp32", max_rows=MAX_ROWS, max_adapters=1)
    return {"fake": lambda: FakeSamplingEngine(max_rows=MAX_ROWS), "hf": lambda: hf}


@pytest.fixture(params=["fake", "hf"])
def engine(request: pytest.FixtureRequest, engines: Mapping[str, Callable[[], SamplingEngine]]) -> SamplingEngine:
    return engines[request.param]()


def sample(*prompt: int, num_samples: int = 1, max_tokens: int = 5, seed: int = 1, **params: object) -> Sample:
    tokens = ModelInput((TextChunk(array("i", prompt).tobytes()),))
    settings = {"seed": seed, "max_tokens": max_tokens, "stop": (), **params}
    return Sample(tokens, SamplingParams.model_validate(settings), num_samples, adapter=None)


def test_every_engine_that_streams_is_held_to_this(engines: Mapping[str, Callable[[], SamplingEngine]]) -> None:
    assert engines.keys() == {name for name, capability in SAMPLING_ENGINES.items() if capability.has_streams}


class Reports:
    """Joins what is reported of each sequence, and checks that nothing is missing or told twice."""

    def __init__(self) -> None:
        self.tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.logprobs: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def hear(self, news: list[Drawn]) -> None:
        for drawn in news:
            key = (drawn.ticket, drawn.sequence)
            assert drawn.offset == len(self.tokens[key]), "in order, without gap or repeat"
            assert drawn.tokens
            assert len(drawn.tokens) == len(drawn.logprobs)
            self.tokens[key] += drawn.tokens
            self.logprobs[key] += drawn.logprobs


def run(engine: SamplingEngine, reports: Reports) -> dict[str, SampleOutput]:
    outputs: dict[str, SampleOutput] = {}
    while engine.num_live:
        for ticket, answer in engine.step():
            assert isinstance(answer, SampleOutput)
            outputs[ticket] = answer
        reports.hear(engine.drawn())
    return outputs


def test_tokens_are_reported_as_they_are_drawn(engine: SamplingEngine) -> None:
    engine.add("t", sample(1, 2, 3))
    engine.watch("t")
    reports = Reports()
    sizes = []
    output = None
    while output is None:
        output = dict(engine.step()).get("t")
        reports.hear(engine.drawn())
        sizes.append(len(reports.tokens["t", 0]))
    assert isinstance(output, SampleOutput)
    assert output.sequences[0].tokens[: sizes[-1]] == reports.tokens["t", 0]
    assert output.sequences[0].logprobs[: sizes[-1]] == reports.logprobs["t", 0]
    assert sizes[-1] >= 4, "all but what came with the answer"
    assert len(set(sizes)) >= 3, "step by step"


def test_every_sequence_of_a_request_is_reported_though_they_take_turns(engine: SamplingEngine) -> None:
    engine.add("t", sample(1, 2, num_samples=2 * MAX_ROWS + 1))
    engine.watch("t")
    reports = Reports()
    (output,) = run(engine, reports).values()
    complete = [index for index, sequence in enumerate(output.sequences) if reports.tokens["t", index] == sequence.tokens]
    assert len(complete) >= len(output.sequences) - MAX_ROWS, "only those that ended with the answer lack their last token"
    for index, sequence in enumerate(output.sequences):
        assert sequence.tokens[: len(reports.tokens["t", index])] == reports.tokens["t", index]


def test_only_watched_requests_are_reported_and_watching_changes_no_answer(engine: SamplingEngine) -> None:
    engine.add("quiet", sample(4, 5, seed=7))
    engine.add("loud", sample(4, 5, seed=7))
    engine.watch("loud")
    engine.watch("loud")
    engine.watch("unknown")
    reports = Reports()
    outputs = run(engine, reports)
    assert {ticket for ticket, _ in reports.tokens} == {"loud"}
    assert outputs["quiet"] == outputs["loud"]


def test_a_cancelled_request_reports_no_more(engine: SamplingEngine) -> None:
    engine.add("gone", sample(1, 2))
    engine.add("stays", sample(1, 2))
    for ticket in ("gone", "stays"):
        engine.watch(ticket)
    engine.step()
    engine.cancel("gone")
    reports = Reports()
    run(engine, reports)
    assert {ticket for ticket, _ in reports.tokens} == {"stays"}
    assert engine.drawn() == []


def test_a_request_that_runs_again_reports_the_same_tokens(engine: SamplingEngine) -> None:
    heard = []
    for ticket in ("first", "again"):
        engine.add(ticket, sample(9, 8, seed=3))
        engine.watch(ticket)
        reports = Reports()
        run(engine, reports)
        heard.append(reports.tokens[ticket, 0])
    assert heard[0] == heard[1]


def test_tokens_that_may_begin_a_stop_string_are_held_back(
    engines: Mapping[str, Callable[[], SamplingEngine]], tiny_model: BaseModelInfo
) -> None:
    engine = engines["hf"]()
    free = Reports()
    engine.add("free", sample(1, 2, 3, max_tokens=8))
    engine.watch("free")
    drawn = run(engine, free)["free"].sequences[0].tokens
    stop = Tokenizer.from_dir(tiny_model.path).decode(drawn[2:6])
    engine.add("stopped", sample(1, 2, 3, max_tokens=8, stop=(stop,)))
    engine.watch("stopped")
    reports = Reports()
    sequence = run(engine, reports)["stopped"].sequences[0]
    assert sequence.stop_reason is StopReason.STOP
    assert sequence.tokens == drawn[:6]
    assert reports.tokens["stopped", 0] == drawn[:2], "nothing of the stop string before it is decided"


def test_tokens_held_back_are_reported_once_they_begin_no_stop_string(
    engines: Mapping[str, Callable[[], SamplingEngine]], tiny_model: BaseModelInfo
) -> None:
    engine = engines["hf"]()
    engine.add("free", sample(1, 2, 3, max_tokens=8))
    drawn = run(engine, Reports())["free"].sequences[0].tokens
    stop = Tokenizer.from_dir(tiny_model.path).decode(drawn[2:4]) + "\0never"
    engine.add("t", sample(1, 2, 3, max_tokens=8, stop=(stop,)))
    engine.watch("t")
    reports = Reports()
    sizes = []
    while engine.num_live:
        engine.step()
        reports.hear(engine.drawn())
        sizes.append(len(reports.tokens["t", 0]))
    assert 4 not in sizes, "the first two tokens of the stop string came out with the one that decided"
    assert reports.tokens["t", 0] == drawn[: len(reports.tokens["t", 0])]
    assert len(reports.tokens["t", 0]) >= 7
