"""What holds for all tests."""

import signal

from programs import xla

# As `rlstack train` does: the suite acts and learns on small networks.
xla.configure(convolutions=False)

# Who runs the suite in the background may have it ignore Ctrl-C, which its children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
