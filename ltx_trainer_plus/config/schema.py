"""The typed configuration: every field, its type, its bounds and its default."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ltx_trainer_plus.config.base import FromList, LocalPath, PathOrLatest, Section, Texts, off_is_false
from ltx_trainer_plus.config.optimization import FlowMatchingConfig, OptimizationConfig
from ltx_trainer_plus.config.strategy import StrategyConfig, TextToVideoConfig
from ltx_trainer_plus.config.validation import Seed, ValidationConfig

_Name = Annotated[str, Field(min_length=1)]


def _blocks(value: Any) -> Any:
    """`compile: blocks` names what is compiled and leaves the rest at its defaults; false is the launcher's `no`."""
    if value is False:
        return None
    return {} if value == "blocks" else value


class ModelConfig(Section):
    """Which model is trained. `text_encoder_path: null` means: from the pipeline folder `model_path`."""

    model_path: LocalPath
    text_encoder_path: LocalPath | None = None
    video_vae_path: LocalPath | None = None
    audio_vae_path: LocalPath | None = None
    training_mode: Literal["lora", "full"] = "lora"
    load_checkpoint: PathOrLatest | None = None  # a file, a folder, or `latest` of this run's own folder


class LoraConfig(Section):
    """Only read in `model.training_mode: lora`."""

    rank: int = Field(default=64, ge=2)
    alpha: int = Field(default=64, ge=1)
    dropout: float = Field(default=0.0, ge=0, le=1)
    target_modules: Annotated[tuple[_Name, ...], FromList, Field(min_length=1)] = ("to_k", "to_q", "to_v", "to_out.0")


class CompileConfig(Section):
    """torch.compile of every transformer block, in place; the fields are its arguments."""

    backend: _Name = "inductor"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    dynamic: bool | None = None  # null: shapes are fixed until a second one comes
    fullgraph: bool = True  # a block that cannot be one graph is an error, not a slow run


class AccelerationConfig(Section):
    """Precision, memory and how the model is spread."""

    mixed_precision_mode: Annotated[Literal["no", "fp16", "bf16"] | None, off_is_false("no")] = "bf16"
    quantization: Literal["int8-quanto", "int4-quanto", "int2-quanto", "fp8-quanto", "fp8uz-quanto"] | None = None
    load_text_encoder_in_8bit: bool = False
    offload_optimizer_during_validation: bool = False
    parallel: Literal["auto", "ddp", "fsdp2", "hsdp"] = "auto"  # auto: as the launcher says
    hsdp_replicas: int | None = Field(default=None, ge=2)  # null: as the launcher says, else one per host, else 2
    compile: Annotated[CompileConfig | None, BeforeValidator(_blocks)] = None  # `blocks`: with the defaults


class DataConfig(Section):
    """Prepared samples. `shape_group`: samples of one shape that stay together (null = optimization.batch_size)."""

    preprocessed_data_root: LocalPath
    num_dataloader_workers: int = Field(default=2, ge=0)
    shape_group: int | None = Field(default=None, gt=0)
    on_error: Literal["raise", "skip"] = "raise"  # skip: another sample takes the place of one that cannot be read


class CheckpointsConfig(Section):
    """Saving. `interval: null` saves at the end only; `keep_last_n: -1` keeps all."""

    interval: int | None = Field(default=None, gt=0)
    keep_last_n: int = Field(default=1, ge=-1)
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    no_resume: bool = False  # true: take the weights of model.load_checkpoint, not its training state
    # The official default, minimal, drops the optimizer; resuming exactly needs it.
    save_training_state: Annotated[Literal["full", "minimal", "off"], off_is_false("off")] = "full"
    # Also keep a moving average of what is trained, and validate with it: average = decay * average + rest * weights.
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    keep_best: bool = False  # keep the checkpoint with the lowest held-out loss (validation.loss) beside the last ones
    on_error: Literal["raise", "warn"] = "raise"  # what a checkpoint that cannot be written does to the run


class HubConfig(Section):
    """Uploading the result."""

    push_to_hub: bool = False
    hub_model_id: str | None = None


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = False
    project: _Name = "ltxv-trainer"
    entity: str | None = None
    tags: Texts = ()
    log_validation_videos: bool = True


class TrackingConfig(Section):
    """What is logged, and where to besides the run folder.

    `backends`: wandb, tensorboard, or the dotted path of a module that is one. `wandb.enabled: true` adds wandb.
    """

    log_every: int = Field(default=1, ge=1)  # steps
    backends: Annotated[tuple[_Name, ...], FromList] = ()


class TrainerConfig(Section):
    """A whole run. Made by `load_config`, which also checks what no single field shows."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    training_strategy: StrategyConfig = TextToVideoConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    acceleration: AccelerationConfig = AccelerationConfig()
    data: DataConfig
    validation: ValidationConfig = ValidationConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    hub: HubConfig = HubConfig()
    flow_matching: FlowMatchingConfig = FlowMatchingConfig()
    wandb: WandbConfig = WandbConfig()
    tracking: TrackingConfig = TrackingConfig()
    device: Literal["auto", "cpu"] = "auto"  # cpu: also where there is a GPU
    seed: Seed = 42
    output_dir: LocalPath = Path("outputs")

    @property
    def trackers(self) -> tuple[str, ...]:
        """The backends that record this run, each once."""
        return tuple(dict.fromkeys((*(["wandb"] if self.wandb.enabled else []), *self.tracking.backends)))

    @property
    def shape_group(self) -> int:
        """Samples of one shape that stay together in the data order."""
        return self.data.shape_group or self.optimization.batch_size
