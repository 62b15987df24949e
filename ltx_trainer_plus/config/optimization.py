"""The `optimization` and `flow_matching` sections, with the parameters of each scheduler and of each sigma sampler."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ltx_trainer_plus.config.base import FromList, Section

SchedulerType = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "step"]
SamplingMode = Literal["uniform", "shifted_logit_normal"]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class ConstantParams(Section):
    """No parameters."""


class LinearParams(Section):
    """torch's LinearLR over all steps."""

    start_factor: float = Field(default=1.0, gt=0, le=1)
    end_factor: float = Field(default=0.1, ge=0, le=1)


class CosineParams(Section):
    """torch's CosineAnnealingLR over all steps."""

    eta_min: float = Field(default=0.0, ge=0)


class RestartParams(Section):
    """torch's CosineAnnealingWarmRestarts. T_0 null = a quarter of the steps."""

    T_0: int | None = Field(default=None, gt=0)
    T_mult: int = Field(default=1, ge=1)
    eta_min: float = Field(default=5e-5, ge=0)


class PolynomialParams(Section):
    """torch's PolynomialLR over all steps."""

    power: float = Field(default=1.0, gt=0)


class StepParams(Section):
    """torch's StepLR. step_size null = half of the steps."""

    step_size: int | None = Field(default=None, gt=0)
    gamma: float = Field(default=0.1, gt=0, le=1)


SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "constant": ConstantParams,
    "linear": LinearParams,
    "cosine": CosineParams,
    "cosine_with_restarts": RestartParams,
    "polynomial": PolynomialParams,
    "step": StepParams,
}

OPTIMIZERS: dict[str, str] = {"adamw": "torch.optim.AdamW", "prodigy": "prodigyopt.Prodigy"}
"""Optimizers that have a name; every other is chosen by the path of its class."""


class OptimizationConfig(Section):
    """Optimizer, learning rate and batch. `batch_size` is per process."""

    learning_rate: float = Field(default=5e-4, gt=0)
    steps: int = Field(default=3000, gt=0)
    batch_size: int = Field(default=2, gt=0)
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)  # 0 = no clipping
    optimizer_type: str = "adamw"  # adamw, prodigy, or the dotted path of a torch.optim.Optimizer class
    optimizer_params: dict[str, Any] = Field(default_factory=dict)  # for its constructor
    scheduler_type: SchedulerType = "linear"
    scheduler_params: dict[str, Any] = Field(default_factory=dict)
    enable_gradient_checkpointing: bool = False
    # These three are AdamW's; another optimizer takes its own in optimizer_params.
    weight_decay: float = Field(default=0.01, ge=0)
    betas: Annotated[tuple[_Beta, _Beta], FromList] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    max_bad_steps: int | None = Field(default=10, gt=0)  # skipped (not finite) steps in a row that end the run

    def scheduler_arguments(self) -> dict[str, Any]:
        """Every argument that torch's scheduler of this type takes beside the optimizer, defaults filled in.

        Source: the official trainer's defaults; T_0 and step_size are at least 1 so that a short run works.
        """
        given = SCHEDULER_PARAMS[self.scheduler_type].model_validate(self.scheduler_params).model_dump()
        match self.scheduler_type:
            case "linear" | "polynomial":
                return {**given, "total_iters": self.steps}
            case "cosine":
                return {**given, "T_max": self.steps}
            case "cosine_with_restarts":
                return {**given, "T_0": given["T_0"] or max(1, self.steps // 4)}
            case "step":
                return {**given, "step_size": given["step_size"] or max(1, self.steps // 2)}
        return given


class UniformParams(Section):
    """Sigma uniform in [min_value, max_value]."""

    min_value: float = Field(default=0.0, ge=0, le=1)
    max_value: float = Field(default=1.0, ge=0, le=1)


class ShiftedLogitNormalParams(Section):
    """`eps`: where draws are reflected at the ends. `uniform_prob`: share of draws that are uniform instead."""

    std: float = Field(default=1.0, gt=0)
    eps: float = Field(default=1e-3, ge=0, lt=0.5)
    uniform_prob: float = Field(default=0.1, ge=0, le=1)


SAMPLING_PARAMS: dict[str, type[Section]] = {
    "uniform": UniformParams,
    "shifted_logit_normal": ShiftedLogitNormalParams,
}


class FlowMatchingConfig(Section):
    """How the training sigma is drawn."""

    timestep_sampling_mode: SamplingMode = "shifted_logit_normal"
    timestep_sampling_params: dict[str, Any] = Field(default_factory=dict)
