"""Lesson 204: cancel, refusals, failures, and waits that go on elsewhere.

Four things can stand in the way of a call, and each has its own exception: the call itself is wrong (nothing was sent), the server refuses
the request (nothing was queued), the command fails (it was queued, and has no effect), or it is cancelled. A wait that times out is none
of them: the command goes on, and anybody with its request id can wait again.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: python cookbook/204_cancel_and_errors.py
"""

import argparse
from collections.abc import Callable

from tinsmith.client import (
    AdamWConfig,
    Client,
    ClientError,
    ClientValidationError,
    HttpError,
    PassResult,
    RecordLost,
    ReportedError,
    TaskCancelled,
    TaskFailed,
    TrainingClient,
    WaitTimedOut,
)

LONG = [list(range(100, 228))] * 8  # eight sequences of 128 tokens: a step of some seconds on a CPU


def main() -> None:
    args = parse_arguments()
    with Client(args.url) as client:
        training = client.training(base_model=args.model, rank=8, seed=1, optimizer=AdamWConfig(learning_rate=1e-4))
        refused_by_the_client(training)
        refused_by_the_server(client, training)
        failed(training)
        cancelled(training)
        resumed(args.url, training)


def refused_by_the_client(training: TrainingClient) -> None:
    print("1. A wrong argument fails here, before any HTTP: types and bounds are those of the protocol.")
    error = raised(ClientValidationError, lambda: training.forward(input_ids=[1, 2], micro_batch_tokens=0))
    assert isinstance(error, ClientValidationError)
    assert error.field == "micro_batch_tokens"
    try:
        training.train_step(input_ids=[1, 2], lerning_rate=1e-3)  # type: ignore[call-arg]  # a type checker sees it too
    except TypeError as misspelt:
        print(f"   TypeError: {misspelt}")
    else:
        raise AssertionError("a misspelt argument was taken")


def refused_by_the_server(client: Client, training: TrainingClient) -> None:
    print("2. What only the server can know, it refuses with a reason; nothing is queued, and the next call takes its place in the order.")
    error = raised(HttpError, lambda: client.training(base_model="org/no-such-model"))
    assert isinstance(error, HttpError)
    assert (error.status, error.reason) == (404, "resource_not_found")
    before = training.info().next_seq
    raised(HttpError, lambda: training.train_step(input_ids=[1, 2], inputs={"target_tokens": [2, 3]}, loss="no-such-loss"))
    assert training.info().next_seq == before
    training.train_step(input_ids=[1, 2], inputs={"target_tokens": [2, 3]}).result()


def failed(training: TrainingClient) -> None:
    print("3. A command that was taken can fail when its turn comes. That is told by its result, and it leaves no effect.")
    first = training.save_weights(name="lesson-204", overwrite=True)
    second = training.save_weights(name="lesson-204")  # by the time it runs, the name is taken
    first.result()
    error = raised(TaskFailed, second.result)
    assert isinstance(error, ReportedError)
    assert error.reason == "request_rejected"
    assert error.category == "user"
    assert error.request_id == second.request_id


def cancelled(training: TrainingClient) -> None:
    print("4. A command that has not started can be cancelled; one that runs or has ended goes its way.")
    ahead = [training.forward_backward(input_ids=LONG, inputs={"target_tokens": LONG}) for _ in range(3)]
    last = training.forward(input_ids=LONG, inputs={"target_tokens": LONG})
    assert last.cancel()
    error = raised(TaskCancelled, last.result)
    assert isinstance(error, ReportedError)
    assert error.reason == "cancelled"
    ahead[0].result()
    assert not ahead[0].cancel(), "it has ended"
    ahead[0].result()  # and its result is still there


def resumed(url: str, training: TrainingClient) -> None:
    print("5. A wait that times out can be taken up again, by another client too; `on_progress` tells how the command fares.")
    slow = training.forward_backward(input_ids=LONG, inputs={"target_tokens": LONG})
    raised(WaitTimedOut, lambda: slow.result(timeout=0.001))
    seen: list[str] = []
    with Client(url) as other:
        result = other.future(slow.request_id, PassResult).result(on_progress=lambda envelope: seen.append(envelope.status))
        assert len(result.logprobs) == len(LONG)
        assert seen[-1] == "completed"
        raised(RecordLost, other.future(slow.request_id[:-1] + "x").result)
    print(f"   {' -> '.join(seen)}")


def raised(kind: type[ClientError], call: Callable[[], object]) -> ClientError:
    """What the call raises, which must be of that kind."""
    try:
        call()
    except kind as error:
        print(f"   {type(error).__name__}: {error}")
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    return parser.parse_args()


if __name__ == "__main__":
    main()
