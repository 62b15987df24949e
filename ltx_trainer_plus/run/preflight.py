"""Everything that can be wrong with a run, found from metadata before anything expensive starts."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ltx_trainer_plus.config import ConfigError, Problem, TrainerConfig
from ltx_trainer_plus.config.conditions import MaskCondition, ReferenceCondition
from ltx_trainer_plus.config.validation import HeldOutConfig
from ltx_trainer_plus.data.precomputed import PrecomputedDataset
from ltx_trainer_plus.data.sample_files import DataError
from ltx_trainer_plus.flow.positions import LatentGeometry
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.models import transformer_on_meta
from ltx_trainer_plus.models.components import read_vae_factors
from ltx_trainer_plus.models.lora import lora_target_names
from ltx_trainer_plus.models.pipeline_folder import check_components
from ltx_trainer_plus.models.reach import reachable_parameters
from ltx_trainer_plus.models.transformer import LTXTransformer
from ltx_trainer_plus.step.optimizers import optimizer_problems
from ltx_trainer_plus.strategies.checks import condition_problems, reference_scale
from ltx_trainer_plus.tracking.backend import backend_problems
from ltx_trainer_plus.validation.checks import check_validation
from ltx_trainer_plus.validation.condition_files import check_condition_files
from ltx_trainer_plus.validation.requests import sample_requests, with_reference_scale


@dataclass(frozen=True)
class Preflight:
    """What the checks found out on the way, so that the run need not look again.

    Attributes:
        held_out: samples that are scored and never trained on, or None.
        needs_connectors: the data holds text features before the connectors.
        reachable: names of the transformer's parameters that this run's loss reaches.
        lora_targets: names of the linear layers that get an adapter; empty in full fine-tuning.
        trained, frozen: numbers of parameters.
        reference_scale: of the video references; 1 where there are none.
    """

    geometry: LatentGeometry
    dataset: PrecomputedDataset
    held_out: PrecomputedDataset | None
    needs_connectors: bool
    num_blocks: int
    uses_keyframes: bool
    reachable: frozenset[str]
    lora_targets: tuple[str, ...]
    trained: int
    frozen: int
    reference_scale: ReferenceScale


def check_run(config: TrainerConfig) -> Preflight:
    """Check files, model metadata, data and validation against each other.

    Raises:
        ConfigError: with all problems that were found.
    """
    problems = [*optimizer_problems(config.optimization), *backend_problems(config)]
    try:
        transformer = transformer_on_meta(config.model.model_path)
    except (OSError, ValueError) as error:
        problems.append(Problem("model.model_path", str(error)))
    try:
        dataset = open_dataset(config)
        shapes = dataset.shapes
    except DataError as error:
        problems.append(Problem("data.preprocessed_data_root", str(error)))
    held_out: PrecomputedDataset | None = None
    if not problems and config.validation.loss is not None:
        try:
            dataset, held_out = _split(config, config.validation.loss, dataset)
            shapes = dataset.shapes
        except DataError as error:
            problems.append(Problem("validation.loss", str(error)))
    if problems:  # the checks below need both
        raise ConfigError(problems)
    geometry = LatentGeometry.of(transformer.config)
    reachable = reachable_parameters(
        transformer.config,
        video=config.training_strategy.video_role,
        audio=config.training_strategy.audio_role,
    )
    targets: list[str] = []
    if config.model.training_mode == "lora":
        try:
            targets = lora_target_names(transformer, config.lora.target_modules, reachable)
        except ValueError as error:
            problems.append(Problem("lora.target_modules", str(error)))
    scored = held_out.shapes if held_out is not None else []
    needs_connectors = any(shape.text_kind == "features" for shape in [*shapes, *scored])
    problems += _data_problems(dataset, transformer.config)
    problems += _data_problems(held_out, transformer.config) if held_out is not None else []
    unfit = condition_problems(config.training_strategy, dataset, geometry)
    problems += unfit
    if held_out is not None and not unfit:
        problems += condition_problems(config.training_strategy, held_out, geometry)
    scale = ReferenceScale() if unfit else reference_scale(config.training_strategy, dataset)
    if needs_connectors:
        problems += [
            Problem("model.model_path", text)
            for text in check_components(config.model.model_path, needed=("connectors",))
        ]
    problems += validation_problems(config, geometry, transformer.num_blocks, scale)
    if problems:
        raise ConfigError(problems)
    trained = _adapter_size(transformer, targets, config.lora.rank) if targets else _size(transformer, reachable)
    frozen = _size(transformer) - (0 if targets else trained)
    return Preflight(
        geometry=geometry,
        dataset=dataset,
        held_out=held_out,
        needs_connectors=needs_connectors,
        num_blocks=transformer.num_blocks,
        uses_keyframes=bool(transformer.config.get("use_keyframes_abs_pos_embedding", False)),
        reachable=reachable,
        lora_targets=tuple(targets),
        trained=trained,
        frozen=frozen,
        reference_scale=scale,
    )


def check_equal_forwards(config: TrainerConfig, facts: Preflight) -> None:
    """For sharded layouts, where every forward is a collective: all ranks must run equally many.

    A micro-batch is split where its groups differ in shape or in the references that they drew.

    Raises:
        ConfigError: micro-batches hold several groups, and these can differ.
    """
    size = config.optimization.batch_size
    streams = (config.training_strategy.video, config.training_strategy.audio)
    entries = [entry for stream in streams if stream is not None for entry in stream.conditions]
    is_drawn = any(isinstance(entry, ReferenceCondition) and 0 < entry.probability < 1 for entry in entries)
    shapes = len(set(facts.dataset.shapes))
    if config.shape_group < size and (is_drawn or shapes > 1):
        why = f"samples have {shapes} shapes" if shapes > 1 else "references are drawn with a probability below 1"
        message = (
            f"micro-batches of {size} samples hold several groups, which need forwards of their own ({why}). A sharded "
            "model takes part in every forward of every process, and their numbers would differ"
        )
        raise ConfigError(
            [Problem("data.shape_group", message, config.shape_group, f"Set it to {size}, or leave it out")]
        )


def _split(
    config: TrainerConfig, settings: HeldOutConfig, dataset: PrecomputedDataset
) -> tuple[PrecomputedDataset, PrecomputedDataset]:
    """What is trained on, and what is held out."""
    if settings.preprocessed_data_root is not None:
        held_out = open_dataset(config, settings.preprocessed_data_root)
        if held_out.root.resolve() == dataset.root.resolve():
            raise DataError(
                "preprocessed_data_root is the data that is trained on: give another folder, or a fraction."
            )
        return dataset, held_out
    assert settings.fraction is not None
    # By name, so that a sample stays on its side when others are added.
    places = {name: _place(name) for name in dataset.names}
    chosen = {name for name, place in places.items() if place < settings.fraction} or {
        min(places, key=places.__getitem__)
    }
    rest = places.keys() - chosen
    if not rest:
        raise DataError(
            f"fraction: {settings.fraction:g} of {len(places)} samples leaves nothing to train on. Lower it, or "
            "prepare more samples."
        )
    return dataset.only(rest), dataset.only(chosen)


def _place(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def open_dataset(config: TrainerConfig, root: Path | None = None) -> PrecomputedDataset:
    """The prepared samples of the streams that this run uses, with their masks and references.

    Args:
        root: another folder than the configuration's.
    """
    video, audio = config.training_strategy.video, config.training_strategy.audio
    masks: dict[str, None] = {}
    references: dict[str, Literal["video", "audio"]] = {}
    streams: tuple[tuple[Literal["video", "audio"], Any], ...] = (("video", video), ("audio", audio))
    for name, stream in streams:
        for condition in stream.conditions if stream else ():
            if isinstance(condition, MaskCondition):
                masks[condition.mask_dir] = None
            elif isinstance(condition, ReferenceCondition):
                references[condition.latents_dir] = name
    return PrecomputedDataset(
        root or config.data.preprocessed_data_root,
        video_dir=video.latents_dir if video else None,
        audio_dir=audio.latents_dir if audio else None,
        masks=tuple(masks),
        references=references,
        skip_unreadable=config.data.on_error == "skip",
    )


def _data_problems(dataset: PrecomputedDataset, model: Mapping[str, Any]) -> list[Problem]:
    """Compare every shape with the model: data prepared with another model fails here, not in a forward."""
    captions = model["caption_channels"] if model["use_prompt_embeddings"] else None
    found: dict[tuple[str, int], Problem] = {}  # one for each kind of fault, naming the first sample that has it

    def expect(name: str, what: str, given: int, wanted: int) -> None:
        if given != wanted:
            text = (
                f"sample {name}: {what} has {given} channels, the model takes {wanted}. The data was prepared "
                "with another model: prepare it again with this one, or set model.model_path to the one that made it"
            )
            found.setdefault((what, given), Problem("data.preprocessed_data_root", text))

    for name, shape in zip(dataset.names, dataset.shapes, strict=True):
        if shape.video is not None:
            expect(name, "the video latent", shape.video[0], model["in_channels"])
        if shape.audio is not None:
            channels, _, bins = shape.audio
            expect(name, "an audio latent step", channels * bins, model["audio_in_channels"])
        for folder, size in shape.references:
            if len(size) == 4:
                expect(name, f"the reference in {folder}", size[0], model["in_channels"])
            else:
                of_step = f"an audio latent step of the reference in {folder}"
                expect(name, of_step, size[0] * size[2], model["audio_in_channels"])
        if shape.text_kind == "context":
            if shape.video is not None:
                expect(name, "the video caption", shape.text_video[-1], captions or model["cross_attention_dim"])
            if shape.audio is not None:
                expect(name, "the audio caption", shape.text_audio[-1], captions or model["audio_cross_attention_dim"])
    return list(found.values())


def validation_problems(
    config: TrainerConfig, geometry: LatentGeometry, num_blocks: int, scale: ReferenceScale
) -> list[Problem]:
    """What keeps this model from making the samples: missing components, sizes, guidance, files of conditions.

    Args:
        scale: of video references that leave theirs open.
    """
    if not config.validation.makes_samples:
        return []
    needed = ["text_encoder", "connectors"]
    validation = with_reference_scale(config.validation, scale)
    requests = sample_requests(validation)
    has_video = any(request.video != "absent" for request in requests)
    needed += ["vae"] if has_video else []
    needed += ["audio_vae", "vocoder"] if any(request.audio != "absent" for request in requests) else []
    missing = check_components(config.model.model_path, needed=needed, text_encoder_path=config.model.text_encoder_path)
    if missing:
        remedy = "Or set validation.interval: null to train without samples"
        return [Problem("validation.samples", f"{text}\n  {remedy}") for text in missing]
    factors = (geometry.temporal, geometry.spatial)
    if has_video:
        factors = read_vae_factors(config.model.model_path)
    problems = check_validation(validation, factors, num_blocks)
    # Files are read only for conditions that could be met.
    return problems or check_condition_files(requests, geometry)


def _size(transformer: LTXTransformer, names: frozenset[str] | None = None) -> int:
    return sum(p.numel() for name, p in transformer.named_parameters() if names is None or name in names)


def _adapter_size(transformer: LTXTransformer, targets: list[str], rank: int) -> int:
    # A weight is (out, in); its adapter is (rank, in) and (out, rank).
    return sum(rank * sum(transformer.get_parameter(f"{name}.weight").shape) for name in targets)
