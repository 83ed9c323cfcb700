"""Seats of games as rows of a pool: games of several seats, and pools that policies share."""
