"""A transformer over the entities of a step; the module `transformer` combines the others."""
