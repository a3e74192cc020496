"""Items 9 to 11: samplers, samples and their options, log-probs, samplers that travel."""

import json
import pickle  # noqa: TID251 (the SDK supports it; what is read was written a line before)
import subprocess
import sys
import uuid
from typing import Any

from tinker import types

from tinsmith.conformance import data
from tinsmith.conformance.items import Item, NotRun, Target, answer, client, expect, expect_equal, item, needs, needs_option

PROCESS_S = 120.0
ELSEWHERE = """
import json, pickle, sys
from tinker import types
from tinker.lib.public_interfaces.sampling_client import SamplingClient
asked = json.load(sys.stdin)
prompt = types.ModelInput.from_ints(asked["ids"])
made = [pickle.loads(bytes.fromhex(asked["pickled"])), SamplingClient.from_sampler_handle(asked["handle"], api_key=asked["key"])]
print(json.dumps([sampler.compute_logprobs(prompt).result() for sampler in made]))
"""
TOLERANCE = 5e-2  # between a sampler's and a trainer's kernels in low precision


@item("9a", "a named and an ephemeral snapshot stay as they were while training goes on")
def snapshots(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    prompt = data.prompt(data.tokens(8, target.vocab_size))
    _train(target, trainer)
    path = answer(trainer.save_weights_for_sampler(f"sampler-{uuid.uuid4().hex[:12]}")).path
    expect("/sampler_weights/" in (path or ""), f"path: {path!r}")
    named = client(service.create_sampling_client(model_path=path))
    ephemeral = client(trainer.save_weights_and_get_sampling_client())
    before = [answer(client.compute_logprobs(prompt)) for client in (named, ephemeral)]
    expect(data.are_close(before[0][1:], before[1][1:]), "two snapshots of the same weights differ")
    _train(target, trainer)
    after = [answer(client.compute_logprobs(prompt)) for client in (named, ephemeral)]
    expect(before == after, "a snapshot moved with training")
    newer = client(trainer.save_weights_and_get_sampling_client())
    expect(answer(newer.compute_logprobs(prompt)) != after[0], "a snapshot after training is that of before")


@item("9b", "an inflight sampler moves with newer saves")
def inflight(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    needs_option(trainer.save_weights_and_get_sampling_client, "kind")
    prompt = data.prompt(data.tokens(8, target.vocab_size))
    moving = client(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    before = answer(moving.compute_logprobs(prompt))
    _train(target, trainer)
    newer = client(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    after = answer(moving.compute_logprobs(prompt))
    expect(after != before, "an inflight sampler did not move with a newer save")
    expect_equal(after, answer(newer.compute_logprobs(prompt)), "log-probs of two inflight samplers of a model")


@item("10a", "num_samples, seeds, temperature 0, top-k, top-p, max_tokens")
def samples(target: Target) -> None:
    sampler = target.sampler(target.service())
    prompt = data.prompt(data.tokens(8, target.vocab_size))

    def draw(num: int, **params: Any) -> list[list[int]]:
        output = answer(sampler.sample(prompt, num, types.SamplingParams(max_tokens=6, **params)))
        expect_equal(len(output.sequences), num, "number of sequences")
        for sequence in output.sequences:
            expect_equal(len(sequence.logprobs or []), len(sequence.tokens), "logprobs a sequence")
            expect(len(sequence.tokens) <= 6, f"max_tokens 6 gave {len(sequence.tokens)} tokens")
        return [list(sequence.tokens) for sequence in output.sequences]

    eight = draw(8, seed=11)
    expect_equal(draw(8, seed=11), eight, "the samples of one seed")
    expect(len({tuple(tokens) for tokens in eight}) > 1, "8 samples of one seed are all the same")
    expect(draw(1, seed=12) != draw(1, seed=13) or draw(4, seed=12) != draw(4, seed=13), "two seeds give the same samples")
    greedy = draw(1, temperature=0.0)
    expect_equal(draw(1, temperature=0.0, seed=5), greedy, "greedy samples")
    expect_equal(draw(1, top_k=1, seed=3), greedy, "samples of top_k 1")
    expect_equal(draw(1, top_p=1e-6, seed=4), greedy, "samples of a vanishing top_p")


@item("10b", "stop: a token id, none at all")
def stops(target: Target) -> None:
    sampler = target.sampler(target.service())
    prompt = data.prompt(data.tokens(8, target.vocab_size))

    def draw(stop: Any) -> Any:
        return answer(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=stop))).sequences[0]

    free = draw([])
    expect_equal((len(free.tokens), free.stop_reason), (8, "length"), "tokens and stop_reason without a stop")
    wanted = free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    stopped = draw([free.tokens[3]])
    expect_equal((list(stopped.tokens), stopped.stop_reason), (list(wanted), "stop"), "tokens and stop_reason with a stop token")


@item("10c", "compute_logprobs agrees with sampled log-probs and with the trainer")
def scores(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    _train(target, trainer)
    sampler = client(trainer.save_weights_and_get_sampling_client())
    ids = data.tokens(8, target.vocab_size)
    drawn = answer(sampler.sample(data.prompt(ids), 1, types.SamplingParams(max_tokens=6, seed=3, stop=[]))).sequences[0]
    whole = [*ids, *drawn.tokens]
    scored = answer(sampler.compute_logprobs(data.prompt(whole)))
    expect_equal(scored[0], None, "compute_logprobs[0]")
    expect(data.are_close(scored[len(ids) :], drawn.logprobs, TOLERANCE), "sampled log-probs are not those of compute_logprobs")
    trained = data.logprobs(answer(trainer.forward([data.weighted(whole)], "cross_entropy")))
    expect(data.are_close(scored[1:], trained, TOLERANCE), "compute_logprobs is not what the trainer computes")


@item("10d", "top-k log-probs of the prompt")
def topk(target: Target) -> None:
    sampler = target.sampler(target.service())
    ids = data.tokens(8, target.vocab_size)
    params = types.SamplingParams(max_tokens=1)
    output = answer(sampler.sample(data.prompt(ids), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3))
    expect_equal(len(output.prompt_logprobs), 8, "prompt_logprobs")
    rows = output.topk_prompt_logprobs
    expect_equal(len(rows), 8, "rows of topk_prompt_logprobs")
    for position in range(1, 8):
        row = rows[position]
        expect(row is not None and len(row) == 3, f"topk_prompt_logprobs[{position}]: {row!r}")
        expect(sorted((logprob for _, logprob in row), reverse=True) == [logprob for _, logprob in row], "alternatives are not best first")
        told = dict(row).get(ids[position])
        agrees = told is None or data.is_close(told, output.prompt_logprobs[position], 1e-3)
        expect(agrees, f"the alternative at {position} contradicts prompt_logprobs")


@item("10e", "top-k log-probs of sampled tokens")
def scored_options(target: Target) -> None:
    sampler = target.sampler(target.service())
    needs_option(sampler.sample, "topk_sample_logprobs")
    ids = data.tokens(8, target.vocab_size)
    prompt, params = data.prompt(ids), types.SamplingParams(max_tokens=4, seed=1, stop=[])
    rows = answer(sampler.sample(prompt, 1, params, topk_sample_logprobs=3)).sequences[0].topk_logprobs
    expect_equal(len(rows), 4, "rows of topk_sample_logprobs")
    for row in rows:
        expect(row is not None and len(row) == 3, f"topk_sample_logprobs: {row!r}")


@item("10f", "target log-probs, alternative tokens and the last n of a prompt")
def prompt_options(target: Target) -> None:
    sampler = target.sampler(target.service())
    needs_option(sampler.sample, "prompt_logprobs_last_n")
    ids = data.tokens(8, target.vocab_size)
    prompt, params = data.prompt(ids), types.SamplingParams(max_tokens=1, seed=1)
    everything = answer(sampler.compute_logprobs(prompt))
    last = answer(sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3))
    expect_equal([value is None for value in last], [True] * 5 + [False] * 3, "positions that the last 3 leave out")
    expect(data.are_close(last[5:], everything[5:]), "the last 3 are not those of the whole prompt")
    pairs = [token for following in ids[1:] for token in (following, -1)]
    wanted = types.TensorData(data=pairs, dtype="int64", shape=[7, 2])
    output = answer(sampler.sample(prompt, 1, params, target_prompt_logprobs=wanted, prompt_alt_tokens_k=2))
    scored = [float(value) for value in output.target_prompt_logprobs.data]
    expect(data.are_close(scored[::2], everything[1:]), "target_prompt_logprobs are not the prompt's log-probs")
    expect_equal(scored[1::2], [0.0] * 7, "target_prompt_logprobs of -1")
    expect_equal(list(output.prompt_alt_tokens.tokens.shape or ()), [7, 2], "shape of prompt_alt_tokens")


@item("10g", "stop: a string, and several, in the model's own text")
def stop_words(target: Target) -> None:
    sampler = target.sampler(target.service())
    needs(sampler, "get_tokenizer")
    try:
        tokenizer = sampler.get_tokenizer()
    except (OSError, ImportError) as error:
        raise NotRun("the base model's name is no tokenizer that this machine has or may fetch") from error
    prompt = data.prompt(tokenizer.encode("Once upon a time"))

    def draw(stop: Any) -> Any:
        return answer(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=24, temperature=0.0, stop=stop))).sequences[0]

    free = draw([])
    middle = tokenizer.decode(free.tokens[6:9])
    for stop in (middle, ["never in any text of a model", middle]):
        stopped = draw(stop)
        expect_equal(stopped.stop_reason, "stop", f"stop_reason with {stop!r}")
        expect(len(stopped.tokens) < len(free.tokens), f"the sample goes on after {stop!r}")
        expect_equal(list(stopped.tokens), list(free.tokens[: len(stopped.tokens)]), "tokens up to the stop")
    expect(len(draw(None).tokens) <= 24, "max_tokens with stop null")


@item("11", "a pickled sampler, and one made of a handle, sample as the first does")
def travelling(target: Target) -> None:
    sampler = target.sampler(target.service())
    needs(sampler, "get_sampler_handle")
    prompt = data.prompt(data.tokens(8, target.vocab_size))
    here = answer(sampler.compute_logprobs(prompt))
    made = type(sampler).from_sampler_handle(sampler.get_sampler_handle(), api_key=target.api_key)
    for copy in (pickle.loads(pickle.dumps(sampler)), made):  # noqa: S301 (of this process)
        expect_equal(answer(copy.compute_logprobs(prompt)), here, "log-probs of a sampler that travelled")


@item("11b", "a pickled sampler, and a handle, in a process of its own")
def elsewhere(target: Target) -> None:
    sampler = target.sampler(target.service())
    needs(sampler, "get_sampler_handle")
    ids = data.tokens(8, target.vocab_size)
    here = answer(sampler.compute_logprobs(data.prompt(ids)))
    asked = {"ids": ids, "handle": sampler.get_sampler_handle(), "pickled": pickle.dumps(sampler).hex(), "key": target.api_key}
    done = subprocess.run(  # noqa: S603 (words of this module)
        [sys.executable, "-c", ELSEWHERE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_S,
    )
    expect_equal(done.returncode, 0, f"exit status of the other process ({done.stderr[-300:]})")
    expect_equal(json.loads(done.stdout.splitlines()[-1]), [here, here], "log-probs in the other process, pickled and by its handle")


def _train(target: Target, trainer: Any) -> None:
    answer(trainer.forward_backward([data.weighted(data.tokens(8, target.vocab_size))], "cross_entropy"))
    answer(trainer.optim_step(types.AdamParams(learning_rate=2e-2)))


ITEMS: tuple[Item, ...] = (
    snapshots,
    inflight,
    samples,
    stops,
    scores,
    topk,
    scored_options,
    prompt_options,
    stop_words,
    travelling,
    elsewhere,
)
