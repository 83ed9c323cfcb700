"""The meaning of environment specs: names of entries, bounds of real numbers, masks of actions.

Pure.

May import: rlstack.
"""

# Entries of dict observations.
ACTION_MASK = "action_mask"  # marks the legal actions
CRITIC_STATE = "critic_state"  # only critics see it: a game's state
SEAT = "seat"  # the number of the seat
# Entries of the extras of joint rows, one number for each seat. ALIVE is 1 while a seat's
# game goes on: its action counts, or its value where a time limit ends the game.
ALIVE, REWARDS = "alive", "rewards"
