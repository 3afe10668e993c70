"""The coordinator's service over real HTTP, spoken to as any program could."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from spotlight_core.arrays import from_bytes
from spotlight_core.errors import BadInputError, FleetError, ScorerError
from spotlight_core.events import Cancelled, PhaseChanged, Submitted
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.endpoints import HttpServer
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.service import KEPT_SUBMISSIONS, Service
from spotlight_core.executor.wire import Outcomes, Status, Submit, Told, Whereabouts, decode_error, to_json
from spotlight_core.journal import read_words
from tests.core.executor.coordinator_rig import Nodes, Straight, request, until

TOKEN, EPOCH = "s3cret", 4


class Desk:
    """A service on its server, and what its journal says."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal.jsonl"
        inbox = Inbox(EPOCH)
        nodes = Nodes(inbox)
        self.coordinator = Coordinator(
            decider=Straight(), nodes=nodes, inbox=inbox, journal=Journal(self.journal)
        )
        self.coordinator.start()
        self.service = Service(
            coordinator=self.coordinator,
            results=nodes.results,
            sizes=lambda: {"results_bytes": nodes.results.bytes_held()},
            epoch=EPOCH,
            ready=lambda: True,
        )
        self.server = HttpServer(self.service, TOKEN)
        self.server.start()
        self.client = httpx.Client(
            base_url=self.server.url,
            headers={"Authorization": f"Bearer {TOKEN}", "Spotlight-Epoch": str(EPOCH)},
            timeout=30,
        )

    def submit(self, name: str, *requests: Any) -> httpx.Response:
        return self.client.post("/submit", content=to_json(Submit(submission=name, requests=requests)))

    def settled(self, name: str, after: int) -> list[tuple[str, str]]:
        answer = self.client.get("/settled", params={"submission": name, "after": after})
        assert answer.status_code == 200
        outcomes = msgspec.json.decode(answer.content, type=Outcomes)
        return [(settle.request, settle.outcome) for settle in outcomes.settled]

    def words(self, kind: type) -> list[Any]:
        return [word for word in read_words(self.journal) if isinstance(word, kind)]

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.coordinator.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def said(answer: httpx.Response) -> str:
    return decode_error(answer.content, answer.status_code).problem


def test_a_request_goes_in_and_its_result_comes_out(desk: Desk) -> None:
    ref = "3/rollout/p 1?/0"
    assert desk.submit("s", request(ref, seeds=(5, 6))).status_code == 200
    assert desk.settled("s", 0) == [(ref, "done")]

    path = "/results/3%2Frollout%2Fp%201%3F%2F0"
    payload = desk.client.get(path).content
    np.testing.assert_array_equal(from_bytes(payload)["seeds"], [5, 6])
    assert desk.client.get(path).content == payload  # it stays until the client says that it has it
    assert [desk.client.delete(path).status_code for _ in range(2)] == [200, 200]
    gone = desk.client.get(path)
    assert (gone.status_code, said(gone)) == (404, f"there is no result {ref}")


def test_the_journal_holds_the_very_requests(desk: Desk) -> None:
    sent = request("a"), request("b", kind="evaluate")
    desk.submit("s", *sent)
    until(lambda: len(desk.words(Submitted)) == 1)

    assert desk.words(Submitted)[0].requests == sent


def test_what_is_said_twice_happens_once(desk: Desk) -> None:
    for _ in range(2):
        assert desk.submit("s", request("a")).status_code == 200
        body = {"number": 1, "phase": "train", "iteration": 2}
        assert desk.client.post("/phase", json=body).status_code == 200
    desk.client.post("/phase", json={"number": 2, "phase": "remainder", "iteration": 2})
    until(lambda: len(desk.words(PhaseChanged)) == 2)

    assert len(desk.words(Submitted)) == 1
    assert [(word.phase, word.iteration) for word in desk.words(PhaseChanged)] == [
        ("train", 2),
        ("remainder", 2),
    ]


def test_a_request_under_way_is_refused_and_its_first_client_hears_of_its_end(desk: Desk) -> None:
    assert desk.submit("s", request("a", kind="explore")).status_code == 200
    again = desk.submit("t", request("b"), request("a", kind="explore"))
    assert (again.status_code, said(again)) == (400, "request a is under way already")

    desk.client.post("/cancel", json={"requests": ["a"], "reason": "late"})
    assert desk.settled("s", 0) == [("a", "cancelled")]
    assert desk.submit("u", request("a"), request("b")).status_code == 200  # it has ended
    until(lambda: sorted(desk.settled("u", 0)) == [("a", "done"), ("b", "done")])


def test_outcomes_are_told_from_any_number_on_as_often_as_asked(desk: Desk) -> None:
    desk.submit("s", request("a"), request("b"))
    until(lambda: len(desk.settled("s", 0)) == 2)

    assert desk.settled("s", 0) == [("a", "done"), ("b", "done")]
    assert desk.settled("s", 1) == [("b", "done")]
    assert desk.settled("s", 2) == []


def test_a_question_waits_for_its_answer(desk: Desk) -> None:
    desk.submit("s", request("a", kind="explore"))
    body = {"requests": ["a"], "reason": "exploration passed its deadline"}
    later = threading.Timer(0.2, lambda: desk.client.post("/cancel", json=body))
    later.start()

    assert desk.settled("s", 0) == [("a", "cancelled")]
    later.join()
    assert [word.reason for word in desk.words(Cancelled)] == ["exploration passed its deadline"]


def test_a_failure_is_told_after_what_came_before_it(desk: Desk) -> None:
    desk.submit("s", request("a"), request("alarm"), request("b"))
    until(lambda: desk.coordinator.failure is not None)

    failed = desk.client.get("/settled", params={"submission": "s", "after": 0})
    assert (failed.status_code, said(failed)) == (503, "two results of alarm differ")
    assert desk.submit("t", request("c")).status_code == 503
    status = msgspec.json.decode(desk.client.get("/status").content, type=Status)
    assert status.failure is not None
    assert (status.failure.kind, status.failure.problem) == ("FleetError", "two results of alarm differ")


@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}ö"])
def test_nobody_is_answered_without_the_token(desk: Desk, header: str | None) -> None:
    headers = {"Spotlight-Epoch": str(EPOCH)}
    headers |= {} if header is None else {"Authorization": header.encode("latin-1")}  # type: ignore[dict-item]
    for method, path in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/close"), ("GET", "/nothing")):
        answer = httpx.request(method, desk.server.url + path, headers=headers)
        assert (answer.status_code, said(answer)) == (401, "the coordinator's token is missing or wrong")
    assert not desk.service.closing.is_set()


@pytest.mark.parametrize("epoch", ["3", "5", "", "x", None])
def test_a_client_of_another_epoch_is_turned_away(desk: Desk, epoch: str | None) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"} | ({} if epoch is None else {"Spotlight-Epoch": epoch})
    heard_at = desk.service.heard_at
    for path in ("/close", "/submit", "/alive"):
        answer = httpx.post(desk.server.url + path, headers=headers, content=b"{}")
        assert answer.status_code == 409
        assert said(answer) == f"this is the coordinator of epoch 4, not {epoch}"
    assert not desk.service.closing.is_set()
    assert desk.service.heard_at == heard_at


def test_metrics_may_be_scraped_without_an_epoch_and_keep_no_node_alive(desk: Desk) -> None:
    desk.submit("s", request("a"), request("b", kind="explore"))
    until(lambda: desk.settled("s", 0) == [("a", "done")])
    desk.client.post("/phase", json={"number": 1, "phase": "train", "iteration": 2})
    heard_at = desk.service.heard_at
    headers = {"Authorization": f"Bearer {TOKEN}"}

    answer = httpx.get(f"{desk.server.url}/metrics", headers=headers)

    lines = answer.text.splitlines()
    assert answer.headers["content-type"].startswith("text/plain")
    assert "spotlight_iteration 2" in lines
    [held] = [line for line in lines if line.startswith("spotlight_results_bytes ")]
    assert float(held.split()[1]) > 16  # two seeds of eight bytes, and their names
    assert desk.service.heard_at == heard_at
    desk.client.post("/alive")
    assert desk.service.heard_at > heard_at


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "problem"),
    [
        ("POST", "/submit", b"{", 400, "cannot be read"),
        ("POST", "/submit", b'{"submission":"s","requests":[{"id":"a"}]}', 400, "missing required field"),
        ("POST", "/submit", b'{"submission":"s","requests":[],"more":1}', 400, "unknown field"),
        ("POST", "/phase", b'{"number":1,"phase":"lunch","iteration":0}', 400, "lunch"),
        ("POST", "/nothing", b"{}", 404, "there is no POST /nothing"),
        ("GET", "/submit", b"", 404, "there is no GET /submit"),
        ("DELETE", "/status", b"", 404, "there is no DELETE /status"),
        ("GET", "/settled?submission=none", b"", 404, "there is no submission none"),
        ("GET", "/settled?submission=s&after=-1", b"", 400, "after = '-1' is no number"),
    ],
)
def test_what_cannot_be_done_is_said(
    desk: Desk, method: str, path: str, body: bytes, status: int, problem: str
) -> None:
    answer = desk.client.request(method, path, content=body)

    assert answer.status_code == status
    assert problem in said(answer)
    assert desk.client.get("/status").status_code == 200  # and the connection is as good as before


def test_a_body_that_is_too_large_or_of_no_known_length_is_not_read(desk: Desk) -> None:
    statuses = []
    for header in (f"Content-Length: {2**40}", "Content-Length: x", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", int(desk.server.url.rsplit(":")[-1]))) as raw:
            token = f"Authorization: Bearer {TOKEN}\r\nSpotlight-Epoch: {EPOCH}"
            raw.sendall(f"POST /submit HTTP/1.1\r\nHost: x\r\n{token}\r\n{header}\r\n\r\n".encode())
            answer = b"".join(iter(lambda raw=raw: raw.recv(1 << 16), b""))  # until it hangs up
            statuses.append(answer.split()[1])

    assert statuses == [b"413", b"400", b"411"]


def test_only_the_last_submissions_are_kept(desk: Desk) -> None:
    for number in range(KEPT_SUBMISSIONS + 3):
        desk.submit(f"s{number}", request(f"r{number}"))
        desk.settled(f"s{number}", 0)

    assert desk.client.get("/settled", params={"submission": "s0"}).status_code == 404
    assert desk.settled(f"s{KEPT_SUBMISSIONS}", 0) == [(f"r{KEPT_SUBMISSIONS}", "done")]


def test_errors_cross_as_what_they_were() -> None:
    assert type(Told.of(BadInputError("a", "b")).error()) is BadInputError
    assert type(Told.of(ScorerError("a", "b")).error()) is ScorerError
    assert str(Told.of(BadInputError("a", "b")).error()) == "a: b"
    assert type(Told.of(KeyError("x")).error()) is FleetError
    assert type(Told(kind="Exception", problem="a", remedy="b").error()).__name__ == "SpotlightError"
    assert said(httpx.Response(502, content=b"<html>")) == "the coordinator answered 502"


def test_the_token_shows_in_no_repr() -> None:
    where = Whereabouts(epoch=1, pid=2, url="http://127.0.0.1:3", token=TOKEN)

    assert TOKEN not in repr(where)
    assert json.loads(to_json(where))["token"] == TOKEN
