"""One optimizer step: what is trained, what is summed over ranks, what happens when it is not finite."""
