"""What holds for all tests."""

from programs import xla

# As `rlstack train` does: the suite acts and learns on small networks.
xla.configure(convolutions=False)
