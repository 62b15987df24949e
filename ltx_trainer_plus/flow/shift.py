"""The shift towards more noise of longer sequences, which training and inference share."""

# Two official anchors; the line through them goes on beyond both.
FEW_TOKENS, SHIFT_AT_FEW = 1024, 0.95
MANY_TOKENS, SHIFT_AT_MANY = 4096, 2.05


def shift_at(tokens: int) -> float:
    """The shift of a sequence of `tokens`: the mean of the logit-normal that training draws from, and the logarithm of
    what the inference schedule is stretched by."""
    slope = (SHIFT_AT_MANY - SHIFT_AT_FEW) / (MANY_TOKENS - FEW_TOKENS)
    return SHIFT_AT_FEW + slope * (tokens - FEW_TOKENS)
