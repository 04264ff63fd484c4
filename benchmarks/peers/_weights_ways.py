"""Other ways of one process's bytes to many, each end a process of its own.

    python -m benchmarks.peers._weights_ways gloo RANK RANKS PORT BYTES ROUNDS    torch.distributed, one flat tensor
    python -m benchmarks.peers._weights_ways http_server                          files over HTTP, by sendfile
    python -m benchmarks.peers._weights_ways http_client BYTES                    a file into memory that is there

``gloo`` needs torch only, and no more of this repository than this file. Its first rank broadcasts for each line of
its standard input, and says when all ranks have it; a client fetches the URL of each line, and says when it is there.
"""

from __future__ import annotations

import http.client
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def gloo(rank: int, ranks: int, port: int, size_bytes: int, rounds: int) -> None:
    """One rank. Each round ends for the first when all others have everything; in the end all compare their sums."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    weights = torch.zeros(size_bytes // 2, dtype=torch.bfloat16)
    if rank == 0:
        weights.view(torch.int16).random_(-1000, 1000)
    distributed.barrier()
    if rank == 0:
        print(torch.__version__, flush=True)
    for number in range(rounds):
        if rank == 0:
            sys.stdin.readline()
            weights[0] = number
        distributed.broadcast(weights, 0)
        distributed.barrier()
        if rank == 0:
            print("done", flush=True)
    total = weights.view(torch.int16).sum(dtype=torch.int64)
    totals = [torch.zeros_like(total) for _ in range(ranks)]
    distributed.all_gather(totals, total)
    if rank == 0:
        print("equal" if all(other == total for other in totals) else "different", flush=True)
    distributed.destroy_process_group()


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(unquote(self.path))
        self.send_response(200)
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        self.wfile.flush()
        with path.open("rb") as file:
            self.connection.sendfile(file)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nobody reads it."""


def http_server() -> None:
    """Serve any file of this machine on loopback, a thread a connection."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


def http_client(size_bytes: int) -> None:
    """Fetch what each line names."""
    place = bytearray(size_bytes)
    place[::4096] = b"\1" * len(place[::4096])  # the pages are there, as a model's are
    print("ready", flush=True)
    for line in sys.stdin:
        url = urlsplit(line.strip())
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        connection.request("GET", url.path)
        answer, taken = connection.getresponse(), 0
        while some := answer.readinto(memoryview(place)[taken:]):
            taken += some
        connection.close()
        print(taken, flush=True)


if __name__ == "__main__":
    ways: dict[str, Any] = {"gloo": gloo, "http_server": http_server, "http_client": http_client}
    ways[sys.argv[1]](*map(int, sys.argv[2:]))
