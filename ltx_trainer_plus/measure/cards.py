"""Data sheets of cards."""

CARDS = {
    # Dense bf16 peak in TFLOP/s and memory in GB, by the data sheets.
    "a100-80": (312, 80),
    "h100": (989, 80),
    "h200": (989, 141),
    "b200": (2250, 180),
    "l40s": (362, 48),
}


def peak_tflops(device_name: str) -> int | None:
    """Dense bf16 peak of the card that the driver calls so (`NVIDIA H200`); None = it is not known."""
    kinds = {name.partition("-")[0].upper(): tflops for name, (tflops, _) in CARDS.items()}
    return next((tflops for kind, tflops in kinds.items() if kind in device_name), None)
