"""Validation from the trainer's side: one call generates all samples, spread over the ranks, and disturbs nothing."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ltx_trainer_plus.config import ValidationConfig
from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.schedule import inference_sigmas
from ltx_trainer_plus.media.audio import write_wav
from ltx_trainer_plus.media.mel import SAMPLE_RATE
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.parallel.collectives import any_process, gather_objects
from ltx_trainer_plus.parallel.topology import Topology
from ltx_trainer_plus.tracking.progress import TrainingProgress
from ltx_trainer_plus.validation.cache import PromptContexts
from ltx_trainer_plus.validation.checks import sample_guidance
from ltx_trainer_plus.validation.decode import SampleDecoder, write_sample
from ltx_trainer_plus.validation.denoise import NO_FORWARDS, Forwards, Guidance, denoise
from ltx_trainer_plus.validation.given import NOTHING_GIVEN, GivenSample
from ltx_trainer_plus.validation.requests import SampleRequest, sample_requests
from ltx_trainer_plus.validation.states import initial_state

logger = logging.getLogger(__name__)


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
        given: what the conditions of each sample give, in their order; empty where no sample has any.
        model_path: pipeline folder with the VAEs and the vocoder.
        sample_path: a sample's file without its suffix (which depends on what is made), by training step and the
            sample's number in the run file (`RunFolder.sample`).
        progress: is told which sample is at which denoising step.
        should_stop: asked between denoising steps; as soon as it is true on one rank, all of them end, and files that
            are not made yet are left out.
    """

    def __init__(
        self,
        config: ValidationConfig,
        contexts: PromptContexts,
        *,
        model_path: Path,
        geometry: LatentGeometry,
        topology: Topology,
        sample_path: Callable[[int, int], Path],
        given: Sequence[GivenSample] = (),
        progress: TrainingProgress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._requests = sample_requests(config)
        self._guidance = Guidance.of(config)
        self._forwards = [sample_guidance(config, request).forwards for request in self._requests]
        self._sigmas = inference_sigmas(config.inference_steps)
        self._contexts = contexts
        self._given = given or (NOTHING_GIVEN,) * len(self._requests)
        self._model_path = model_path
        self._geometry = geometry
        self._topology = topology
        self._sample_path = sample_path
        self._progress = progress or TrainingProgress()
        self._should_stop = should_stop

    def run(self, handle: ModelHandle, step: int) -> list[SampleFile]:
        """Generate every sample with the model as it is after `step` training steps.

        A collective. The model's training flags and all random states are the same afterwards, and no gradient is
        recorded.

        Returns:
            All files of all ranks, in the order of the run file, on every rank.

        Raises:
            SamplesError: some rank could not make its samples; on every rank.
            SamplerFault: the same, for a fault of the program.
        """
        files: list[SampleFile] = []
        failure: Exception | None = None
        with torch.no_grad(), _untouched_randomness(self._topology.device):
            try:
                with handle.evaluating():
                    denoised = self._denoise_all(handle)
                # Only now, so that no rank's forward waits for another rank's decoding.
                if self._topology.leads_data_rank:
                    self._write_own(denoised[: len(self._own())], step, files)
            except Exception as error:
                failure = error
        self._progress.validation_done()
        told = f"process {self._topology.rank}: {type(failure).__name__}: {failure}" if failure else None
        is_fault = failure is not None and not isinstance(failure, _CAN_BE_MENDED)
        everyones = gather_objects((files, told, is_fault), self._topology)
        if failures := [told for _, told, _ in everyones if told is not None]:
            text = "The samples could not be made:\n" + "\n".join(f"  {told}" for told in failures)
            if any(is_fault for _, _, is_fault in everyones):
                raise SamplerFault(text) from failure
            raise SamplesError(text) from failure
        return sorted((file for files, _, _ in everyones for file in files), key=lambda file: file.index)

    def _write_own(
        self,
        denoised: Sequence[tuple[SampleRequest, tuple[Tensor | None, Tensor | None]]],
        step: int,
        files: list[SampleFile],
    ) -> None:
        """Decode and write this data rank's samples; what is written is noted in `files`."""
        decoder = SampleDecoder(self._model_path, self._geometry, self._topology.device)
        for request, (video, audio) in denoised:
            if self._should_stop is not None and self._should_stop():
                break
            given = self._given[request.index]
            name = self._sample_path(step, request.index + 1)
            path = write_sample(name, decoder.decode(request, video, audio, given.shown))
            for sound in given.heard:
                write_wav(name.with_name(f"{name.name}_reference.wav"), sound, SAMPLE_RATE)
            files.append(SampleFile(path, request.prompt, request.index + 1, request.frame_rate))

    def _own(self) -> tuple[SampleRequest, ...]:
        """The samples that this data rank makes."""
        return self._requests[self._topology.data_rank :: self._topology.data_ranks]

    def _dealt(self) -> tuple[SampleRequest, ...]:
        """The samples that this data rank denoises: its own, and where others have one more, once more the first.

        Every rank runs the same number of forwards, because a forward of a sharded model needs all ranks.
        """
        own = self._own()
        rounds = -(-len(self._requests) // self._topology.data_ranks)
        return own + self._requests[: rounds - len(own)]

    def _forwards_of_round(self, number: int) -> Forwards:
        """What some rank needs in a round, so that all of them run as many forwards."""
        ranks = self._topology.data_ranks
        together = self._forwards[number * ranks : (number + 1) * ranks]
        if len(together) < ranks:
            together = [*together, self._forwards[0]]
        return reduce(Forwards.together_with, together, NO_FORWARDS)

    def _denoise_all(self, handle: ModelHandle) -> list[tuple[SampleRequest, tuple[Tensor | None, Tensor | None]]]:
        """This rank's samples denoised; none when the ranks were asked to stop, or one of them failed."""
        try:
            denoised = [
                (request, self._denoise(handle, request, self._forwards_of_round(number)))
                for number, request in enumerate(self._dealt())
            ]
        except _Stopped:
            return []
        except Exception as error:
            # At once: the launcher may end this process before its traceback is out.
            logger.error("Process %d failed in validation: %s: %s", self._topology.rank, type(error).__name__, error)
            # The others ask after each denoising step, and once more at the end. A sharded model cannot wait for that:
            # its other ranks are inside a forward that needs this one, and end when this process does.
            if not handle.is_sharded:
                any_process(True, self._topology)
            raise
        return [] if any_process(False, self._topology) else denoised

    def _denoise(
        self, handle: ModelHandle, request: SampleRequest, forwards: Forwards
    ) -> tuple[Tensor | None, Tensor | None]:
        state = initial_state(
            request,
            self._contexts.positive[request.prompt],
            self._contexts.negative,
            geometry=self._geometry,
            transformer_config=handle.config,
            device=handle.device,
            given=self._given[request.index],
        )
        samples, steps = len(self._requests), len(self._sigmas) - 1

        def on_step(denoising_step: int) -> None:
            self._progress.validation(request.index + 1, samples, denoising_step, steps)
            # Asked by all ranks at the same step, so that they end at the same forward.
            if any_process(self._should_stop is not None and self._should_stop(), self._topology):
                raise _Stopped

        return denoise(handle, state, self._guidance, self._sigmas, on_step, at_least=forwards)


class SamplesError(UserError, RuntimeError):
    """Samples could not be made; every rank raises it alike, with what went wrong on which."""


class SamplerFault(RuntimeError):
    """Samples could not be made, and nobody but a programmer can mend it; every rank raises it alike."""


_CAN_BE_MENDED = (UserError, OSError, MemoryError, torch.OutOfMemoryError)


class _Stopped(Exception):
    """The ranks have agreed to end the validation."""


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
