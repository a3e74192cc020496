"""Commands for a training engine, and what they left behind."""

from tinsmith.engines.base import Answer, Contents, Job, TrainingEngine
from tinsmith.protocol.errors import TinsmithError
from tinsmith.protocol.training import ComputeOutput, EngineCommand


def run(engine: TrainingEngine, model_id: str, *commands: EngineCommand) -> list[Answer]:
    return engine.run([Job(model_id, seq, command) for seq, command in enumerate(commands, start=1)])


def computed(engine: TrainingEngine, model_id: str, command: EngineCommand) -> ComputeOutput:
    (answer,) = run(engine, model_id, command)
    assert isinstance(answer, ComputeOutput), answer
    return answer


def refused(engine: TrainingEngine, model_id: str, command: EngineCommand) -> TinsmithError:
    (answer,) = run(engine, model_id, command)
    assert isinstance(answer, TinsmithError), answer
    return answer


def state(engine: TrainingEngine, model_id: str) -> dict[str, bytes]:
    """Everything of an adapter, bit for bit."""
    return dict(engine.capture(model_id, Contents.SNAPSHOT))
