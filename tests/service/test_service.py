"""The service answers what the model answers, keeps clients apart, and says no in one clear line."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
import uvicorn
from tokenizers import Tokenizer

import mmldlm
from mmldlm.api.model import Model
from mmldlm.errors import UserError
from mmldlm.service import guard
from mmldlm.service.app import Limits, create_app
from mmldlm.service.batching import Batcher, BusyError, Job
from tests import warm
from tests.tiny_models import NUM_CHANNELS, make_run, make_store

TOKEN = "a secret that nobody knows"
LIMITS = Limits(bytes=20_000, receive_seconds=0.5, documents=8, answer_seconds=20.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("model")
    return mmldlm.load(make_run(root / "run", make_store(root / "store")))


def serving(app: Any) -> Iterator[int]:
    """The application behind a real socket; yields its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=guard.Protocol, log_level="error", timeout_keep_alive=30)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 120
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    yield from serving(create_app(model, LIMITS, local=True))


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=280)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = {} if body is None else {"content-type": "application/json"}
    connection.request("GET" if body is None else "POST", path, content, kind | headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if "json" in answer.headers.get(
        "content-type", ""
    ) else text.decode()


def test_answers_are_those_of_the_model(port: int, model: Model) -> None:
    texts = ["w3 w1 w7", "w4 w4"]
    status, encoded = ask(port, "/encode", {"texts": texts})
    assert status == 200
    np.testing.assert_allclose(encoded["latents"], model.encode(texts), rtol=1e-6)
    expected = model.decode(model.encode(texts), lengths=[3, 2], steps=2)
    assert ask(port, "/decode", {"latents": encoded["latents"], "lengths": [3, 2], "steps": 2}) == (
        200, {"texts": expected},
    )  # fmt: skip
    flat = [latent[0] for latent in encoded["latents"]]
    assert ask(port, "/decode", {"latents": flat, "lengths": [3, 2], "steps": 2})[1]["texts"] == expected
    assert ask(port, "/decode", {"texts": texts, "lengths": [3, 2], "steps": 2})[1]["texts"] == expected
    pairs = model.generate(2, steps=2, latent_steps=2)
    status, generated = ask(port, "/generate", {"n": 2, "steps": 2, "latent_steps": 2})
    assert (status, generated["texts"]) == (200, pairs.texts)
    filled = ask(port, "/infill", {"texts": ["w3 ____ w1"], "steps": 1})[1]["texts"]
    assert filled == [model.infill("w3 ____ w1", steps=1)]
    assert ask(port, "/")[1]["modes"] == ["l2t", "t2l", "joint"]


def test_many_clients_share_passes_and_get_their_own_answers(port: int, model: Model) -> None:
    texts = [f"w{i % 20} w{(3 * i) % 20} w{i % 7}" for i in range(24)]
    before = passes(port)
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda text: ask(port, "/encode", {"texts": [text]})[1]["latents"][0], texts))
    np.testing.assert_allclose(answers, model.encode(texts), rtol=1e-4, atol=1e-5)
    assert passes(port) - before < len(texts)


def passes(port: int) -> int:
    lines = ask(port, "/metrics")[1].splitlines()
    return int(
        float(next(line for line in lines if line.startswith("mmldlm_batch_documents_count")).split()[1])
    )


LATENT = [0.0] * NUM_CHANNELS


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/decode", {"latents": [[1.0, 2.0]]}, 422, "latents of shape (1, 2): this model needs (n, 1, 4) or (n, 4)"),
        ("/decode", b'{"latents": [[NaN, 0, 0, 0]]}', 422, "latents: 1 of 1 contain NaN or infinity"),
        ("/decode", b'{"latents": [[1e999, 0, 0, 0]]}', 422, "latents: 1 of 1 contain NaN or infinity"),
        ("/decode", {"latents": [[1e9, 0, 0, 0]]}, 422, "latents[0][0]=1000000000.0: at most 10000 is allowed"),
        ("/decode", {}, 422, "exactly one"),
        ("/decode", {"latents": [LATENT], "texts": ["w1"]}, 422, "exactly one"),
        ("/decode", {"latents": [LATENT], "lengths": [1, 2]}, 422, "lengths: 2 numbers for 1 document;"),
        ("/decode", {"latents": [LATENT], "lengths": [0]}, 422, "lengths[0]=0: at least 1 is needed"),
        ("/decode", {"latents": [LATENT] * 9}, 422, "latents: at most 8 are allowed in a request, here are 9"),
        ("/decode", {"latents": [LATENT], "steps": 10**9}, 422, "steps=1000000000: at most 128 is allowed"),
        ("/decode", {"latents": [LATENT], "stepz": 1}, 422, "stepz=1: no such field"),
        ("/decode", {"latents": [LATENT], "order": "x"}, 422, "order='x': allowed are 'confidence', "),
        ("/encode", {"texts": [""]}, 422, "texts[0]: is empty; it holds no token"),
        ("/encode", {}, 422, "texts: is missing"),
        ("/encode", [1], 422, "body: a JSON object is needed"),
        ("/encode", {"texts": ["x" * 3000]}, 422, "texts[0]: is longer than 2000 characters"),
        ("/encode", b'{"texts": ["\\ud800"]}', 422, "texts[0]: holds half of a surrogate pair"),
        ("/encode", b'{"texts": [', 400, "body: is not JSON"),
        ("/encode", b"\xff\xfe\x00", 400, ""),
        ("/encode", b"[" * 15_000, 400, ""),
        ("/encode", b'{"texts": ["' + b"x" * 30_000 + b'"]}', 413, "20,000 bytes"),
        ("/generate", {"n": 0}, 422, "n=0: at least 1 is needed"),
        ("/infill", {"texts": ["no blank here"]}, 422, "texts[0]='no blank here': holds no blank; write ____"),
        ("/infill", {"texts": ["w1 ____", "____{9999}"]}, 422, "texts[1]: blanks of 9999 tokens; at most"),
        ("/infill", {"texts": ["____{5} " * 9]}, 422, "texts[0]: blanks of 45 tokens; at most"),
        ("/encode", {"texts": ["w1"], "steps": "3"}, 422, "steps='3': a whole number is needed"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(port: int, path: str, body: Any, status: int, words: str) -> None:
    found, answer = ask(port, path, body)
    assert found == status, answer
    assert words in answer["error"]
    assert "\n" not in answer["error"]
    assert "Traceback" not in answer["error"]


def test_one_bad_request_does_not_spoil_its_batch() -> None:
    def compute(documents: list[Any], progress: Any) -> list[Any]:
        if "bad" in documents:
            raise UserError("bad: is not good")
        return [document * 2 for document in documents]

    sizes: list[int] = []
    batcher = Batcher(
        most_documents=8, most_waiting=6, observe=lambda documents, seconds: sizes.append(documents)
    )
    busy = threading.Event()
    first = batcher.submit(
        Job(None, [0], lambda documents, progress: [busy.wait(100)], time.monotonic() + 200)
    )
    late = time.monotonic() + 200
    jobs = [batcher.submit(Job("k", [word], compute, late)) for word in ("a", "bad", "c")]
    cancelled = batcher.submit(Job("k", ["d"], compute, late))
    expired = batcher.submit(Job("e", ["e"], compute, time.monotonic()))
    assert cancelled.cancel()
    with pytest.raises(BusyError):
        batcher.submit(Job("k", ["f"] * 6, compute, late))
    busy.set()
    assert first.result(100) == [True]
    assert (jobs[0].result(100), jobs[2].result(100)) == (["aa"], ["cc"])
    with pytest.raises(UserError, match="bad"):
        jobs[1].result(100)
    with pytest.raises(TimeoutError):
        expired.result(100)
    batcher.close()
    assert sizes == [1, 3, 1]


def test_work_that_nobody_waits_for_is_given_up() -> None:
    def endless(documents: list[Any], progress: Any) -> list[Any]:
        while True:
            progress(0, 1)
            time.sleep(0.01)

    batcher = Batcher(most_documents=8, most_waiting=8)
    with pytest.raises(TimeoutError):
        batcher.submit(Job("k", [0], endless, time.monotonic() + 0.1)).result(100)
    running = batcher.submit(Job("k", [0], endless, time.monotonic() + 2000))
    queued = batcher.submit(Job(None, [0], endless, time.monotonic() + 2000))
    time.sleep(0.05)
    batcher.close()
    assert running.done()
    assert queued.cancelled()


def test_a_request_whose_client_has_gone_holds_up_nobody(model: Model) -> None:
    app = create_app(model, Limits(answer_seconds=200.0), local=True)
    stages = []

    def endless(documents: list[Any], progress: Any) -> list[Any]:
        stages.append("begun")
        try:
            while True:
                progress(0, 1)
                time.sleep(0.01)
        finally:
            stages.append("given up")

    @app.post("/endless")
    async def wait() -> Any:
        return await app.state.service._compute(None, {}, [0], endless)

    for port in serving(app):
        connection = socket.create_connection(("127.0.0.1", port), timeout=100)
        connection.sendall(b"POST /endless HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        deadline = time.monotonic() + 100
        while not stages and time.monotonic() < deadline:
            time.sleep(0.01)
        connection.close()
        assert ask(port, "/encode", {"texts": ["w1"]})[0] == 200
        assert stages == ["begun", "given up"]


def test_slow_and_half_requests_end_and_disturb_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.3)
    head = b"POST /encode HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n"
    slow = [socket.create_connection(("127.0.0.1", port), timeout=280) for _ in range(60)]
    for number, connection in enumerate(slow):  # nothing; half a head; half a body
        connection.sendall((b"", head, head + b"\r\n" + b'{"texts"')[number % 3])
    assert ask(port, "/encode", {"texts": ["w1"]})[0] == 200
    for number, connection in enumerate(slow):
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408") if number % 3 == 2 else answer == b""
        connection.close()
    assert ask(port, "/health") == (200, {"status": "ok"})


def test_a_page_elsewhere_cannot_use_a_browser_to_reach_a_local_service(port: int) -> None:
    status, answer = ask(port, "/health", None, host="evil.example")
    assert status == 400
    assert answer == {
        "error": "host='evil.example': requests to 127.0.0.1, localhost and ::1 are answered, no others"
    }
    for host in ("127.0.0.1:80", "localhost", "[::1]:80", "[::1]"):
        assert ask(port, "/health", None, host=host)[0] == 200
    for host in ("[::2]:80", "::1.evil.example", "127.0.0.1.evil.example"):
        assert ask(port, "/health", None, host=host)[0] == 400


def test_braces_in_prose_are_no_blank(port: int) -> None:
    status, answer = ask(port, "/infill", {"texts": ["w1 {2024} ____ w2"]})
    assert (status, len(answer["texts"])) == (200, 1)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_declared_as_json_names_the_header(port: int, kind: str) -> None:
    status, answer = ask(port, "/encode", {"texts": ["w1"]}, **{"content-type": kind})
    assert (status, answer["error"]) == (
        415, f"content-type='{kind}': send the header content-type: application/json",
    )  # fmt: skip
    assert (
        ask(port, "/encode", {"texts": ["w1"]}, **{"content-type": "application/json; charset=utf-8"})[0]
        == 200
    )


def test_the_mask_word_of_the_tokenizer_is_a_blank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_store(tmp_path / "store"))
    path = run / "export" / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["[MASK]"] = content["model"]["vocab"].pop("w19")
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(path))
    (run / "export" / "manifest.json").unlink()  # it has the checksum of the other tokenizer
    for port in serving(create_app(mmldlm.load(run), LIMITS)):
        status, answer = ask(port, "/infill", {"texts": ["w3 [MASK] w1", "w3 ____ w1"]})
        assert status == 200
        assert [text.split()[::2] for text in answer["texts"]] == [["w3", "w1"]] * 2


def test_a_token_is_needed_where_one_is_set(model: Model) -> None:
    for port in serving(create_app(model, LIMITS, token=TOKEN)):
        assert ask(port, "/health")[0] == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {TOKEN}x"}):
            status, answer = ask(port, "/encode", {"texts": ["w1"]}, **headers)
            assert (status, "token" in answer["error"]) == (401, True)
        assert ask(port, "/encode", {"texts": ["w1"]}, authorization=f"Bearer {TOKEN}")[0] == 200


def command(*words: str, **environment: str) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, "-m", "mmldlm", "serve", *words], stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip


def test_the_command_stops_in_order(model: Model) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = command(str(Path(model.source)), "--port", str(port))
    assert process.stderr is not None
    try:
        line = ""
        while "listening" not in line:
            line = process.stderr.readline()
            assert line, "the service ended"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                assert ask(port, "/encode", {"texts": ["w1 w2"]})[0] == 200
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("token", ["", "short"])
def test_others_reach_it_only_with_a_token(token: str) -> None:
    process = command("nowhere", "--host", "0.0.0.0", MMLDLM_TOKEN=token)
    assert process.wait(200) == 2
    assert process.stderr is not None
    message = process.stderr.read()
    assert "MMLDLM_TOKEN" in message
    assert ("; it has 5, or listen" in message) == bool(token)
