"""Where a run can be recorded: one module for each, named in `tracking.backends` and imported only by that name."""
