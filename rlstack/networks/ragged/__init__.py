"""The parts of `rlstack.networks.ragged_transformer`: a transformer over the entities of a step."""
