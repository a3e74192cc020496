"""python -m tests.health_probe ADDRESS APPLICATION SECONDS: ask the replicas of a Serve application for their health again and again, as
Serve's controller does, and print how many answers came and the longest wait in ms. RAY_AUTH_TOKEN holds the cluster's token.

Prints `asking` first: from then on the clock runs.
"""

import logging
import sys
import time

import ray

PERIOD_S = 0.02


def main(address: str, application: str, seconds: float) -> None:
    ray.init(address=address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)
    names = [str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [ray.get_actor(name, namespace="serve") for name in names if name.startswith(f"SERVE_REPLICA::{application}#")]
    ray.get([replica.check_health.remote() for replica in replicas])
    print("asking", flush=True)
    longest, num_answers = 0.0, 0
    deadline = time.monotonic() + seconds
    while replicas and time.monotonic() < deadline:
        began = time.monotonic()
        ray.get([replica.check_health.remote() for replica in replicas])
        longest = max(longest, time.monotonic() - began)
        num_answers += len(replicas)
        time.sleep(PERIOD_S)
    print(num_answers, round(longest * 1000, 1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
