"""The report's HTML: everything in one file but the samples, which it links to."""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ltx_trainer_plus.atomic import replacing
from ltx_trainer_plus.report.curves import Chart, charts
from ltx_trainer_plus.report.run_files import RunFiles, SampleFile
from ltx_trainer_plus.run.starts import Start

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'sha256-{script_hash}'; media-src 'self' file:; img-src 'self' file: data:">
<link rel="icon" href="data:,">
<title>{name}</title>
<style>{style}</style>
</head>
<body>
<h1>{name}</h1>
<p class="faint">{state}</p>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

_CHARTS_HEAD = """<h2>Curves</h2>
<p class="faint">Drag over a chart to zoom all of them, double-click to see the whole run again. Dashed: resumed there.
<label><input type="checkbox" id="logarithmic"> logarithmic</label>
<button type="button" id="whole">whole run</button></p>"""


def write_report(run: RunFiles, output: Path) -> None:
    """Write the page; a reader sees the old one or the whole new one. Samples are linked relative to it."""
    with replacing(output) as unfinished:
        unfinished.write_text(report_html(run, output.resolve().parent), encoding="utf-8", errors="replace")


def report_html(run: RunFiles, folder: Path) -> str:
    """The page, to lie in `folder`."""
    groups = charts(run.curves)
    sections = [_curves(groups), _samples(run.samples, folder), _starts(run.starts), _config(run.config)]
    script = (files(__package__) / "page.js").read_text(encoding="utf-8")
    return _PAGE.format(
        name=escape(run.name),
        state=escape(_state(run)),
        style=(files(__package__) / "page.css").read_text(encoding="utf-8"),
        body="\n".join(sections),
        data=_in_script(_data(run, groups)),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _state(run: RunFiles) -> str:
    steps = "" if run.steps is None else f" of {run.steps}"
    return f"Step {run.step}{steps}, as of {_time(datetime.now(UTC).timestamp())}."


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _data(run: RunFiles, groups: Sequence[Chart]) -> dict[str, Any]:
    first = min((curve[0][0] for curve in run.curves.values()), default=0)
    return {
        "range": [first, max(run.step, first + 1)],
        "resumes": sorted({start.step for start in run.starts if start.step > 0}),
        "charts": [
            {
                "curves": [
                    {"label": label, "x": [step for step, _ in curve], "y": [_rounded(value) for _, value in curve]}
                    for label, curve in chart.curves.items()
                ]
            }
            for chart in groups
        ],
    }


def _rounded(value: float | None) -> float | None:
    # A screen shows less, and the page is a third as long.
    return None if value is None else float(f"{value:.6g}")


def _in_script(data: Any) -> str:
    """JSON that cannot end the script element, whatever texts are in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _curves(groups: Sequence[Chart]) -> str:
    # The script needs its controls also where there is nothing to draw.
    head = _CHARTS_HEAD if groups else f'<div hidden>{_CHARTS_HEAD}</div><p class="faint">No step is logged yet.</p>'
    figures = "\n".join(
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption><svg role="img" '
        f'aria-label="{escape(chart.title)}"></svg><div class="legend"></div></figure>'
        for chart in groups
    )
    return f'{head}\n<div class="charts">\n{figures}\n</div>'


def _samples(samples: Sequence[SampleFile], folder: Path) -> str:
    if not samples:
        return '<h2>Samples</h2>\n<p class="faint">None yet.</p>'
    parts = ["<h2>Samples</h2>"]
    rows = 0
    for number, numbered in groupby(samples, key=lambda sample: sample.number):
        by_prompt: dict[str, list[SampleFile]] = {}
        for sample in numbered:
            by_prompt.setdefault(sample.prompt, []).append(sample)
        for prompt, row in by_prompt.items():
            rows += 1
            figures = "\n".join(_sample(sample, folder) for sample in row)
            together = f'<button type="button" class="together" data-row="row-{rows}">play together (silent)</button>'
            parts.append(
                f"<h3>{number}. {escape(prompt) or 'prompt unknown'}</h3>\n{together}\n"
                f'<div class="samples" id="row-{rows}">\n{figures}\n</div>'
            )
    return "\n".join(parts)


def _sample(sample: SampleFile, folder: Path) -> str:
    # Of real paths, since a link to the run folder would lead ".." elsewhere.
    source = escape(quote(Path(os.path.relpath(sample.path.resolve(), folder)).as_posix()))
    shown = {
        "video": f'<video controls loop playsinline preload="none" src="{source}"></video>',
        "audio": f'<audio controls preload="none" src="{source}"></audio>',
        "image": f'<img loading="lazy" alt="step {sample.step}" src="{source}">',
    }[sample.kind]
    notes = ["given as a reference"] if sample.is_reference else []
    notes += ["made before the run was resumed at an earlier step"] if sample.is_older else []
    caption = ", ".join([f"step {sample.step}", *notes])
    css = ' class="older"' if sample.is_older else ""
    return f"<figure{css}>{shown}<figcaption>{caption}</figcaption></figure>"


def _starts(starts: Sequence[Start]) -> str:
    if not starts:
        return '<h2>Starts</h2>\n<p class="faint">This run folder does not say when it was started and resumed.</p>'
    rows = "\n".join(f"<tr>{''.join(_start_cells(start))}</tr>" for start in starts)
    head = "<tr><th>started</th><th>after step</th><th>from</th><th>changed since it was saved</th></tr>"
    return f"<h2>Starts</h2>\n<table>\n{head}\n{rows}\n</table>"


def _start_cells(start: Start) -> Iterator[str]:
    changes = "<br>".join(escape(str(change)) for change in start.changes)
    nothing = "nothing" if start.step else ""
    for cell in (_time(start.time), str(start.step), start.weights or "the base model"):
        yield f"<td>{escape(cell)}</td>"
    yield f"<td>{changes or nothing}</td>"


def _config(text: str) -> str:
    shown = f'<pre id="config">{escape(text)}</pre>' if text else '<p class="faint">There is none.</p>'
    return f"<h2>Configuration</h2>\n{shown}"
