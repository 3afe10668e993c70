"""Writes run folders that are true to the layout, from a schedule that repeats a few phases.

rollout (3 s, all nodes) ─► train (2.4 s, reserved) + explore (spot) ─► publish ─► every 4th: evaluate
"""

import io
import json
import math
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw

from spotlight_core import events as ev
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

BEGAN = 1_780_000_000.0
NODES = ("reserved-0", "spot-0", "spot-1")
# iteration: (phase, node, cause); the node returns two iterations later
STRIKES = {
    2: ("rollout", "spot-0", "notice"),
    5: ("explore", "spot-1", "notice"),
    8: ("rollout", "spot-0", "killed"),
    11: ("rollout", "spot-1", "notice"),
}
RECIPE = {
    "name": "quickstart",
    "rng_seed": 0,
    "iterations": 24,
    "loss": {"type": "nft"},
    "reward": {"type": "ocr"},
    "evaluation": {"every": 4, "target": 0.9, "held_out_reward": {"type": "template"}},
    "prices": {"reserved": 10.08, "spot": 2.87},
}


class Journal:
    """Words with their times, and the nodes' own logs beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: list[tuple[float, ev.Event | ev.Command]] = []
        self.incarnations = dict.fromkeys(NODES, -1)
        self.leases = 0

    def node(self, event: str, node: str, at: float, cause: str = "") -> None:
        if event == "start":
            self.incarnations[node] += 1
        incarnation = self.incarnations[node]
        pool = node.split("-")[0]
        record = {"event": event, "node": node, "incarnation": incarnation, "pool": pool, "gpus": 1, "at": at}
        log = self.folder / "nodes" / f"{node}-{incarnation}.jsonl"
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"by": "node"}) + "\n")
        key = {"node": node, "incarnation": incarnation}
        if event == "start":
            self.words.append((at + 0.01, ev.NodeJoined(**key, pool=pool, gpus=1, started_at=at)))
        else:
            self.words.append((at + 0.01, ev.Lost(**key, cause=cause, stopped_at=at)))

    def notice(self, node: str, at: float) -> None:
        notice = ev.Notice(node=node, incarnation=self.incarnations[node], seconds_left=20.0)
        self.words.append((at, notice))

    def start(self, node: str, request: GenerationRequest, at: float, step: int = 0) -> str:
        self.leases += 1
        lease = f"1/{self.leases}"
        group = ev.SPGroup(node=node, incarnation=self.incarnations[node])
        start = ev.Start(group=group, lease=lease, request=request, from_denoise_step=step)
        self.words += [(at, ev.Timer(id=f"pull/{lease}")), (at, start)]
        return lease

    def finish(self, lease: str, request: GenerationRequest, at: float) -> None:
        self.words.append((at, ev.Finished(lease=lease, request=request.id, ref="ref", digest="d")))

    def commit(self, lease: str, request: GenerationRequest, at: float, step: int) -> None:
        done = {"lease": lease, "request": request.id, "ref": "ref", "digest": "d"}
        self.words.append((at, ev.Committed(**done, next_denoise_step=step, released=True)))

    def phase(self, name: ev.Phase, iteration: int, at: float) -> None:
        self.words.append((at, ev.PhaseChanged(phase=name, iteration=iteration)))

    def save(self) -> None:
        lines = []
        for seq, (at, word) in enumerate(sorted(self.words, key=lambda item: item[0])):
            stamped = word.stamped(at, seq, 1) if isinstance(word, ev.Event) else word
            lines.append(ev.encode(stamped).decode())
        (self.folder / "journal.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def request(iteration: int, kind: Kind, number: int) -> GenerationRequest:
    return GenerationRequest(
        id=f"{iteration}/{kind}/{iteration}.{number}/0",
        kind=kind,
        prompts=(Prompt(occurrence=f"{iteration}.{number}", text='A sign that reads "407"'),),
        seeds=(0, 1),
        policy=PolicyVersion(label="old", number=iteration, digest="d"),
        fidelity=Fidelity(denoise_steps=10),
    )


def play(journal: Journal, nodes: Iterable[str], iteration: int, kind: Kind, count: int, at: float) -> float:
    """Requests one after the other on every node that is there; a strike interrupts the first one."""
    phase, struck, cause = STRIKES.get(iteration, ("", "", ""))
    free = dict.fromkeys(nodes, at)
    waiting: tuple[GenerationRequest, int, str] | None = None
    number = 0
    while number < count or waiting:
        node = min(free, key=lambda name: (free[name], name))
        begin = free[node] + 0.02
        if waiting and node != waiting[2]:
            work, step, _ = waiting
            waiting = None
        else:
            work, step = request(iteration, kind, number), 0
            number += 1
        lease = journal.start(node, work, begin, step)
        seconds = (0.9 + 0.03 * (number % 4)) * (10 - step) / 10 * (0.55 if kind == "explore" else 1.0)
        if node == struck and kind == phase:
            middle = begin + 0.4 * seconds
            if cause == "notice":
                journal.notice(node, middle)
                journal.commit(lease, work, middle + 0.08, 5)
            journal.node("stop", node, middle + 0.2, "released" if cause == "notice" else "killed")
            waiting = (work, 5 if cause == "notice" else 0, node)
            # Nobody can take the request before the run knows of the loss.
            free = {name: max(end, middle + 0.25) for name, end in free.items() if name != node}
            struck = ""
            continue
        free[node] = begin + seconds
        journal.finish(lease, work, free[node])
    return max(free.values())


def score(updates: int) -> float:
    return 0.95 - 0.39 * math.exp(-updates / 6.5) + 0.008 * math.sin(updates * 2.1)


def evaluation(updates: int, images: int) -> dict[str, object]:
    policy = {"label": "ema", "number": updates, "digest": "d"}
    held_out = score(updates) - 0.05
    figures = {"score": score(updates), "held_out": held_out, "grey_share": 0.116 - 0.0004 * updates}
    return {"policy": policy, "images": images, **figures}


def metrics(iteration: int, usd: float) -> dict[str, float]:
    wave = math.sin(iteration * 1.7)
    values = {"cost/usd_total": usd, "train/reward_mean": score(iteration) - 0.08 + 0.02 * wave}
    values |= {"seconds/rollout": 3.1, "seconds/train": 2.4, "seconds/explore": 2.9, "seconds/publish": 0.3}
    if iteration:
        values["explore/std_selected"] = 0.38 - 0.007 * iteration + 0.02 * wave
        values["explore/std_unexplored"] = 0.27 - 0.006 * iteration - 0.03 * wave
    if iteration % 4 == 3:
        values["explore/rank_correlation"] = 0.8 + 0.05 * wave
    return values


def grid(updates: int) -> bytes:
    """Eight drawn tiles with captions, as a PNG."""
    image = Image.new("RGB", (8 * 96, 2 * 72), "white")
    draw = ImageDraw.Draw(image)
    for tile in range(16):
        x, y = tile % 8 * 96, tile // 8 * 72
        draw.rectangle((x + 6, y + 6, x + 90, y + 48), fill="#202020")
        draw.text((x + 30, y + 20), str(100 + tile * 37 + (0 if updates else tile % 3)), fill="white")
        draw.text((x + 30, y + 54), str(100 + tile * 37), fill="#666666")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def usd_so_far(journal: Journal, at: float) -> float:
    """Dollars from the nodes' own logs, in plain arithmetic."""
    total = 0.0
    for log in (journal.folder / "nodes").glob("*.jsonl"):
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        end = min(at, records[1]["at"]) if len(records) > 1 else at
        total += RECIPE["prices"][records[0]["pool"]] * max(0.0, end - records[0]["at"]) / 3600
    return total


def write_run(folder: Path, iterations: int = 24) -> Path:
    """A whole run folder of ``iterations`` of the recipe's 24; with fewer, a run cut off there."""
    for place in ("nodes", "images"):
        (folder / place).mkdir(parents=True)
    journal = Journal(folder)
    for node in NODES:
        journal.node("start", node, BEGAN)
    at = play(journal, NODES, 0, "evaluate", 6, BEGAN + 1.0)
    lines = [{"iteration": -1, "at": at, "metrics": {}, "evaluation": evaluation(0, 400)}]
    away: dict[str, int] = {}
    for iteration in range(iterations):
        for node in [node for node, back in away.items() if back == iteration]:
            del away[node]
            journal.node("start", node, at)
        journal.phase("rollout", iteration, at + 0.02)
        there = [node for node in NODES if node not in away]
        phase, struck, _ = STRIKES.get(iteration, ("", "", ""))
        at = play(journal, there, iteration, "rollout", 8, at + 0.02)
        if phase == "rollout":
            away[struck] = iteration + 2
        journal.phase("train", iteration, at + 0.1)
        spots = [node for node in NODES[1:] if node not in away]
        explored = play(journal, spots, iteration, "explore", 3 * len(spots) + 2, at + 0.12)
        if phase == "explore":
            away[struck] = iteration + 2
        journal.phase("publish", iteration, at + 2.5)
        at = max(explored, at + 2.5) + 0.3
        found = None
        if iteration % 4 == 3:
            journal.phase("evaluate", iteration, at)
            there = [node for node in NODES if node not in away]
            at = play(journal, there, iteration, "evaluate", 3, at)
            found = evaluation(iteration + 1, 400 if iteration == 23 else 96)
        usd = usd_so_far(journal, at)
        lines.append(
            {"iteration": iteration, "at": at, "metrics": metrics(iteration, usd), "evaluation": found}
        )
    last = [node for node in NODES if node not in away]
    close(journal, last if iterations == RECIPE["iterations"] else [], at + 0.4)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "iterations.jsonl").write_text(text, encoding="utf-8")
    return folder


def close(journal: Journal, nodes: Iterable[str], at: float) -> None:
    """Stop the nodes of a run that ended (a cut-off one stops none), and write the rest of its files."""
    folder = journal.folder
    for node in nodes:
        journal.node("stop", node, at, "shutdown")
        (folder / "images" / "final.png").write_bytes(grid(24))
    (folder / "images" / "base.png").write_bytes(grid(0))
    journal.save()
    (folder / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"mlflow_run_id": "f00d", "epoch": 1}), encoding="utf-8")
