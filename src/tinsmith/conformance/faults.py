"""Items 14 to 18 and 21: what an SDK and the server make of answers that fail, get lost or come late."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tinker
from tinker import types

from tinsmith.conformance import data
from tinsmith.conformance.items import (
    Item,
    Mismatch,
    NotRun,
    Target,
    answer,
    category,
    expect,
    expect_equal,
    failure,
    faulty,
    item,
    until,
)
from tinsmith.conformance.proxy import Exchange, Proxy, Rule
from tinsmith.conformance.raw import Wire

BEAT_S = 10.0  # between two heartbeats
GAP_S = 300.0  # within which a server goes on after a number that never comes
SLACK_S = 20.0
# With an eps far over the gradient a step grows with the gradient: one that was counted twice shows.
STEP = types.AdamParams(learning_rate=0.5, eps=1.0)

_PENDING = {"type": "try_again", "request_id": "of another", "queue_state": "active"}


@item("1b", "a session beats every 10 seconds, and its beats answer 410 once it was finished")
def beats(target: Target) -> None:
    with faulty(target) as (proxy, through):
        service = through.service()
        service.create_lora_training_client(target.model, rank=8).result()
        until(lambda: any(beat.status for beat in proxy.seen("session_heartbeat")), BEAT_S + SLACK_S, "a heartbeat")
        beat = proxy.seen("session_heartbeat")[0]
        expect_equal(beat.status, 200, "status of a heartbeat")
        answer(service.close("success"))
        expect_equal([finish.status // 100 for finish in proxy.seen("finish")], [2], "status of finish, in hundreds")
        with Wire(target) as wire:
            expect_equal(wire.post("session_heartbeat", beat.sent()).status_code, 410, "status of a heartbeat after finish")


@item("14a", "429 three times on asample: the same seq_id again, a second apart")
def backpressure(target: Target) -> None:
    with faulty(target) as (proxy, through):
        sampler = through.sampler(through.service())
        proxy.answer("asample", 429, times=3)
        started = time.monotonic()
        answer(sampler.sample(_prompt(target), 1, types.SamplingParams(max_tokens=1)))
        expect(time.monotonic() - started >= 3, "the sample took less than 3 s")
        posts = proxy.seen("asample")
        expect_equal([post.status for post in posts], [429, 429, 429, 200], "statuses of asample")
        expect_equal(len({post.sent()["seq_id"] for post in posts}), 1, "number of different seq_ids")


@item("14b", "503 twice on optim_step, before and after it was carried out: one step")
def unavailable_steps(target: Target) -> None:
    for headers in ({}, {"retry-after-ms": "10"}):
        with _one_step(target) as (proxy, step):
            proxy.add(Rule("optim_step", status=503, headers=headers))
            proxy.add(Rule("optim_step", status=503, headers=headers, is_executed=True))
            step()
            posts = proxy.seen("optim_step")
            expect_equal([post.status for post in posts], [503, 503, 200], "statuses of optim_step")
            expect_equal(len({post.sent()["seq_id"] for post in posts}), 1, "number of different seq_ids")
            _expect_one_request(posts[1:])


@item("15a", "the reply to forward_backward is lost: the same request_id, one gradient")
def lost_passes(target: Target) -> None:
    with _one_step(target) as (proxy, step):
        proxy.lose("forward_backward")
        step()
        _expect_one_request(proxy.seen("forward_backward")[:2])


@item("15b", "the reply to optim_step is lost: the same request_id, one step")
def lost_steps(target: Target) -> None:
    with _one_step(target) as (proxy, step):
        proxy.lose("optim_step")
        step()
        _expect_one_request(proxy.seen("optim_step"))


@item("15c", "the reply to asample is lost: the same request_id and sample_sequence_ids")
def lost_samples(target: Target) -> None:
    with faulty(target) as (proxy, through):
        sampler = through.sampler(through.service())
        proxy.lose("asample")
        output = answer(sampler.sample(_prompt(target), 2, types.SamplingParams(max_tokens=1)))
        expect_equal(len(output.sequences), 2, "number of sequences")
        posts = proxy.seen("asample")
        _expect_one_request(posts)
        expect_equal(posts[1].told()["sample_sequence_ids"], posts[0].told()["sample_sequence_ids"], "sample_sequence_ids of the repeat")


@item("15d", "the replies to create_model and save_weights are lost: one model, one checkpoint")
def lost_saves(target: Target) -> None:
    with faulty(target) as (proxy, through):
        service = through.service()
        proxy.lose("create_model")
        trainer = through.trainer(service)
        _expect_one_request(proxy.seen("create_model"))
        proxy.lose("save_weights")
        path = answer(trainer.save_state("kept-once")).path
        _expect_one_request(proxy.seen("save_weights"))
        listed = answer(service.create_rest_client().list_checkpoints(path.split("/")[2])).checkpoints
        expect_equal([checkpoint.tinker_path for checkpoint in listed], [path], "checkpoints of the run")


@item("16a", "retrieve_future: 408, try_again, 503, 429 and three 400 are waited out")
def waited_out(target: Target) -> None:
    with faulty(target) as (proxy, through):
        trainer = through.trainer(through.service())
        wanted = data.logprobs(answer(trainer.forward(_datums(target), "cross_entropy")))
        for status, body, times in ((408, _PENDING, 3), (200, _PENDING, 2), (503, None, 2), (429, None, 2), (400, None, 3)):
            proxy.answer("retrieve_future", status, body, times)
            got = data.logprobs(answer(trainer.forward(_datums(target), "cross_entropy")))
            expect_equal(got, wanted, f"logprobs after {times} answers of status {status}")


@item("16b", "retrieve_future: four 400, or a 404, end the request and not its client")
def fatal_polls(target: Target) -> None:
    with faulty(target) as (proxy, through):
        trainer = through.trainer(through.service())
        for status, times in ((400, 4), (404, 1)):
            proxy.answer("retrieve_future", status, times=times)
            try:
                answer(trainer.forward(_datums(target), "cross_entropy"))
            except ValueError:
                answer(trainer.forward(_datums(target), "cross_entropy"))
            else:
                raise Mismatch(f"{times} answers of status {status} did not end the request")


@item("16c", "retrieve_future: 410 resubmits a sample under a new seq_id, and fails a step")
def lost_promises(target: Target) -> None:
    from tinker.lib.retryable_exception import RetryableException  # of this release; older ones have it elsewhere

    with faulty(target) as (proxy, through):
        service = through.service()
        sampler, trainer = through.sampler(service), through.trainer(service)
        proxy.answer("retrieve_future", 410)
        answer(sampler.sample(_prompt(target), 1, types.SamplingParams(max_tokens=1)))
        expect_equal(len({post.sent()["seq_id"] for post in proxy.seen("asample")}), 2, "number of different seq_ids")
        proxy.answer("retrieve_future", 410)
        try:
            answer(trainer.optim_step(STEP))
        except RetryableException:
            answer(trainer.forward(_datums(target), "cross_entropy"))
        else:
            raise Mismatch("a step whose promise is gone did not raise RetryableException")


@item("17a", "failed futures of either category, and requests that the server refuses: the client goes on")
def failed_futures(target: Target) -> None:
    with faulty(target) as (proxy, through):
        trainer = through.trainer(through.service())
        proxy.answer("retrieve_future", 200, {"error": "injected", "category": "server"})
        expect_equal(category(failure(trainer.forward(_datums(target), "cross_entropy"))), "server", "category")
        bad, good = trainer.optim_step(types.AdamParams(learning_rate=-1.0)), trainer.optim_step(STEP)
        try:
            answer(bad)
        except tinker.RequestFailedError as error:
            expect_equal(category(error), "user", "category of a step of a negative learning rate")
        except tinker.APIStatusError as error:
            expect(error.status_code < 500, f"status of a step of a negative learning rate: {error.status_code}")
        else:
            raise Mismatch("a step of a negative learning rate was carried out")
        answer(good)


@item("17b", "422 on optim_step, so that its number never comes: later ones are carried out")
def gaps(target: Target) -> None:
    with faulty(target) as (proxy, through):
        trainer = through.trainer(through.service())
        proxy.answer("optim_step", 422)
        try:
            answer(trainer.optim_step(STEP))
        except tinker.UnprocessableEntityError:
            trainer.optim_step(STEP).result(timeout=GAP_S)
            numbers = [post.sent()["seq_id"] for post in proxy.seen("optim_step")]
            expect_equal(numbers, [1, 2], "seq_ids of the step that was refused and of the next")
        else:
            raise Mismatch("422 was not raised")


@item("18", "a sample that is cancelled, or not waited for, is cancelled on the server; with the poller and without")
def cancelled(target: Target) -> None:
    for has_poller in (False, True):
        with faulty(target) as (proxy, through):
            proxy.change_config(sample_use_retrieve_futures=has_poller)
            service = through.service()
            if not service.holder.get_client_dynamic_config().sample_cancel_enabled:
                raise NotRun("the server's dynamic configuration has sample_cancel_enabled off")
            sampler = through.sampler(service)
            held = [Rule(name, None, is_held=True) for name in ("retrieve_future", "retrieve_futures")]
            for rule in held:
                proxy.add(rule)
            params = types.SamplingParams(max_tokens=64)
            sampler.sample(_prompt(target), 1, params).future().add_done_callback(lambda _: None)
            _await_posts(proxy, 1)
            dropped = sampler.sample(_prompt(target), 1, params)
            _await_posts(proxy, 2)
            dropped.future().cancel()
            late = sampler.sample(_prompt(target), 1, params)
            _await_posts(proxy, 3)
            try:
                asyncio.run(late.result_async(timeout=0.1))
            except TimeoutError:
                pass
            else:
                raise Mismatch("a sample whose answer is held back had one")
            until(lambda: len(proxy.seen("cancel_future")) >= 2, SLACK_S, "cancel_future of two samples")
            wanted = {post.told()["request_id"] for post in proxy.seen("asample")[1:]}
            expect_equal({post.sent()["request_id"] for post in proxy.seen("cancel_future")}, wanted, "ids that were cancelled")
            until(lambda: all(post.status for post in proxy.seen("cancel_future")), SLACK_S, "answers of cancel_future")
            expect_equal({post.status // 100 for post in proxy.seen("cancel_future")}, {2}, "status of cancel_future, in hundreds")
            for rule in held:
                rule.is_held = False
            answer(sampler.sample(_prompt(target), 1, params))


@item("21", "a pause that is told with 408 is logged once, with its reason, and the sample comes")
def pauses(target: Target) -> None:
    reason = "the conformance list paused this queue"
    with faulty(target) as (proxy, through), _log_lines() as lines:
        sampler = through.sampler(through.service())
        proxy.answer("retrieve_future", 408, _PENDING | {"queue_state": "paused_capacity", "queue_state_reason": reason}, times=3)
        answer(sampler.sample(_prompt(target), 1, types.SamplingParams(max_tokens=1)))
        expect_equal(sum(reason in line for line in lines), 1, "lines that tell of the pause")


@contextmanager
def _one_step(target: Target) -> Iterator[tuple[Proxy, Callable[[], None]]]:
    """A proxy, and a pass and a step through it, whose effect is then held against that of a pass and a step without faults."""
    datums = _datums(target)
    with faulty(target) as (proxy, through):
        trainer, plain = through.trainer(through.service()), target.trainer(target.service())
        before = data.logprobs(answer(plain.forward(datums, "cross_entropy")))

        def step() -> None:
            for client in (plain, trainer):
                answer(client.forward_backward(datums, "cross_entropy"))
                answer(client.optim_step(STEP))

        yield proxy, step
        proxy.clear()
        wanted, got = (data.logprobs(answer(client.forward(datums, "cross_entropy"))) for client in (plain, trainer))
        expect(not data.are_close(before, wanted, 1e-3), "the step of this item is too small to be seen")
        expect(data.are_close(wanted, got), f"the effect is not that of one pass and one step: expected {wanted[:3]}, got {got[:3]}")


def _expect_one_request(posts: list[Exchange]) -> None:
    """Two posts of one request, both carried out."""
    expect_equal(len(posts), 2, "number of posts")
    expect(posts[0].body == posts[1].body, "the repeat differs from what was sent first")
    expect_equal(posts[1].told()["request_id"], posts[0].told()["request_id"], "request_id of the repeat")


def _await_posts(proxy: Proxy, num: int) -> None:
    until(lambda: sum(post.status == 200 for post in proxy.seen("asample")) >= num, SLACK_S, f"{num} answers of asample")


@contextmanager
def _log_lines() -> Iterator[list[str]]:
    """What the SDK logs from now on."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Kept(), logging.getLogger("tinker")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _prompt(target: Target) -> types.ModelInput:
    return data.prompt(data.tokens(8, target.vocab_size))


def _datums(target: Target) -> list[types.Datum]:
    return [data.weighted(data.tokens(9, target.vocab_size))]


ITEMS: tuple[Item, ...] = (
    beats,
    backpressure,
    unavailable_steps,
    lost_passes,
    lost_steps,
    lost_samples,
    lost_saves,
    waited_out,
    fatal_polls,
    lost_promises,
    failed_futures,
    gaps,
    cancelled,
    pauses,
)
