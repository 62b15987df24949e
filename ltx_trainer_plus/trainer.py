"""A run from start to end: what is made in which order, and wired to what."""

import logging
from contextlib import ExitStack, closing
from functools import partial

from ltx_trainer_plus.checkpoints.adapters import load_weights, read_reference_scale
from ltx_trainer_plus.checkpoints.resume import Found
from ltx_trainer_plus.checkpoints.writer import CheckpointWriter
from ltx_trainer_plus.config import TrainerConfig, config_as_dict
from ltx_trainer_plus.data.loader import training_loader
from ltx_trainer_plus.data.order import SampleOrder
from ltx_trainer_plus.errors import UserError
from ltx_trainer_plus.model_handle import ModelHandle
from ltx_trainer_plus.models.text import TextConnectors, load_connectors
from ltx_trainer_plus.parallel.ending import say_once
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.parallel.prepare import load_model
from ltx_trainer_plus.parallel.topology import LaunchRequest, Topology, started_by_single_process_launcher
from ltx_trainer_plus.run.beginning import find_beginning
from ltx_trainer_plus.run.interrupt import StopRequest, follow_parent_death
from ltx_trainer_plus.run.loop import TrainingLoop, TrainingResult
from ltx_trainer_plus.run.preflight import Preflight, check_equal_forwards, check_run
from ltx_trainer_plus.step.train_step import TrainStep
from ltx_trainer_plus.step.trained import Trained
from ltx_trainer_plus.strategies.flexible import FlexibleStrategy
from ltx_trainer_plus.tracking.tracker import Tracker
from ltx_trainer_plus.validation.cache import encode_validation_prompts
from ltx_trainer_plus.validation.conditions import encode_conditions
from ltx_trainer_plus.validation.given import GivenSample
from ltx_trainer_plus.validation.held_out import HeldOutLoss
from ltx_trainer_plus.validation.requests import sample_requests, with_reference_scale
from ltx_trainer_plus.validation.runner import ValidationRunner

logger = logging.getLogger(__name__)


class Trainer:
    """One run. Every process of a launch makes one from the same configuration.

    Raises:
        LaunchError: the launch and the configuration contradict each other, or processes are missing.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._lora = config.lora if config.model.training_mode == "lora" else None
        if started_by_single_process_launcher():
            follow_parent_death()
        self.plan = ParallelPlan.decide(config, Topology.start(config.device), LaunchRequest.read())
        self.topology = self.plan.topology

    def check(self) -> Preflight:
        """Find what is wrong with the run, from metadata, without starting it.

        Raises:
            ConfigError: with all problems.
        """
        facts = check_run(self._config)
        if self.plan.is_sharded:
            check_equal_forwards(self._config, facts)
        return facts

    def train(self) -> TrainingResult:
        """Train to the last step, or until a signal asks to stop; then save and return.

        Raises:
            ConfigError, CheckpointError, RunFolderError: before anything expensive has started.
        """
        config, topology = self._config, self.topology
        facts = self.check()
        if facts.dataset.skipped and topology.is_main:
            left_out = "\n".join(f"  {name}: {reason}" for name, reason in facts.dataset.skipped)
            logger.warning("%d samples are left out:\n%s", len(facts.dataset.skipped), left_out)
        with ExitStack() as stack:
            # Already now: a signal while things load is obeyed after the first step, with a checkpoint.
            stop = stack.enter_context(StopRequest())
            beginning = find_beginning(config, topology, facts.dataset.names, stack)
            found, state, data = beginning.found, beginning.state, beginning.data
            start = data.step
            contexts = encode_validation_prompts(config, topology) if config.validation.makes_samples else None
            given = self._encode_conditions(facts) if config.validation.makes_samples else ()
            trained = Trained.start(self._load_model(facts, found), config, state)
            tracker = stack.enter_context(
                Tracker(
                    config,
                    beginning.folder,
                    topology.device,
                    start_step=start,
                    resume_ids=beginning.tracker_ids,
                    is_main=topology.is_main,
                )
            )
            strategy = FlexibleStrategy(
                config.training_strategy.video,
                config.training_strategy.audio,
                facts.geometry,
                config.flow_matching,
                uses_keyframes=facts.uses_keyframes,
                shape_group=data.shape_group,
            )
            step = TrainStep(
                trained,
                strategy,
                connectors=self._load_connectors(facts),
                seed=config.seed,
                samples=config.optimization.batch_size * config.optimization.gradient_accumulation_steps,
                max_grad_norm=config.optimization.max_grad_norm,
                has_dropout=self._lora is not None and self._lora.dropout > 0,
            )
            saver = CheckpointWriter(
                config,
                topology,
                beginning.store,
                trained,
                metadata=facts.reference_scale.as_metadata(),
                data=data,
                info={
                    "config": config_as_dict(config),
                    **{f"{name}_id": tracker_id for name, tracker_id in tracker.ids.items()},
                },
            )
            stack.push(lambda kind, *_: None if kind is KeyboardInterrupt else saver.close())
            validation = None
            if contexts is not None:
                validation = ValidationRunner(
                    config.validation,
                    contexts,
                    model_path=config.model.model_path,
                    geometry=facts.geometry,
                    topology=topology,
                    sample_path=beginning.folder.sample,
                    given=given,
                    progress=tracker.progress,
                    should_stop=lambda: stop.received,
                )
            loop = TrainingLoop(
                config,
                topology,
                trained,
                step=step,
                saver=saver,
                validation=validation,
                tracker=tracker,
                stop=stop,
                held_out=self._held_out(facts, strategy, step),
            )
            batches = stack.enter_context(
                closing(
                    training_loader(
                        facts.dataset,
                        SampleOrder(facts.dataset.shapes, seed=config.seed, shape_group=data.shape_group),
                        start=data.position,
                        data_rank=topology.data_rank,
                        data_ranks=topology.data_ranks,
                        batch_size=config.optimization.batch_size,
                        accumulation=config.optimization.gradient_accumulation_steps,
                        workers=config.data.num_dataloader_workers,
                        pin_memory=topology.device.type == "cuda",
                        skip_unreadable=config.data.on_error == "skip",
                        sequence_key=partial(strategy.sequence_key, seed=config.seed),
                    )
                )
            )
            try:
                result = loop.run(batches, start=start)
            except Exception as error:
                if topology.world_size > 1:
                    # At once: the others notice that this process is gone, and the launcher may end it before its
                    # traceback is printed.
                    if isinstance(error, UserError):
                        say_once(error)
                    else:
                        logger.error("Process %d failed: %s: %s", topology.rank, type(error).__name__, error)
                raise
            if topology.is_main:
                if result.interrupted:
                    advice = "Continue with the same command and model.load_checkpoint=latest."
                    if config.checkpoints.save_training_state == "off":
                        advice = "It cannot be continued, because checkpoints.save_training_state is off."
                    tracker.progress.say(f"Stopped by {stop.name} after step {result.step}. {advice}")
                tracker.progress.say(f"Saved: {result.weights or 'nothing'}")
                for title, location in tracker.locations.items():
                    tracker.progress.say(f"{title}: {location}")
        return result

    def _encode_conditions(self, facts: Preflight) -> tuple[GivenSample, ...]:
        requests = sample_requests(with_reference_scale(self._config.validation, facts.reference_scale))
        return encode_conditions(requests, self._config.model.model_path, facts.geometry, self.topology)

    def _held_out(self, facts: Preflight, strategy: FlexibleStrategy, step: TrainStep) -> HeldOutLoss | None:
        settings = self._config.validation.loss
        if settings is None or facts.held_out is None:
            return None
        return HeldOutLoss(
            facts.held_out,
            strategy,
            step.context,
            self.topology,
            levels=settings.sigmas,
            seed=self._config.validation.seed,
        )

    def _load_model(self, facts: Preflight, found: Found | None) -> ModelHandle:
        config, plan = self._config, self.plan
        handle = load_model(config, plan, lora_targets=facts.lora_targets, reachable=facts.reachable)
        if found is not None:
            load_weights(handle, found.weights, self._lora)
            trained_at = read_reference_scale(found.weights)
            if trained_at != facts.reference_scale and self.topology.is_main:
                logger.warning(
                    "%s was trained with video references of %s, this run's are of %s.",
                    found.weights,
                    trained_at,
                    facts.reference_scale,
                )
        return handle

    def _load_connectors(self, facts: Preflight) -> TextConnectors | None:
        if not facts.needs_connectors:
            return None
        return load_connectors(self._config.model.model_path, self.plan.compute_dtype, self.topology.device)
