"""How a service holds up: requests/s and latency at several numbers of clients, and what bad clients do to good ones.

    mmldlm serve saved/wordnet-box --port 8000 &
    python scripts/load_test.py --port 8000 --out load.json

Each client has one connection and asks again as soon as it is answered: /decode of one sentence in 8 steps. Then the
same with 16 clients while 500 others hold half a request, and while others send what must be rejected.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "a coil of rope that is number {}"
HALF = b"POST /decode HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"


@dataclass
class Row:
    """One measurement."""

    case: str
    clients: int
    requests_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    statuses: dict[int, int]


def client(port: int, number: int, until: float, seconds: list[float], statuses: Counter[int]) -> None:
    """Ask until the time is over."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    count = 0
    while time.monotonic() < until:
        body = json.dumps({"texts": [TEXT.format(1000 * number + count)], "steps": 8})
        began, count = time.monotonic(), count + 1
        connection.request("POST", "/decode", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.monotonic() - began)
        statuses[answer.status] += 1
    connection.close()


def measure(case: str, port: int, clients: int, duration: float) -> Row:
    """Some clients for some seconds."""
    seconds: list[float] = []
    statuses: Counter[int] = Counter()
    began = time.monotonic()
    arguments = [(port, number, began + duration, seconds, statuses) for number in range(clients)]
    threads = [threading.Thread(target=client, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(seconds) / (time.monotonic() - began)
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1e3
    return Row(case, clients, round(rate, 1), round(p50), round(p95), round(p99), dict(statuses))


def rejected(port: int, channels: int) -> dict[str, int]:
    """Status of each kind of bad request."""
    bodies: dict[str, Any] = {
        "wrong dimension": json.dumps({"latents": [[0.0] * (channels + 1)]}),
        "NaN": b'{"latents": [[' + b", ".join([b"NaN"] * channels) + b"]]}",
        "10 MB text": json.dumps({"texts": ["x" * 10_000_000]}),
        "not JSON": b'{"texts": [',
    }
    statuses = {}
    for name, body in bodies.items():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/decode", body, {"content-type": "application/json"})
            statuses[name] = connection.getresponse().status
        except (BrokenPipeError, ConnectionResetError):  # answered and closed before all was sent
            statuses[name] = connection.getresponse().status if connection.sock else 0
        connection.close()
    half = socket.create_connection(("127.0.0.1", port), timeout=60)
    half.sendall(HALF)
    statuses["half a request"] = int(half.recv(4096).split()[1])
    half.close()
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=60)
    connection.request("GET", "/")
    model = json.loads(connection.getresponse().read())
    measure("warm-up", options.port, 1, 2.0)
    rows = [measure("decode", options.port, count, options.seconds) for count in options.clients]
    slow = [socket.create_connection(("127.0.0.1", options.port), timeout=60) for _ in range(500)]
    for each in slow:
        each.sendall(HALF)
    rows.append(measure("decode, beside 500 slow clients", options.port, 16, options.seconds))
    for each in slow:
        each.close()
    bad = rejected(options.port, model["num_channels"])
    for row in rows:
        print(
            f"{row.case:32} {row.clients:3} clients  {row.requests_per_second:7.1f} requests/s  "
            f"p50 {row.p50_ms:6.0f} ms  p95 {row.p95_ms:6.0f} ms  p99 {row.p99_ms:6.0f} ms  {row.statuses}"
        )
    print("; ".join(f"{name}: {status}" for name, status in bad.items()))
    if options.out:
        result = {"model": model, "rows": [asdict(row) for row in rows], "rejected": bad}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
