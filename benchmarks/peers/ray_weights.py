"""Ray's object store, as a way of one process's weights to many on its machine; runs in Ray's own environment.

    PYTHON benchmarks/peers/ray_weights.py PULLERS BYTES    a round for each line of standard input

The driver puts one array, and every actor gets it, which maps it and reads nothing. Each round prints seconds of both.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any


def main(pullers: int, size_bytes: int) -> None:
    """Until the standard input ends."""
    ray: Any = __import__("ray")
    numpy: Any = __import__("numpy")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=3 * size_bytes + (256 << 20))

    class Puller:
        def take(self, boxed: list[Any]) -> int:
            return int(ray.get(boxed[0])[-1])

    actors = [ray.remote(num_cpus=0)(Puller).remote() for _ in range(pullers)]
    weights = numpy.ones(size_bytes // 2, numpy.uint16)
    ray.get([actor.take.remote([ray.put(weights[:1])]) for actor in actors])
    print(ray.__version__, flush=True)
    for number, _ in enumerate(sys.stdin):
        weights[-1] = number
        began = perf_counter()
        reference = ray.put(weights)
        put = perf_counter()
        taken = ray.get([actor.take.remote([reference]) for actor in actors])
        got = perf_counter()
        del reference
        assert taken == [number] * pullers
        print(json.dumps({"put_s": put - began, "get_s": got - put}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
