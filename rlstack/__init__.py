"""rlstack: stateless agents, and the drivers that run them in any topology."""
