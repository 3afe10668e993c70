"""The report's words and tables as HTML.  Everything from a file passes through ``html.escape``."""

import base64
import html
import json
import statistics
from collections.abc import Iterable, Sequence

from tasks.report_data import PairedMean, RunRecord, overlap_share, paired_mean
from tasks.report_timeline import ACTIVITIES, closed_pause

PHASES = ("rollout", "reward", "train", "explore", "remainder", "publish", "evaluate", "iteration")
REWARDS = {
    "ocr": "OCR score",
    "template": "template match",
    "jpeg_size": "JPEG size",
    "function": "reward",
    "geneval": "GenEval",
    "pickscore": "PickScore",
    "clip_score": "CLIP score",
    "vlm_judge": "judge's grade",
    "weighted": "weighted score",
}
LOSSES = {"nft": "DiffusionNFT", "grpo": "Flow-GRPO", "grpo_guard": "GRPO-Guard"}


def esc(value: object) -> str:
    return html.escape(str(value))


def usd(value: float | None) -> str:
    """Dollars with three significant digits below ten."""
    if value is None:
        return "–"
    if value >= 100:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 1 else f"${value:.3f}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: range = range(0)) -> str:
    """A table whose cells are HTML already; columns in ``numeric`` align right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=num' if index in numeric else ''}>{value}</{tag}>"
            for index, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def reward_name(run: RunRecord) -> str:
    kind = run.recipe.get("reward", {}).get("type", "")
    return REWARDS.get(kind, "score")


def held_out_name(run: RunRecord) -> str:
    kind = run.recipe.get("evaluation", {}).get("held_out_reward", {}).get("type", "")
    return REWARDS.get(kind, "held-out score")


def summary(run: RunRecord) -> str:
    """The run in one sentence."""
    loss = LOSSES.get(run.recipe.get("loss", {}).get("type", ""), "RL")
    pools = list({part.node: part.pool for part in run.segments}.values())
    counts = [(pool, pools.count(pool)) for pool in ("reserved", "spot", "on_demand")]
    nodes = [plural(count, f"{pool.replace('_', '-')} node") for pool, count in counts if count]
    first = ", ".join(nodes[:-1])
    fleet = f" on {first} and {nodes[-1]}" if first else f" on {nodes[-1]}" if nodes else ""
    took = f" in {duration(run.now - run.began)}" if run.now > run.began else ""
    return f"{loss}, {plural(run.done, 'iteration')}{fleet}{took}."


def _tile(label: str, value: str, *parts: str) -> str:
    note = " · ".join(part.replace(" ", "&nbsp;") if len(parts) > 1 else part for part in parts)
    return (
        f'<div class="tile"><h3>{esc(label)}</h3><p class="big">{value}</p><p class="note">{note}</p></div>'
    )


def _before_after(run: RunRecord, value: str) -> str:
    if not run.points:
        return "–"
    first, last = getattr(run.points[0], value), getattr(run.points[-1], value)
    if len(run.points) == 1:
        return f"{first:.2f}"
    return f'<span class="from">{first:.2f}</span><span class="arrow" aria-label="to">→</span>{last:.2f}'


def tiles(run: RunRecord) -> str:
    """The headline figures."""
    images = f"{run.points[-1].images} images of unseen prompts" if run.points else "not evaluated yet"
    crossing, target = run.crossing, run.target
    reached = "–" if crossing is None else f"{crossing.iterations} <small>iterations</small>"
    if crossing is not None:
        reached_note = f"{usd(crossing.usd)} spent by then"
    else:
        reached_note = "not held in two evaluations" if run.points else "not evaluated yet"
    pools = sorted({part.pool for part in run.segments}, reverse=True)
    split = [f"{esc(pool)} {usd(run.ledger.usd(run.now, pool))}" for pool in pools] or ["no ledger"]
    hits = run.ledger.preemptions
    noticed = sum(hit.cause == "notice" for hit in hits)
    outcomes = [item.outcome for hit in hits for item in hit.in_flight]
    resumed, recomputed = outcomes.count("resumed"), outcomes.count("recomputed")
    went_on = [f"{resumed} resumed midway", f"{recomputed} recomputed"]
    if len(outcomes) > resumed + recomputed:
        went_on.append(f"{len(outcomes) - resumed - recomputed} other")
    return "".join(
        (
            _tile(reward_name(run), _before_after(run, "score"), images),
            _tile(held_out_name(run), _before_after(run, "held_out"), "never trained on"),
            _tile(f"target {target:g} reached in" if target is not None else "target", reached, reached_note),
            _tile("cost", usd(run.usd) if run.segments else "–", *split),
            _tile("preemptions", str(len(hits)), f"{noticed} with notice", f"{len(hits) - noticed} without"),
            _tile("interrupted requests", str(len(outcomes)), *went_on),
        )
    )


def notes(run: RunRecord) -> str:
    """What the folder lacks."""
    if not run.missing:
        return ""
    items = "".join(f"<li>{esc(note[0].upper() + note[1:])}.</li>" for note in run.missing)
    return f'<aside class="notes"><strong>This report is incomplete.</strong><ul>{items}</ul></aside>'


def parts(run: RunRecord) -> str:
    """Each of several rewards over the rollouts, first and last iteration; empty for one reward."""
    if not run.iterations:
        return ""
    first, last = (run.iterations[place]["metrics"] for place in (0, -1))
    named = [key.removeprefix("reward/") for key in first if key.startswith("reward/")]
    changes = [
        f"{esc(REWARDS.get(name, name))} {first[f'reward/{name}']:.3f} → {last[f'reward/{name}']:.3f}"
        for name in named
        if f"reward/{name}" in last
    ]
    return f'<p class="note">In the rollouts: {" · ".join(changes)}.</p>' if changes else ""


def pictures(run: RunRecord) -> str:
    """The image grids before and after, and the check against speckle."""
    found = []
    after = f"after {plural(run.points[-1].iterations, 'iteration')}" if run.points else "after training"
    for data, caption in ((run.base_image, "before training"), (run.final_image, after)):
        if data is None:
            found.append(
                f'<figure><div class="absent">no images</div><figcaption>{esc(caption)}</figcaption></figure>'
            )
            continue
        source = base64.b64encode(data).decode("ascii")
        image = f'<img src="data:image/png;base64,{source}" alt="Grid of generated images {esc(caption)}">'
        found.append(f"<figure>{image}<figcaption>{esc(caption)}</figcaption></figure>")
    grey = ""
    # The embedded model draws ink on paper; a photograph is grey throughout.
    digits = run.recipe.get("model", {}).get("type", "tiny") == "tiny"
    if digits and len(run.points) > 1 and run.points[0].grey_share:
        first, last = run.points[0].grey_share, run.points[-1].grey_share
        change = f"Grey pixels {first:.3f} → {last:.3f} (× {last / first:.2f})"
        grey = f'<p class="note">{change}: speckle that fools a reader would show here.</p>'
    return f'<div class="pair">{"".join(found)}</div>{grey}'


def timeline_words(run: RunRecord) -> str:
    """What the timeline shows, measured."""
    words = []
    share = overlap_share(run.segments)
    if share is not None:
        words.append(f"{share:.0%} of the exploration ran while reserved nodes trained.")
    means = [
        f"{phase} {statistics.fmean(seconds):.1f}"
        for phase in PHASES
        if (seconds := [value for _, value in run.series(f"seconds/{phase}")])
    ]
    if means:
        words.append(f"Mean seconds by phase: {' · '.join(means)}.")
    if run.segments:
        pause = f"{closed_pause(run):.2g} s"
        words.append(
            f"The whole run is drawn with pauses under {pause} closed; zoom in to see every request."
        )
    return "".join(f"<p>{word}</p>" for word in words)


def _stripe(activity: str, share: float) -> str:
    style = f"width:{100 * share:.3f}%;background:var(--{activity})"
    return f'<span style="{style}" title="{activity} {share:.1%}"></span>'


def money(run: RunRecord) -> str:
    """The ledger by pool."""
    if not run.segments:
        return "<p>No ledger: nothing was journalled.</p>"
    unit, name = (60.0, "GPU-min") if run.now - run.began < 7200 else (3600.0, "GPU-h")
    shown = [activity for activity in ACTIVITIES if any(part.activity == activity for part in run.segments)]
    rows, bars = [], []
    for pool in sorted({part.pool for part in run.segments}):
        parts = [part for part in run.segments if part.pool == pool]
        time = {a: sum(p.gpus * (p.end - p.start) for p in parts if p.activity == a) for a in shown}
        total = sum(time.values())
        nodes = len({(part.node, part.incarnation) for part in parts})
        price = run.ledger.prices.usd_per_hour(pool)
        cells = [f"{time[activity] / unit:.2f}" for activity in shown]
        cost = run.ledger.usd(run.now, pool)
        rows.append(
            [
                esc(pool),
                str(nodes),
                f"{total / unit:.2f}",
                *cells,
                f"{price:.2f}",
                f"<strong>{cost:.4f}</strong>",
            ]
        )
        stripes = "".join(_stripe(activity, time[activity] / total) for activity in shown if total)
        bars.append(f'<div class="bar"><b>{esc(pool)}</b><div class="stripes">{stripes}</div></div>')
    head = ["pool", "node lives", f"billed {name}", *shown, "USD/GPU-h", "USD"]
    keys = "".join(f'<li><i style="background:var(--{a})"></i>{a}</li>' for a in shown)
    total_row = ["all", "", "", *[""] * len(shown), "", f"<strong>{run.usd:.4f}</strong>"]
    words = (
        "<p>The nodes' own time at the recipe's prices; every node is billed from allocation to "
        "revocation, idle or not.</p>"
    )
    ledger = table(head, [*rows, total_row], range(1, len(head)))
    return f'{"".join(bars)}<ul class="keys">{keys}</ul>{ledger}{words}'


def contrast_words(run: RunRecord) -> str:
    """How much more the selected groups differ than plain ones."""
    contrast = paired_mean(run, "explore/std_selected", "explore/std_unexplored")
    if contrast is None:
        return "<p>Exploration was off, or too little was measured.</p>"
    return f"<p>Selected minus plain, paired by iteration: {_interval(contrast)}.</p>{_selection(run)}"


def _selection(run: RunRecord) -> str:
    """What selecting extremes does to the objective."""

    def mean(metric: str) -> float | None:
        values = [value for _, value in run.series(f"explore/{metric}")]
        return statistics.fmean(values) if values else None

    words = []
    chosen, left = mean("reward_selected"), mean("reward_unselected")
    if chosen is not None and left is not None:
        words.append(
            f"Mean exploration reward of selected seeds {chosen:.3f}, of those left out {left:.3f}: a "
            "group's mean is that of its extremes."
        )
    levels, tied = mean("levels"), mean("tied_share")
    if levels is not None and tied is not None:
        words.append(
            f"A prompt's candidates have {levels:.1f} different rewards; for {tied:.0%} of the prompts equal "
            "rewards were told apart by the seed's number."
        )
    selected, plain = mean("diversity_selected"), mean("diversity_unexplored")
    if selected is not None and plain is not None:
        words.append(
            f"Pixels of a group differ by {selected:.3f} (std) where seeds were selected, by {plain:.3f} "
            "where they are plain."
        )
    return f"<p>{' '.join(words)}</p>" if words else ""


def correlation_words(run: RunRecord) -> str:
    """Whether exploration's ranking of seeds, under the weights before, can be trusted."""
    skipped = round(sum(value for _, value in run.series("explore/audits_skipped")))
    without = f" Skipped for constant rewards: {skipped}." if skipped else ""
    audits = [value for _, value in run.series("explore/rank_correlation")]
    if not audits:
        return f"<p>No audit gave a correlation.{without}</p>"
    mean = f"<b>{statistics.fmean(audits):.2f}</b> over {plural(len(audits), 'audit')}"
    return f"<p>Spearman of exploration against rollout, mean {mean}.{without}</p>"


def _interval(value: PairedMean) -> str:
    return f"<b>{value.mean:+.3f}</b> (95 % {value.low:+.3f} to {value.high:+.3f}, {value.pairs} iterations)"


def comparison(run: RunRecord, baseline: RunRecord | None) -> str:
    """Cost to the target against a baseline: what iterations and what dollars per iteration contribute."""
    if baseline is None:
        return ""
    ours, theirs = run.crossing, baseline.crossing
    rows = [
        [
            esc(one.name),
            "–" if at is None else str(at.iterations),
            "–" if at is None else usd(at.usd),
            "–" if at is None or not at.usd or not at.iterations else usd(at.usd / at.iterations),
        ]
        for one, at in ((run, ours), (baseline, theirs))
    ]
    words = "<p>One of the runs did not hold its target in two evaluations, so costs cannot be compared.</p>"
    if ours and theirs and ours.usd and theirs.usd and ours.iterations and theirs.iterations:
        iterations = ours.iterations / theirs.iterations
        total = ours.usd / theirs.usd
        words = (
            f"<p>Cost to the target × {total:.2f} = iterations × {iterations:.2f}, times dollars per "
            f"iteration × {total / iterations:.2f}.</p>"
        )
    head = ["run", "iterations to target", "USD to target", "USD per iteration"]
    return f"<section><h2>Against {esc(baseline.name)}</h2>{table(head, rows, range(1, 4))}{words}</section>"


def recipe(run: RunRecord) -> str:
    """The resolved recipe and the run's identifiers."""
    if not run.recipe:
        return "<p>No recipe was saved.</p>"
    text = esc(json.dumps(run.recipe, indent=2))
    facts = [[esc(key), f"<code>{esc(value)}</code>"] for key, value in sorted(run.facts.items())]
    shown = table(["fact", "value"], facts) if facts else ""
    return (
        f"<details><summary>Resolved recipe</summary><pre>{text}</pre></details>"
        f"<details><summary>Run facts</summary>{shown}</details>"
    )
