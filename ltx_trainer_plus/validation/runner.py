"""Validation from the trainer's side: one call generates all samples, spread over the ranks, and disturbs nothing."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import gather_objects
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.tracking.progress import TrainingProgress
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.decode import SampleDecoder, write_sample
from ltx_trainer_plus.validation.denoise import Guidance, denoise
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests
from ltx_trainer_plus.validation.states import initial_state


@dataclass(frozen=True)
class SampleFile:
    """One generated file.

    Attributes:
        index: the sample's number in the run file, from 1.
        fps: frames per second of the video.
    """

    path: Path
    prompt: str
    index: int
    fps: float


class ValidationRunner:
    """Generates the samples of a run file.

    Args:
        contexts: of all its prompts.
        model_path: pipeline folder with the VAEs and the vocoder.
        output_dir: the run folder; files go to `samples/` in it.
        progress: is told which sample is at which denoising step.
    """

    def __init__(
        self,
        config: ValidationConfig,
        contexts: PromptContexts,
        *,
        model_path: Path,
        geometry: LatentGeometry,
        topology: Topology,
        output_dir: Path,
        progress: TrainingProgress | None = None,
    ) -> None:
        self._requests = sample_requests(config)
        self._guidance = Guidance.of(config)
        self._sigmas = inference_sigmas(config.inference_steps)
        self._contexts = contexts
        self._model_path = model_path
        self._geometry = geometry
        self._topology = topology
        self._folder = output_dir / "samples"
        self._progress = progress or TrainingProgress()

    def run(self, handle: ModelHandle, step: int) -> list[SampleFile]:
        """Generate every sample with the model as it is after `step` training steps.

        A collective. The model's training flags and all random states are the same afterwards, and no gradient is
        recorded.

        Returns:
            All files of all ranks, in the order of the run file, on every rank.
        """
        device = self._topology.device
        with torch.no_grad(), _untouched_randomness(device):
            with handle.evaluating():
                denoised = [(request, self._denoise(handle, request)) for request in self._dealt()]
            # Only now, so that no rank's forward waits for another rank's decoding.
            decoder = SampleDecoder(self._model_path, self._geometry, device)
            files = []
            for request, (video, audio) in denoised[: len(self._own())]:
                name = f"step_{step:06d}_{request.index + 1}"
                path = write_sample(self._folder / name, decoder.decode(request, video, audio))
                files.append(SampleFile(path, request.prompt, request.index + 1, request.frame_rate))
        self._progress.validation_done()
        everyones = gather_objects(files, self._topology)
        return sorted((file for rank in everyones for file in rank), key=lambda file: file.index)

    def _own(self) -> tuple[SampleRequest, ...]:
        """The samples that this rank makes."""
        return self._requests[self._topology.rank :: self._topology.world_size]

    def _dealt(self) -> tuple[SampleRequest, ...]:
        """The samples that this rank denoises: its own, and where others have one more, once more the first.

        Every rank runs the same number of forwards, because a forward of a sharded model needs all ranks.
        """
        own = self._own()
        rounds = -(-len(self._requests) // self._topology.world_size)
        return own + self._requests[: rounds - len(own)]

    def _denoise(self, handle: ModelHandle, request: SampleRequest) -> tuple[Tensor | None, Tensor | None]:
        state = initial_state(
            request,
            self._contexts.positive[request.prompt],
            self._contexts.negative,
            geometry=self._geometry,
            transformer_config=handle.config,
            device=handle.device,
        )
        samples, steps = len(self._requests), len(self._sigmas) - 1

        def on_step(denoising_step: int) -> None:
            self._progress.validation(request.index + 1, samples, denoising_step, steps)

        return denoise(handle, state, self._guidance, self._sigmas, on_step)


@contextmanager
def _untouched_randomness(device: torch.device) -> Iterator[None]:
    """Put every random state back afterwards: what a decoder draws must not shift the training."""
    python, numpy = random.getstate(), np.random.get_state()
    kind = "cuda" if device.type == "cpu" else device.type
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
