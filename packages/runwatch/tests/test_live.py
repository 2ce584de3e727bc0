"""Real processes: a log that grows, a terminal, a webhook, a command, a file of alerts."""

import contextlib
import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from runwatch.alerts import Alert, Change
from runwatch.errors import UserError
from runwatch.sinks import AlertFile, message_of, webhook_body, webhook_sink

COMMAND = [sys.executable, "-m", "runwatch"]
SECRET = "T000-not-for-anybody"


def append(path, start, losses):
    with path.open("a") as file:
        for idx, loss in enumerate(losses):
            file.write(
                json.dumps({"step": start + idx, "time": time.time(), "loss": loss, "lr": 1e-3}) + "\n"
            )


@contextlib.contextmanager
def monitoring(*words, **more):
    """A monitor in a process of its own; it is gone afterwards."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process, word):
    """Lines up to the one that holds the word; the test's own time-out is the limit."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"{word!r} never came: {lines} {process.stderr.read()}")


def test_a_log_is_followed_from_before_it_exists_to_a_stop(tmp_path):
    log = tmp_path / "train.jsonl"
    words = ("--interval", "0.1", "--set", "stall_seconds=1", "--set", "stall_factor=2", log)
    with monitoring(*words) as process:
        read_until(process, "waiting")
        append(log, 1, [2.0] * 10)
        read_until(process, "fine, running, step 10")
        with log.open("a") as file:
            file.write('{"step": 11, "loss"')  # half a line is no line yet
        append(log, 12, [float("nan")])
        append(log, 13, [float("nan")])
        assert any("opened ERROR M101" in line for line in read_until(process, "M101"))
        read_until(process, "opened ERROR M501 stalled")  # nobody writes any more
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "-> Stop and go back" in rest  # the summary at the end
    assert errors == ""


def test_a_finished_run_ends_the_watching(tmp_path):
    log = tmp_path / "train.log"
    bars = [f"Training: {i}%|x| {i}/100 [00:01<00:09, 9.0it/s, Loss={2 + 0.001 * i:.4f}]" for i in range(101)]
    log.write_text("\r".join(bars) + "\n")
    os.utime(log, (time.time() - 3600, time.time() - 3600))  # a full bar may be that of the first epoch only
    done = subprocess.run(
        [*COMMAND, "--interval", "0.1", "--json", str(log)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"][0]["state"] == "finished"


def test_the_screen_in_a_terminal(tmp_path):
    log = tmp_path / "train.jsonl"
    append(log, 1, [2 - 0.01 * i for i in range(60)])
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    words = [*COMMAND, "--no-color", "--interval", "0.2", str(log)]
    process = subprocess.Popen(words, stdout=child, stderr=child, env=environment)
    os.close(child)
    shown, until = b"", time.monotonic() + 30
    while b"nothing found" not in shown and time.monotonic() < until:
        if select.select([parent], [], [], 0.5)[0]:
            shown += os.read(parent, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while chunk := os.read(parent, 65536):
            shown += chunk
    assert process.wait(timeout=120) == 0
    os.close(parent)
    text = shown.decode("utf-8", "replace")
    assert "● fine" in text
    assert any(0x2801 <= ord(letter) <= 0x28FF for letter in text)  # a curve
    assert "\x1b[31m" not in text
    assert "\x1b[32m" not in text


def test_the_page_is_served_until_a_stop(tmp_path):
    log = tmp_path / "train.jsonl"
    append(log, 1, [2.0] * 5)
    with monitoring("--serve", "127.0.0.1:0", "--interval", "0.2", log) as process:
        address = process.stderr.readline().split(" at ")[1].split(";")[0]
        for _ in range(100):
            with urllib.request.urlopen(f"{address}api/state", timeout=120) as answer:
                state = json.load(answer)
            if state:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert state["runs"][0]["step"] == 5
    assert process.returncode == 0


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; fails the first time, as networks do."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, json.loads(body)))
        self.send_response(500 if len(self.server.seen) == 1 else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    made.seen = []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_alerts_reach_a_webhook_a_command_and_a_file(tmp_path, server):
    log, out, alerts = tmp_path / "train.jsonl", tmp_path / "out.json", tmp_path / "alerts.jsonl"
    append(log, 1, [2.0, float("nan")])
    script = tmp_path / "tell.py"
    script.write_text(
        f"import sys, os; open({str(out)!r}, 'w').write(os.environ['MONITOR_CODE'] + sys.stdin.read())"
    )
    address = f"http://127.0.0.1:{server.server_address[1]}/hook/{SECRET}"
    words = [*COMMAND, "--once", "--alerts", alerts, "--command", f"{sys.executable} {script}", log]
    words += ["--webhook-format", "discord"]
    for _ in range(2):  # the same log again is no news for the file
        environment = {**os.environ, "RUNWATCH_WEBHOOK": address}
        done = subprocess.run(
            [*map(str, words)], capture_output=True, text=True, env=environment, timeout=200
        )
        assert done.returncode == 1
        assert SECRET not in done.stdout + done.stderr
    (path, first), (_, second), *_ = server.seen
    assert path.endswith(SECRET)
    assert first == second  # sent again after the failure
    assert first["content"].startswith("train: opened ERROR M101")
    assert first["allowed_mentions"] == {"parse": []}
    assert out.read_text().startswith('M101{"run": "train", "what": "opened"')
    assert [json.loads(line)["code"] for line in alerts.read_text().splitlines()] == ["M101"]


def make_message(evidence):
    alert = Alert("M101", "error", "", 5, 5, 1.0, 1.0, evidence, 0.99)
    return message_of("run <1>", Change("opened", alert), 2.0)


def test_chats_get_text_that_cannot_ring_anybody():
    slack = webhook_body("slack", make_message("<!channel> & <@U1>"))
    assert set(slack) == {"text"}
    assert "<" not in slack["text"]
    assert "&lt;!channel&gt; &amp;" in slack["text"]
    assert len(webhook_body("discord", make_message("x" * 5000))["content"]) <= 2000


def test_a_dead_webhook_neither_stops_the_watching_nor_tells_the_secret(caplog):
    sink = webhook_sink(f"http://127.0.0.1:9/{SECRET}", "auto")
    sink.send(make_message("x"))
    sink.close()
    assert "webhook at 127.0.0.1: try 3 failed" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("address", ["ftp://x/y", "file:///etc/passwd", "nonsense", "https://"])
def test_other_addresses_are_refused(address):
    with pytest.raises(UserError, match="https://"):
        webhook_sink(address, "auto")


def test_a_file_of_alerts_that_cannot_be_is_told(tmp_path):
    with pytest.raises(UserError, match="--alerts"):
        AlertFile(tmp_path / "no" / "alerts.jsonl")
