"""scripts/benchmark.py and scripts/gpu_check.py from start to end, small."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.launch import ROOT, run


def test_the_benchmark_compares_ddp_with_a_bare_loop_and_writes_traces(tmp_path: Path) -> None:
    report, traces = tmp_path / "report.json", tmp_path / "traces"
    finished = run(
        [
            *(sys.executable, str(ROOT / "scripts/benchmark.py"), "--bench", "cpu", "--processes", "1", "2"),
            *("--only", "ddp x2, bare", "--rounds", "2", "--steps", "2", "--blocks", "1"),
            *("--json", str(report), "--profile", str(traces)),
        ],
        timeout=400,
    )
    found = json.loads(report.read_text())
    assert [row["name"] for row in found["results"]] == ["ddp x2, bare"]
    row = found["results"][0]
    assert row["quartiles"][0] <= row["step_seconds"] <= row["quartiles"][1]
    assert found["machine"]["cores"] >= 1
    assert "ddp x2, bare" in finished.output
    assert row["memory_bytes"] > 0
    assert row["compile_seconds"] is None
    assert_perfetto_opens(json.loads((traces / "ddp_x2__bare.json").read_text()))


def assert_perfetto_opens(trace: dict[str, Any]) -> None:
    """https://ui.perfetto.dev reads the format of chrome://tracing: a list of events with a phase, a time in
    microseconds and a place, and names for the places."""
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    for event in spans:
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert {"pid", "tid"} <= event.keys()
    assert any(event["name"] == "aten::mm" and event["cat"] == "cpu_op" for event in spans)
    assert any("allreduce" in event["name"] for event in spans)  # what is exchanged is in it too
    named = {(event["name"], event["pid"]) for event in events if event["ph"] == "M"}
    assert {("process_name", event["pid"]) for event in spans if event["cat"] == "cpu_op"} <= named


def test_the_gpu_check_runs_its_whole_path_on_a_tiny_model(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    finished = run([sys.executable, str(ROOT / "scripts/gpu_check.py"), "--tiny", "--json", str(report)], timeout=400)
    found = json.loads(report.read_text())
    assert found["is_right"]
    assert 0 < found["bf16_relative_error"]["video"] < 2e-2
    names = [row["name"] for row in found["training"] if "step_seconds" in row]
    assert names == ["eager + checkpointing", "eager", "compiled + checkpointing", "compiled"]
    assert found["validation"]["sample_of_30_steps_seconds"] > 0
    assert "LoRA step" in finished.output
