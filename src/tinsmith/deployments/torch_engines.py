"""Builds the engines that compute. Importing it imports PyTorch and transformers, which takes seconds."""

from tinsmith.config import SamplerConfig, TrainerConfig
from tinsmith.deployments.base_models import ServedModel, device_of
from tinsmith.engines.base import SamplingEngine, TrainingEngine
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.wire_bounds import MIB


def training_engine(model: ServedModel, trainer: TrainerConfig, threads: int) -> TrainingEngine:
    """`threads`: intra-op threads of this process."""
    return PeftEngine(
        model.info, model.dtype, trainer.max_adapters, trainer.micro_batch_tokens, threads=threads, device=device_of(trainer.num_gpus)
    )


def sampling_engine(model: ServedModel, sampler: SamplerConfig, threads: int) -> SamplingEngine:
    """`threads`: intra-op threads of this process."""
    return HfSampler(
        model.info,
        model.dtype,
        sampler.max_rows,
        sampler.max_adapters,
        threads=threads,
        device=device_of(sampler.num_gpus),
        logprobs=sampler.logprobs,
        prompt_cache_bytes=sampler.prompt_cache_mib * MIB,
    )
