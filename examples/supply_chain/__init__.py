"""A small supply chain: a simulator, its Gymnasium wrapper, a planner's rule, and presets."""
