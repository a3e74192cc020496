"""Builds the deterministic engines. Importing it needs no PyTorch."""

from tinsmith.config import SamplerConfig, TrainerConfig
from tinsmith.deployments.base_models import ServedModel
from tinsmith.engines.base import SamplingEngine, TrainingEngine
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.fake_sampler import FakeSamplingEngine


def training_engine(model: ServedModel, trainer: TrainerConfig, threads: int) -> TrainingEngine:
    """`threads` has no meaning here."""
    return FakeTrainingEngine(capacity=trainer.max_adapters, vocab_size=model.info.vocab_size, max_context=model.info.max_context)


def sampling_engine(model: ServedModel, sampler: SamplerConfig, threads: int) -> SamplingEngine:
    """`threads` has no meaning here."""
    return FakeSamplingEngine(
        max_rows=sampler.max_rows,
        max_adapters=sampler.max_adapters,
        vocab_size=model.info.vocab_size,
        max_context=model.info.max_context,
        eos_token_ids=model.info.eos_token_ids,
    )
