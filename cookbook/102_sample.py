"""Lesson 102: sampling. Greedy, seeded, several at once, stops, and the log-probabilities of a prompt.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: HF_HUB_OFFLINE=1 python cookbook/102_sample.py
"""

import argparse

import tinker
from chat import ask, prompt_tokens
from rich.console import Console
from tinker import types

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8700")
    parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    args = parser.parse_args()

    # A server without keys takes any key; the SDK itself insists on one of this form.
    service = tinker.ServiceClient(base_url=args.base_url, api_key="tml-local")
    sampler = service.create_sampling_client(base_model=args.base_model).result()
    tokenizer = sampler.get_tokenizer()

    console.rule("temperature 0 is greedy: the most likely token, always")
    console.print(ask(sampler, tokenizer, "What do bees make?"), markup=False)

    console.rule("several samples of one prompt, with a seed: the same three every time")
    story = types.ModelInput.from_ints(prompt_tokens(tokenizer, "Name an animal."))
    params = types.SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=7)
    first = sampler.sample(story, 3, params).result()
    again = sampler.sample(story, 3, params).result()
    for sequence, repeat in zip(first.sequences, again.sequences, strict=True):
        assert sequence.tokens == repeat.tokens, "a seeded sample must repeat"
        console.print(repr(tokenizer.decode(sequence.tokens, skip_special_tokens=True)), markup=False)

    console.rule("a stop string ends the sample where it appears")
    text = types.ModelInput.from_ints(tokenizer.encode("One, two, three,"))
    stopped = sampler.sample(text, 1, types.SamplingParams(max_tokens=24, temperature=0.0, stop=[" six"])).result()
    sequence = stopped.sequences[0]
    console.print(f"{sequence.stop_reason}: {tokenizer.decode(sequence.tokens)!r}", markup=False)

    console.rule("how likely is each token of a text?")
    tokens = tokenizer.encode("The capital of France is Paris")
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    for token, logprob in zip(tokens, logprobs, strict=True):
        console.print(f"{tokenizer.decode([token])!r:>12}  {'' if logprob is None else f'{logprob:8.3f}'}", markup=False)
    service.close("success").result()


if __name__ == "__main__":
    main()
