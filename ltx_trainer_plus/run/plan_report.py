"""What a run is about to do, for a person to read before it starts."""

from rich.console import Console
from rich.table import Table

from ltx_trainer_plus.config import TrainerConfig
from ltx_trainer_plus.data.order import epoch_length
from ltx_trainer_plus.flow.references import ReferenceScale
from ltx_trainer_plus.parallel.plan import ParallelPlan
from ltx_trainer_plus.run.preflight import Preflight
from ltx_trainer_plus.validation.checks import forwards_per_sample


def print_plan(config: TrainerConfig, plan: ParallelPlan, facts: Preflight, console: Console | None = None) -> None:
    """Print the plan of a run as a table."""
    table = Table(show_header=False, title="Plan", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(config, plan, facts):
        table.add_row(name, value)
    (console or Console()).print(table)


def _rows(config: TrainerConfig, plan: ParallelPlan, facts: Preflight) -> list[tuple[str, str]]:
    optimization, world, data_ranks = config.optimization, plan.topology.world_size, plan.topology.data_ranks
    part = ("process", "processes") if data_ranks == world else ("data rank", "data ranks")
    global_batch = optimization.batch_size * optimization.gradient_accumulation_steps * data_ranks
    dtype = str(plan.compute_dtype).removeprefix("torch.")
    rows = [
        ("model", f"{config.model.model_path}, {facts.num_blocks} blocks"),
        ("streams", f"video {config.training_strategy.video_role}, audio {config.training_strategy.audio_role}"),
        ("given", _given(config, facts)),
        (
            "layout",
            f"{plan.layout}, {world} process{'es' if world > 1 else ''} on {plan.topology.device.type}, {dtype}",
        ),
        ("training", config.model.training_mode),
        ("parameters", f"{facts.trained:,} trained, {facts.frozen:,} frozen"),
    ]
    if config.model.training_mode == "lora":
        rows.append(("adapters", f"rank {config.lora.rank} on {len(facts.lora_targets)} linear layers"))
    shapes = len(set(facts.dataset.shapes))
    epoch = epoch_length(facts.dataset.shapes, config.shape_group)
    rows += [
        ("samples", f"{len(facts.dataset)} of {shapes} shape{'s' if shapes > 1 else ''} in {facts.dataset.root}"),
        ("held out", str(len(facts.held_out)) if facts.held_out is not None else "nothing"),
        ("damaged", "\n".join(f"{name}: {reason}" for name, reason in facts.dataset.unreadable) or "nothing"),
        ("left out", "\n".join(f"{name}: {reason}" for name, reason in facts.dataset.skipped) or "nothing"),
        (
            "global batch",
            f"{global_batch} = {optimization.batch_size} per {part[0]} x {optimization.gradient_accumulation_steps} "
            f"micro-batches x {data_ranks} {part[1]}",
        ),
        ("steps per epoch", f"{epoch / global_batch:g}"),
        ("steps", f"{optimization.steps} ({optimization.steps * global_batch / epoch:.1f} epochs)"),
        ("validation", _validation(config)),
        ("run folder", str(config.output_dir)),
    ]
    return rows


def _given(config: TrainerConfig, facts: Preflight) -> str:
    lines = []
    for name, stream in (("video", config.training_strategy.video), ("audio", config.training_strategy.audio)):
        for entry in stream.conditions if stream else ():
            fields = entry.model_dump(exclude={"type", "probability"})
            details = ", ".join(f"{key} {value}" for key, value in fields.items())
            always = "" if entry.probability == 1 else f", in {entry.probability:.0%} of the samples"
            lines.append(f"{name}: {entry.type}{f' ({details})' if details else ''}{always}")
    scale = facts.reference_scale
    if scale != ReferenceScale():
        lines.append(f"video references are smaller by {scale.spatial} in size and by {scale.temporal} in frame rate")
    return "\n".join(lines) or "nothing"


def _validation(config: TrainerConfig) -> str:
    if not config.validation.makes_samples:
        return "never"
    validation = config.validation
    assert validation.interval is not None
    forwards = forwards_per_sample(validation)
    each = " and ".join(map(str, sorted(set(forwards))))
    first = "" if validation.skip_initial_validation else "before the first step, "
    return (
        f"{first}every {validation.interval} steps and at the end; each time {len(forwards)} samples x {each} forwards "
        f"= {sum(forwards)}"
    )
