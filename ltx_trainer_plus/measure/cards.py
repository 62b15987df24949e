"""Data sheets of cards."""

CARDS = {
    # Dense bf16 peak in TFLOP/s and memory in GB, by the data sheets.
    "a100-80": (312, 80),
    "h100": (989, 80),
    "h200": (989, 141),
    "b200": (2250, 180),
}
