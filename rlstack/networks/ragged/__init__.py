"""A transformer over the entities of a step; `transformer` builds it of the other modules."""
