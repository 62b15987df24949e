"""Metrics over ranks: one reduction, the same numbers everywhere."""

from pathlib import Path

from tests.launch import run, torchrun_command

SCRIPT = """
import torch
import torch.distributed as dist
from ltx_trainer_plus.modality import Modality
from ltx_trainer_plus.strategies.flexible import ModelInputs, StreamInputs
from ltx_trainer_plus.strategies.loss import Losses
from ltx_trainer_plus.step.sums import MetricWindow

dist.init_process_group("gloo")
rank = dist.get_rank()
pending, seen = None, []
for step in range(3):
    window = MetricWindow("cpu")
    for micro_step in range(2):
        losses = torch.tensor([1.0, 3.0]) + 10 * rank + 100 * micro_step
        empty, sigma = torch.zeros(2, 5, 1), torch.full((2,), 0.35 + 0.1 * rank)
        video = Modality(latent=empty, sigma=sigma, timesteps=sigma, positions=empty, context=empty)
        window.add(ModelInputs(video=StreamInputs(video, target=empty)), Losses(losses, losses, None))
    window.set_step(grad_norm=torch.tensor(2.5), skipped=torch.tensor(float(step == 1)))
    if rank == 1 and step == 1:
        window.request_stop()
    previous, pending = pending, window.reduce_async()
    if previous is not None:
        seen.append(previous.read())
seen.append(pending.read())
both = [None, None]
dist.all_gather_object(both, seen)
assert both[0] == both[1]
assert [metrics.stop_requested for metrics in seen] == [False, True, False]
assert [metrics.skipped for metrics in seen] == [False, True, False]
assert all(metrics.loss == 57.0 and metrics.grad_norm == 2.5 and metrics.tokens == 40 for metrics in seen)
assert seen[0].losses() == {
    "loss": 57.0, "loss/video": 57.0, "loss/video/sigma_0.3-0.4": 52.0, "loss/video/sigma_0.4-0.5": 62.0
}
print(f"rank {rank} agrees")
dist.destroy_process_group()
"""


def test_two_ranks_read_the_same_means_and_agree_on_stopping(tmp_path: Path) -> None:
    script = tmp_path / "metrics_on_two_ranks.py"
    script.write_text(SCRIPT)
    output = run(torchrun_command(2, script), timeout=120).output
    assert "rank 0 agrees" in output
    assert "rank 1 agrees" in output
