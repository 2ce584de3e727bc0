"""The page in a real browser, and what the server refuses."""

import http.client
import json
import math
import shutil
import subprocess

import pytest
from runwatch.errors import UserError
from runwatch.page import HTML, SCRIPT
from runwatch.report import write_report
from runwatch.server import PageServer, parse_address
from runwatch.session import Session
from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.style import STYLE
from runwatch.words import plain_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<img src=x onerror=document.title='pwned'>"


@pytest.fixture
def session(tmp_path):
    """Two runs: a good one with decodes that try to be markup, and one that went to nan."""
    for name in ("good", "bad"):
        folder = tmp_path / name
        folder.mkdir()
        lines = []
        for step in range(1, 81):
            loss = math.nan if name == "bad" and step > 70 else 2 + 1 / step
            lines.append(
                {"step": step, "time": 1e9 + step, "loss": loss, "text_loss_by_time": [1.0, 2.0, 3.0]}
            )
        (folder / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        event = {
            "event": "finished" if name == "good" else "stopped",
            "at": "2001-09-09T01:50:00+00:00",
            "step": 80,
        }
        (folder / "events.jsonl").write_text(json.dumps({**event, "reason": f"ValueError: {EVIL}"}) + "\n")
        samples = {"step": 80, "samples": [{"original": "a sentence", "decoded": EVIL}]}
        (folder / "samples.jsonl").write_text(json.dumps(samples) + "\n")
    made = Session(find_runs([str(tmp_path / "good"), str(tmp_path / "bad")]), MonitorSettings())
    made.look(live=False)
    yield made
    made.close()


@pytest.fixture
def page(session):
    served = PageServer("127.0.0.1:0", interval=1)
    served.publish(session.state(curves=True))
    yield served
    served.close()


def browse(address, folder, *more):
    """The page as a browser has it after its scripts ran."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
    words = [CHROMIUM, *flags, "--virtual-time-budget=3000", *more, address]
    return subprocess.run(words, capture_output=True, text=True, timeout=200).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_runs_alerts_curves_and_decodes(page, tmp_path):
    shown = browse(page.url, tmp_path / "profile", "--dump-dom")
    assert "<title>failing · Training monitor</title>" in shown
    assert "error M101 nonfinite-loss" in shown
    assert shown.count('class="run fine"') == 1
    assert shown.count('class="run failing"') == 1
    assert shown.count("<svg") >= 3  # a curve each, and both together
    assert "from clean to noise" in shown
    assert "a sentence" in shown
    assert "<img" not in shown  # what a log says is text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_report_opens_in_a_browser(session, tmp_path):
    paths = write_report(session.state(curves=True), tmp_path / "report")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    shown = browse(paths[2].as_uri(), tmp_path / "profile", "--dump-dom")
    assert "The run is failing." in shown
    assert "<polyline" in shown
    assert "<img" not in shown
    state = json.loads(paths[0].read_text())
    assert [run["name"] for run in state["runs"]] == ["good", "bad"]
    text = paths[1].read_text()
    assert "## bad" in text
    assert "**error M101 nonfinite-loss**, steps 71 to 80, 10 times" in text
    assert "What to do: Stop and go back" in text


def test_a_log_that_is_not_there_yet_is_named(tmp_path):
    log = tmp_path / "train.log"
    session = Session(find_runs([str(log)]), MonitorSettings())
    session.look(live=True)
    assert f"waiting for {log}, which does not exist yet" in plain_text(session.state())
    log.touch()
    session.look(live=True)
    assert "waiting for the first line" in plain_text(session.state())
    session.close()


def test_no_text_of_a_run_reaches_the_report_or_a_terminal_unescaped(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    sequence = "\x1b]0;title\x07\x1b[2J"
    (folder / "training_log.jsonl").write_text('{"step": 1, "time": 1000000001, "loss": 2.0}\n')
    samples = {"step": EVIL + sequence, "samples": [{"original": sequence, "decoded": sequence + "text"}]}
    (folder / "samples.jsonl").write_text(json.dumps(samples) + "\n")
    event = {"event": "stopped", "at": "2001-09-09T01:50:00+00:00", "step": 1, "reason": f"{EVIL}{sequence}"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    session = Session(find_runs([str(folder)]), MonitorSettings())
    session.look(live=False)
    state = session.state(curves=True)
    written = "".join(path.read_text() for path in write_report(state, tmp_path / "report"))
    session.close()
    html = (tmp_path / "report" / "report.html").read_text()
    assert "<img" not in html
    assert "&lt;img" in html
    for text in (written, plain_text(state)):
        assert "\x1b" not in text
        assert "\\u001b" not in text


def ask(page, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", page.server.server_address[1], timeout=120)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_server_gives_the_state_and_nothing_else(page):
    answer, content = ask(page, "/api/state")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert json.loads(content)["health"] == "failing"
    for path in ("/../../etc/passwd", "/api", "/training_log.jsonl"):
        assert ask(page, path)[0].status == 404
    assert (
        ask(page, "/api/state", host="evil.example:80")[0].status == 403
    )  # a stranger's name that leads here
    assert ask(page, "/api/state", host="localhost:1")[0].status == 200
    assert ask(page, "/", method="POST")[0].status == 501


def test_nothing_comes_from_outside():
    for text in (HTML, SCRIPT.replace("http://www.w3.org/2000/svg", ""), STYLE):
        assert "http" not in text
        assert "@import" not in text
        assert "//" not in text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9", ("127.0.0.1", 9)), ("9000", ("127.0.0.1", 9000)), (":9000", None), ("[::1]:9", ("::1", 9)),
        ("localhost:0", ("localhost", 0)), ("0.0.0.0", ("0.0.0.0", 8377)), ("host:99999", None), ("a b", None),
        ("", None),
    ],
)  # fmt: skip
def test_addresses(text, address):
    if address is None:
        with pytest.raises(UserError, match="--serve"):
            parse_address(text)
    else:
        assert parse_address(text) == address


def test_a_port_in_use_is_told(page):
    with pytest.raises(UserError, match="choose another"):
        PageServer(f"127.0.0.1:{page.server.server_address[1]}", interval=1)
