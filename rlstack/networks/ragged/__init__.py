"""The parts of `rlstack.networks.ragged.transformer`: a transformer over the entities of a step."""
