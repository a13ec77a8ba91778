"""What the engine would run for a model, layer by layer: ops, passes, kernels, costs, and why."""
