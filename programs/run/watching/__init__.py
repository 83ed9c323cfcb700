"""`rlstack watch`: the policy of a run in its environment, in the terminal or as a video."""
